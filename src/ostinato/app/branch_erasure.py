"""Erasure from a tenant's branch: it begins anew at the shared version, once that was trained without the forgotten people.

request (`ostinato forget --replay`, of the branch's own files) -> the shared training is through with it (`app.erasure`) -> if the branch
learned from the people, or began with a version that had: its refs, its ledger, its checkpoints and its training begin at the shared
version that is live -> its versions of before are deleted, and the certificate says so.

The worker may be killed at any instant: what was begun is begun again from the file that says so, and each act can be repeated.
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
    """The part in erasures of the worker that trains a tenant's branch: if the branch may know the people, it begins anew.

    It then has the weights and the optimizer's moments of the shared run, once nobody who is asked for is in these, and nothing of what it
    had learned itself. Until then it goes on as it was.

    Args:
        run: the branch's stores.
        learning: the trainer and what is around it.
        begin: lets training begin at a version, under numbers above the branch's own, and writes a checkpoint.
    """

    def __init__(self, run: Run, learning: Learning, begin: Callable[[PolicyVersion], Awaitable[None]]) -> None:
        super().__init__(run, learning)
        self._begin_at = begin
        self._shared = Home(serving_run(run.config).run.directory)
        self._knew: frozenset[str] = frozenset()  # the roots of its versions of before that are not deleted yet

    async def due(self) -> bool:
        """True if a beginning was begun, or is asked for and the shared training is through with everybody. Raises Corrupt."""
        if self.job is not None and self.job.phase == "replay":
            return True
        return bool(self._files.asked()) and await self._clean_start() is not None

    def knows_erased(self, live: PolicyVersion) -> bool:
        """True if somebody put a version of before there again, in the moment before it was deleted."""
        return live.hash in self._knew

    async def _clean_start(self) -> PolicyVersion | None:
        """The shared version that is live, once nobody who is asked for is in it; None before."""
        files, live = ErasureFiles(self._shared), await self._run.follower.resolve("control")
        asked, job = files.asked(), files.job()
        waits = bool(asked) or (job is not None and (job.phase == "replay" or (live is not None and job.knows(live))))
        return None if waits else live

    async def replay(self, say: Callable[[str, bool], None], *, fresh: bool) -> bool:
        """Begin anew, if the branch may know somebody; True if it did. Arguments and errors as `ErasureReplay.replay`."""
        going_on = self.job is not None and self.job.phase == "replay"
        job = self.job if going_on else await self._take_up(say)
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
            await asyncio.to_thread(delete_all, own)  # the certificate says that they are gone
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
        self._keep(done)
        logger.warning("the branch began anew at %s, without forgotten people", start)
        return True

    async def _take_up(self, say: Callable[[str, bool], None]) -> ErasureJob | None:
        """Take up the requests; None if the branch knows none of the people."""
        start, people = await self._clean_start(), self._files.asked()
        if start is None or not people:
            return None
        say("looking for what the branch learned from people who are forgotten", False)
        turns = await turns_learned(self._run, people, self._tokens)
        if not turns and not await self._began_with():
            logger.info("the branch learned nothing from whom `ostinato forget --replay` named")
            self._files.take(people)
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
        self._keep(job)
        self._files.take(people)
        return job

    async def _began_with(self) -> bool:
        """True if a ref of the branch names a shared version that knew somebody whom the shared training took out."""
        job = ErasureFiles(self._shared).job()
        if job is None:
            return False
        knew = await versions_between(self._run.store, job.first, job.last, self._shared.name)
        named = [await self._run.follower.resolve(ref) for ref in OWN_REFS]
        return any(job.knows(policy) and policy in knew for policy in named if policy is not None)

    def _is_over(self, job: ErasureJob, live: PolicyVersion) -> bool:
        return True

    async def _let_go(self, job: ErasureJob) -> None:
        """Move the branch's refs on, where a release worker that was judging meanwhile put what it knew."""
        assert job.begun is not None
        knew = await versions_between(self._run.store, job.first, job.last, self._run.name)
        self._knew = frozenset(policy.hash for policy in knew)
        await leave_versions(self._run, self._knew, job.begun[1])


async def turns_learned(run: Run, people: Sequence[ErasureRequest], tokens: ModelTokens) -> int:
    """How many turns of these people a branch's log has, if a step since the branch began would have differed without them; else 0.

    At least 1 if that cannot be told.
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
        logger.warning("what the branch learned from forgotten people cannot be told: %s", error)
        return max(1, len(refold.erased_turns))
    return 0
