"""Erasure from a tenant's branch: it restarts from the shared version, once that was trained without the forgotten people.

1. `ostinato forget --replay` writes a request into the branch's own files.
2. The branch waits until the shared training has done its erasure (`app.erasure`).
3. If the branch learned from the people, or began with a version that had, it restarts from the live shared version: its refs, ledger,
   checkpoints and training.
4. Its earlier versions are deleted, and the certificate says so.

The worker may be killed at any instant: a job that was begun is resumed from its file, and each step is idempotent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ostinato.app.branches import OWN_REFS, begin_anew, leave_versions, take_checkpoint
from ostinato.app.erasure import ErasureFiles, ErasureJob, ErasureReplay, ErasureRequest, delete_all, open_refold
from ostinato.app.evaluation import open_releases
from ostinato.app.storage import Home, Run, rows_of, serving_run
from ostinato.app.trainer import Learning, ModelTokens
from ostinato.core.errors import Conflict, Corrupt, NotFound
from ostinato.core.files import write_atomic
from ostinato.core.records import Batch, PolicyVersion
from ostinato.train.checkpoint import stored
from ostinato.weights.follow.follower import versions_between
from ostinato.weights.version.certificate import SHARED

logger = logging.getLogger(__name__)


class BranchErasure(ErasureReplay):
    """Erasures in the worker that trains a tenant's branch: if the branch may know the people, it restarts.

    It then has the weights and the optimizer's moments of the shared run, once nobody named in a request is in these, and nothing that it
    had learned itself. Until then it continues as before.

    Args:
        run: the branch's stores.
        learning: the trainer and the objects around it.
        begin: starts training at a version, with step numbers above the branch's own, and writes a checkpoint.
    """

    def __init__(self, run: Run, learning: Learning, begin: Callable[[PolicyVersion], Awaitable[None]]) -> None:
        super().__init__(run, learning)
        self._begin_at = begin
        self._shared = Home(serving_run(run.config).run.directory)
        # roots of the versions before the restart that are not deleted yet
        self._old_versions: frozenset[str] = frozenset()

    async def due(self) -> bool:
        """Return True if a restart is unfinished, or is requested and the shared training has erased everybody. Raises Corrupt."""
        if self.job is not None and self.job.phase == "replay":
            return True
        return bool(self._files.pending()) and await self._clean_start() is not None

    def knows_erased(self, live: PolicyVersion) -> bool:
        """Return True if somebody made a version from before the restart live again, before it was deleted."""
        return live.hash in self._old_versions

    async def _clean_start(self) -> PolicyVersion | None:
        """Return the live shared version once nobody named in a request is in it; None before."""
        files, live = ErasureFiles(self._shared), await self._run.follower.resolve("control")
        asked, job = files.pending(), files.job()
        waits = bool(asked) or (job is not None and (job.phase == "replay" or (live is not None and job.knows(live))))
        return None if waits else live

    async def replay(self, say: Callable[[str, bool], None], *, fresh: bool) -> bool:
        """Restart the branch if it may know somebody. Return True if it did. Arguments and errors as in `ErasureReplay.replay`."""
        resumed = self.job is not None and self.job.phase == "replay"
        job = self.job if resumed else await self._take_up(say)
        if job is None or job.begun is None:
            return False
        start = PolicyVersion(number=job.begun[0], hash=job.begun[1])
        own, trainer = self._run.home.checkpoints, self._parts.trainer
        moments = bool(stored(self._shared.checkpoints))
        if not moments and not fresh:
            raise Conflict(
                "a branch begins anew without forgotten people, and the shared trainer has no checkpoint to take moments from: restart "
                f"train@{self._run.config.run.tenant}, which does it first"
            )
        say(f"beginning anew at {start}, without forgotten people", False)
        await begin_anew(self._run, start)
        why = "the branch begins anew without forgotten people"
        await open_releases(self._run).ship(start, why, actor="ostinato forget --replay", anew=True)
        if own.exists():
            await asyncio.to_thread(delete_all, own)  # the certificate says that they are deleted
        if moments:
            await asyncio.to_thread(take_checkpoint, self._shared.checkpoints, own)
            await asyncio.to_thread(trainer.resume, own)
        await self._parts.released.refresh()
        await self._parts.desk.poll()
        await self._begin_at(start)
        last = trainer.step_count - 1
        await asyncio.to_thread(write_atomic, self._files.rows(job.id), "", durable=True)
        done = replace(job, last=last, start=last, version=job.begun)
        self._certify(done, "")
        self._save_job(done)
        logger.warning("the branch began anew at %s, without forgotten people", start)
        return True

    async def _take_up(self, say: Callable[[str, bool], None]) -> ErasureJob | None:
        """Take up the requests; return None if the branch knows none of the people."""
        start, people = await self._clean_start(), self._files.pending()
        if start is None or not people:
            return None
        say("looking for what the branch learned from people who are forgotten", False)
        turns = await turns_learned(self._run, people, self._tokens)
        if not turns and not await self._began_with():
            logger.info("the branch learned nothing from the people whom `ostinato forget --replay` named")
            self._files.remove(people)
            return None
        steps = [row.step async for row in rows_of(self._run.log, Batch)]
        last = max(steps, default=0)
        job = ErasureJob(
            id=secrets.token_hex(6),
            people=tuple(people),
            first=min(steps, default=0),
            last=last,
            start=last,
            checkpoint=f"{SHARED}{start}",
            erased_turns=turns,
            begun=(start.number, start.hash),
        )
        self._save_job(job)
        self._files.remove(people)
        return job

    async def _began_with(self) -> bool:
        """Return True if a ref of the branch names a shared version that knew somebody whom the shared training has erased."""
        job = ErasureFiles(self._shared).job()
        if job is None:
            return False
        knew = await versions_between(self._run.store, job.first, job.last, self._shared.name)
        named = [await self._run.follower.resolve(ref) for ref in OWN_REFS]
        return any(job.knows(policy) and policy in knew for policy in named if policy is not None)

    def _is_live(self, job: ErasureJob, live: PolicyVersion) -> bool:
        """Return True: a branch restarts only from a version that is live already."""
        return True

    async def _release_refs(self, job: ErasureJob) -> None:
        """Move refs away from earlier versions, to which a release worker may have moved them during the restart."""
        assert job.begun is not None
        knew = await versions_between(self._run.store, job.first, job.last, self._run.name)
        self._old_versions = frozenset(policy.hash for policy in knew)
        await leave_versions(self._run, self._old_versions, job.begun[1])


async def turns_learned(run: Run, people: Sequence[ErasureRequest], tokens: ModelTokens) -> int:
    """Return how many turns of these people a branch's log has, if a step since the branch began would differ without them; else 0.

    At least 1 if that cannot be determined.
    """
    own = [each for each in people if each.tenant == run.config.run.tenant]
    if not own:
        return 0
    begun, base = 0, await run.follower.resolve("base")
    async for row in rows_of(run.log, Batch):
        if row.base is not None and row.base == base:
            begun = row.step
    refold = open_refold(run.config, run.log, own, tokens, others=False)
    try:
        async for batch in refold.batches():
            if batch.changed and batch.row.step > begun:
                return max(1, len(refold.erased_turns))
    except (NotFound, Corrupt) as error:
        logger.warning("cannot determine what the branch learned from forgotten people: %s", error)
        return max(1, len(refold.erased_turns))
    return 0
