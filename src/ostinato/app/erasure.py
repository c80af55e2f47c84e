"""Erasure from the weights (exact machine unlearning): repeat the training since a person's first effect on it, without that person.

1. `ostinato forget --replay` writes a request, which the trainer takes up.
2. The trainer replays the batches of a `CreditRefold` from the last checkpoint before the first batch that differs.
3. It publishes the result as a version with a new number and continues training from it.
4. The gate judges the version like any candidate.
5. Once it is live, versions and checkpoints that knew the person are deleted, and the certificate gets the verdict.

From the first batch that differs on, a policy number in the log means the replay's own version, because the recorded one knew the person
and a KL penalty would pull the replay back to it. For the same reason nothing is promised about recorded log-probabilities. AdamW's
moments come from the checkpoint.

A tenant's branch is not replayed. It restarts from the shared version once that was trained without the person (`app.branch_erasure`).

All state is in `Home.erasure`. The trainer may be killed at any instant: the replay has checkpoints of its own, each step is deterministic,
and each step of the end is idempotent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from ostinato import __version__
from ostinato.app.storage import Home, Run, open_store, point_ref, rows_of, serving_run
from ostinato.app.trainer import Learning, ModelTokens, taught_by
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadWeights, Conflict, Corrupt, NoSignal, NotFound
from ostinato.core.files import write_atomic
from ostinato.core.records import Batch, PolicyVersion, ReleaseEvent
from ostinato.core.samples import TrainingBatch
from ostinato.core.weights import Learned, Snapshot
from ostinato.record.roles import hold
from ostinato.record.rowlog import RowLog
from ostinato.release.monitors.proxy_gap import gold_people
from ostinato.reward.erasure import CreditRefold, RefoldedBatch, erased_people
from ostinato.weights.follow.follower import Follower, versions_between
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version import certificate
from ostinato.weights.version.certificate import ErasureCertificate
from ostinato.weights.version.content import VERSIONS, weights_root
from ostinato.weights.version.signing import Signer

if TYPE_CHECKING:
    from ostinato.train.stepper import Stepper
    from ostinato.weights.store.interface import KeptStore

logger = logging.getLogger(__name__)

ERASURES = "erasure/"
"""Prefix of the refs of replayed versions."""

_LOCKED_S = 10.0  # how long to wait for another process that changes the requests

BASE = "base"
"""The `checkpoint` of a replay that begins at the start of training, for lack of a checkpoint before the first batch that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureRequest:
    """A request to erase a tenant's user, or all of its users (None), from what was learned up to a sequence number of the log."""

    tenant: str
    user: str | None
    upto: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureJob:
    """A replay that was begun. `first`: the first step that differs; `last`: the last to replay; `start`: the checkpoint's step.

    `version`: the resulting version, once training continues from it. `done`: it is live, and what knew the people is deleted. `begun`: for
    a branch, the shared version from which it restarts.
    """

    id: str
    people: tuple[ErasureRequest, ...]
    first: int
    last: int
    start: int
    checkpoint: str
    erased_turns: int
    version: tuple[int, str] | None = None
    done: bool = False
    begun: tuple[int, str] | None = None

    def knows(self, policy: PolicyVersion) -> bool:
        """Return True if this version of the replayed line may know the people; always False before `version` is set."""
        return self.version is not None and self.first <= policy.number < self.version[0]

    @property
    def phase(self) -> Literal["replay", "release", "done"]:
        """What the job waits for."""
        return "done" if self.done else "replay" if self.version is None else "release"


_requests = TypeAdapter(list[ErasureRequest])
_job = TypeAdapter(ErasureJob)


class ErasureFiles:
    """The files of a run's erasures. Every write is durable, and all but `append_step` are atomic."""

    def __init__(self, place: Home) -> None:
        self.root = place.erasure
        self.work = self.root / "work"
        self.checkpoints = self.work / "checkpoints"

    def certificate(self, id: str) -> Path:
        """Return the path of an erasure's certificate."""
        return self.root / f"{id}.json"

    def rows(self, id: str) -> Path:
        """Return the path of the batches behind the resulting weights, one per line: [step, [turn ids]]."""
        return self.root / f"{id}.rows.jsonl"

    def steps(self, id: str) -> Path:
        """Return the path of the replayed steps, one per line: weights root, effective share of the turns, or why the step was refused."""
        return self.root / f"{id}.steps.jsonl"

    def append_step(self, id: str, step: Mapping[str, Any]) -> None:
        """Append a replayed step, durably, so that no checkpoint holds a step that a power cut removes from the certificate."""
        with self.steps(id).open("a") as file:
            file.write(json.dumps(step) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def requests(self) -> list[ErasureRequest]:
        """Return the requests in the file. Raises Corrupt."""
        return self._read("requests.json", _requests, [])

    def request(self, request: ErasureRequest) -> None:
        """Add a request. Raises Conflict if another process keeps the file for `_LOCKED_S`."""
        with hold(self.root, "requests", wait_s=_LOCKED_S):
            asked = dict.fromkeys([*self.requests(), request])
            self.put("requests.json", [asdict(each) for each in asked])

    def pending(self) -> list[ErasureRequest]:
        """Return the requests that no replay has taken up, even if a trainer was killed between the two writes. Raises Corrupt."""
        requests, job = self.requests(), self.job()  # in this order: a job is written before its requests are removed
        return [each for each in requests if job is None or each not in job.people]

    def remove(self, people: Sequence[ErasureRequest]) -> None:
        """Remove these requests, and keep any that came in the meantime. Raises Conflict like `request`."""
        with hold(self.root, "requests", wait_s=_LOCKED_S):
            self.put("requests.json", [asdict(each) for each in self.requests() if each not in people])

    def job(self) -> ErasureJob | None:
        """Return the newest replay; None if there was none. Raises Corrupt."""
        return self._read("job.json", _job, None)

    def put(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self.root / name, json.dumps(value), durable=True)

    def _read(self, name: str, kind: TypeAdapter[Any], missing: Any) -> Any:
        path = self.root / name
        try:
            return kind.validate_json(path.read_bytes())
        except FileNotFoundError:
            return missing
        except ValidationError as error:
            raise Corrupt(f"{path} is damaged: {error.errors()[0]['msg']}; remove it, and ask again") from error


# ---------------------------------------------------------------- planning


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasurePlan:
    """What a replay would do. `first` is None if no step would change without the people, so that nothing need be replayed.

    `touched`: number of batches that would differ. `checkpoints`: where the replay may begin, newest first, because one may be damaged.
    """

    first: int | None
    last: int
    touched: int
    erased_turns: int
    checkpoints: Sequence[Path]

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint; None for the start of training."""
        return next(iter(self.checkpoints), None)

    @property
    def start(self) -> int:
        """The step after which the replay begins."""
        return 0 if self.checkpoint is None else int(self.checkpoint.name.split("-")[0])


def open_refold(
    config: Config, log: RowLog, people: Sequence[ErasureRequest], tokens: ModelTokens, *, others: bool = True
) -> CreditRefold:
    """Return the log's batches without these people and, with `others`, without everybody whose texts are erased."""
    upto: dict[tuple[str, str | None], int] = {}
    for each in people:
        upto[each.tenant, each.user] = max(each.upto, upto.get((each.tenant, each.user), 0))
    return CreditRefold(
        log,
        config.reward,
        taught_by(config),
        erased_people(upto, others=others),
        gold=gold_people(config.release.monitors),
        token_bytes=tokens.token_bytes,
        answer_ids=tokens.answer_ids,
        hint_tokens=tokens,
    )


async def plan_erasure(
    config: Config, log: RowLog, place: Home, people: Sequence[ErasureRequest], tokens: ModelTokens
) -> ErasurePlan:
    """Fold the log as the replay would, without training. Raises like `CreditRefold.batches`."""
    from ostinato.train.checkpoint import step_of, stored

    refold = open_refold(config, log, people, tokens)
    touched, last = list[int](), 0
    async for batch in refold.batches():
        last = batch.row.step
        if batch.changed:
            touched.append(last)
    first = touched[0] if touched else None
    before = [path for path in stored(place.checkpoints) if first is not None and step_of(path) < first]
    return ErasurePlan(
        first=first,
        last=last,
        touched=len(touched),
        erased_turns=len(refold.erased_turns),
        checkpoints=before,
    )


# ---------------------------------------------------------------- replaying


class ErasureReplay:
    """Erasures in the training worker.

    Args:
        run: the run's stores.
        learning: the trainer and the objects around it.
    """

    def __init__(self, run: Run, learning: Learning) -> None:
        self._run, self._parts, self._tokens = run, learning, learning.tokens
        self._files = ErasureFiles(run.home)
        self.job = self._files.job()
        self._seen_refs: Mapping[str, str] | None = None  # the store's refs when `purge` last ran
        self.trouble = ""
        """What an operator has to delete; "" if nothing."""

    async def due(self) -> bool:
        """Return True if a replay is unfinished or requested. Raises Corrupt."""
        return (self.job is not None and self.job.phase == "replay") or bool(self._files.pending())

    def knows_erased(self, live: PolicyVersion) -> bool:
        """Return True if this version knew somebody whom the last erasure removed, so that training must not go back to it."""
        return self.job is not None and self.job.knows(live)

    async def replay(self, say: Callable[[str, bool], None], *, fresh: bool) -> bool:
        """Do the pending replay. Return True if training now continues from another version.

        `fresh`: the trainer has neither loaded nor learned anything. `say` receives the current activity, and whether it takes no longer
        than a training step. Raises Conflict if the replay has to begin at the start of training and the trainer is not fresh.
        """
        job = self.job if await self._can_resume() else await self._begin(say, fresh=fresh)
        if job is None:
            return False
        job = await self._load(job, fresh=fresh)
        await self._steps(job, say)
        await self._adopt(job)
        return True

    async def _can_resume(self) -> bool:
        """Return True if a replay was begun and the run has taken no step since, except the one without turns that ends a replay.

        False if the replay's checkpoints are gone (backups do not contain them): every step since the start of training would be replayed.
        """
        from ostinato.train.checkpoint import stored

        job, desk = self.job, self._parts.desk
        if job is None or job.phase != "replay" or (job.checkpoint != BASE and not stored(self._files.checkpoints)):
            return False
        await desk.poll()
        if desk.last_step <= job.last:
            return True
        newest = await desk.last_batch()
        return desk.last_step == job.last + 1 and not newest.turns and newest.base is not None

    async def _begin(self, say: Callable[[str, bool], None], *, fresh: bool) -> ErasureJob | None:
        """Take up the requests; return None if no step would differ without the people.

        Raises Conflict like `replay`, or if the last replay's files cannot be deleted; the requests are then kept.
        """
        # if the last replay's version is not live yet, the new replay supersedes it
        people = [*(() if self.job is None else self.job.people), *self._files.pending()]
        say("looking for what was learned from people who are forgotten", False)
        plan = await plan_erasure(self._run.config, self._run.log, self._run.home, people, self._tokens)
        if plan.first is None:
            logger.info(
                "nothing was learned from the people whom `ostinato forget --replay` named: no step would differ without them"
            )
            self._files.remove(people)
            return None
        if plan.checkpoint is None and not fresh:
            raise Conflict(
                "the replay without forgotten people begins at the start of training, because no checkpoint is older than "
                f"step {plan.first}: restart the trainer, which does it first"
            )
        job = ErasureJob(
            id=secrets.token_hex(6),  # random, because names could be guessed from a hash of them
            people=tuple(people),
            first=plan.first,
            last=plan.last,
            start=plan.start,
            checkpoint=BASE if plan.checkpoint is None else plan.checkpoint.name,
            erased_turns=plan.erased_turns,
        )
        if self._files.work.exists():
            delete_all(self._files.work)  # otherwise the replay would resume from a checkpoint in it
        for older in plan.checkpoints:
            (links := self._files.checkpoints / older.name).mkdir(mode=0o700, parents=True)
            for file in older.iterdir():  # not `copytree`, whose error hides that the disk is full
                os.link(file, links / file.name)
            shutil.copystat(older, links)  # the time tells which of two checkpoints of a step is newer
        self._save_job(job)
        self._files.remove(people)
        return job

    def _save_job(self, job: ErasureJob) -> None:
        self._files.put("job.json", asdict(job))
        self.job = job

    async def _load(self, job: ErasureJob, *, fresh: bool) -> ErasureJob:
        """Load the replay's last checkpoint; a fresh trainer is already at the start of training.

        Return the job, with an earlier start if the checkpoint that it should begin at is damaged. Raises Conflict like `replay`.
        """
        from ostinato.train.checkpoint import step_of, stored

        trainer = self._parts.trainer
        if not await asyncio.to_thread(trainer.resume, self._files.checkpoints) and not fresh:
            raise Conflict(
                "a replay was begun from the start of training: restart the trainer, which goes on with it first"
            )
        # later steps are replayed
        noted = [line for line in self._replayed_steps(job.id) if line["step"] <= trainer.step_count]
        text = "".join(json.dumps(line) + "\n" for line in noted)
        await asyncio.to_thread(write_atomic, self._files.steps(job.id), text, durable=True)
        if trainer.step_count < job.start:
            taken = (path.name for path in stored(self._files.checkpoints) if step_of(path) == trainer.step_count)
            job = replace(job, start=trainer.step_count, checkpoint=next(taken, BASE))
            self._save_job(job)
        return job

    def _replayed_steps(self, id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            for line in self._files.steps(id).read_text().splitlines():
                with suppress(ValueError):  # the last line, if the process was killed while writing it
                    found.append(json.loads(line))
        return found

    async def _steps(self, job: ErasureJob, say: Callable[[str, bool], None]) -> None:
        from ostinato.train.stepper import Stepper

        trainer, every = self._parts.trainer, self._run.config.learn.checkpoint_every
        own = await OwnVersions.open(self._files.work / "versions", self._run, job)
        rows: list[certificate.ReplayedRow] = []
        refold = open_refold(self._run.config, self._run.log, job.people, self._tokens)
        parts = self._parts
        stepper = Stepper(trainer, own.snapshot, lambda learned: None, parts.anchor, parts.bases)
        say(f"recomputing credits, up to step {trainer.step_count}", False)
        async for batch in refold.batches():
            step = batch.row.step
            if step > job.last:
                break
            rows.append((step, batch.row.turns))
            if step <= trainer.step_count:
                continue
            if step >= job.first:
                await asyncio.to_thread(trainer.hold_nothing)
            else:
                await self._check(batch.recorded, trainer.step_count)
            say(f"step {step} of {job.last} again, without forgotten people", True)
            note = await self._step(stepper, own, await refold.samples(batch), batch)
            await asyncio.to_thread(self._files.append_step, job.id, note)
            if step in own.wanted:
                await own.keep(step, await asyncio.to_thread(trainer.present))
            if step % every == 0 or step == job.last:
                await asyncio.to_thread(trainer.save, self._files.checkpoints, cursor=0, keep=1)
        text = "".join(json.dumps([step, list(turns)]) + "\n" for step, turns in rows)
        await asyncio.to_thread(write_atomic, self._files.rows(job.id), text, durable=True)

    async def _step(
        self, stepper: Stepper, own: OwnVersions, made: TrainingBatch, batch: RefoldedBatch
    ) -> dict[str, Any]:
        """Take a step, or only count it if it is refused. Return the line for `ErasureFiles.append_step`."""
        base = batch.row.base
        if base is not None:
            # a base with this step's number is an earlier erasure's: the replay has that version already
            base = None if base.number == batch.row.step else await own.resolve(base)
        row = replace(batch.row, reference=await own.resolve(batch.row.reference), base=base)
        note: dict[str, Any] = {"step": row.step, "refused": batch.refused}
        try:
            learned: Learned = await stepper.step(TrainingBatch(row=row, samples=made.samples))
            note |= {"ess_turns": learned.metrics["ess_turns"]}
        except (NoSignal, BadWeights) as error:
            note["refused"] = batch.refused or str(error)
        return note | {"root": weights_root(await asyncio.to_thread(self._parts.trainer.weights))}

    async def _check(self, row: Batch, step: int) -> None:
        """Compare the weights with a version that the log names: before the first batch that differs they must be bit-identical."""
        if row.reference.number == step and step > 0:
            root = weights_root(await asyncio.to_thread(self._parts.trainer.weights))
            if root != row.reference.hash:
                raise Corrupt(
                    f"step {step} gives {root[:16]} here, and the log has {row.reference.hash[:16]}: the replay needs the machine "
                    "type, torch and threads of the run"
                )

    # ------------------------------------------------------------ releasing the result

    async def _adopt(self, job: ErasureJob) -> None:
        """Publish the result under a new number, and continue training from it."""
        from ostinato.train.checkpoint import ALL

        parts, step = self._parts, job.last + 1
        await asyncio.to_thread(parts.trainer.skip_step)
        parts.candidates.last = None  # publish a full snapshot: no delta may need what will be deleted
        version = await parts.candidates.publish(await asyncio.to_thread(parts.trainer.present))
        await parts.desk.poll()
        if parts.desk.last_step != step or (await parts.desk.last_batch()).base != version:
            await parts.desk.restart(step, version, await parts.released.refresh())
        cursor = await self._run.log.append()
        await asyncio.to_thread(parts.trainer.save, self._run.home.checkpoints, cursor=cursor, keep=ALL)
        await asyncio.to_thread(parts.trainer.resume, self._run.home.checkpoints)
        await parts.desk.save()
        self._certify(replace(job, version=(version.number, version.hash)), "")
        await point_ref(self._run.store, f"{ERASURES}{job.id}", version.hash)  # protects it from garbage collection
        await parts.candidates.offer()
        self._save_job(replace(job, version=(version.number, version.hash)))
        shutil.rmtree(self._files.work, ignore_errors=True)
        logger.warning("training goes on from %s, which was trained without forgotten people", version)

    def _certify(self, job: ErasureJob, verdict: str) -> None:
        """Write the certificate, or add the gate's verdict to it."""
        assert job.version is not None
        path = self._files.certificate(job.id)
        if verdict and path.exists():
            made = ErasureCertificate.model_validate_json(path.read_bytes()).model_copy(update={"verdict": verdict})
        else:
            noted = [line for line in self._replayed_steps(job.id) if line["step"] > job.start]
            taken = [float(line["ess_turns"]) for line in noted if "ess_turns" in line]
            rows = certificate.read_rows(self._files.rows(job.id).read_text().splitlines())
            made = ErasureCertificate(
                definition=certificate.DEFINITION if job.begun is None else certificate.BRANCH_DEFINITION,
                id=job.id,
                code=__version__,
                contract=self._parts.numerics,
                checkpoint=job.checkpoint,
                first=job.first,
                last=job.last,
                steps=job.last - job.start,
                refused=job.last - job.start - len(taken),
                erased_turns=job.erased_turns,
                ess_turns=min(taken, default=None),
                rows=certificate.rows_root(rows),
                weights=job.version,
                verdict=verdict,
                at=wall_clock(),
            )
        key = self._run.config.publish.key
        signed = made.signed(None if key is None else Signer.load(key))
        write_atomic(path, signed.model_dump_json(indent=1) + "\n", durable=True)

    async def purge(self, live: PolicyVersion) -> str:
        """Once the version or a later one is live, delete what knew the people and no ref names. Return what was done; "" if nothing."""
        job = self.job
        if job is None or job.phase != "release" or job.version is None or not self._is_live(job, live):
            return ""
        refs = await self._run.store.refs()
        if refs == self._seen_refs:
            return ""  # the rest reads every version's manifest, and an idle trainer calls this twice a second
        self._seen_refs = refs
        await self._release_refs(job)
        found = await find_tainted(self._run, job.first, job.last)
        left = [path for path in found.checkpoints if not _deleted(path)]
        named = ", ".join(map(str, left))
        self.trouble = f"checkpoints that may know forgotten people cannot be deleted: {named}" if left else ""
        nothing = not found.free and len(left) == len(found.checkpoints)
        if nothing and (found.named or left) and self._has_verdict(job.id):
            return ""  # nothing has changed since the last call
        store = store_of(self._run)
        for version in found.free:
            ref = VERSIONS + version.hash
            if (value := await store.read_ref(ref)) is not None:
                await store.delete_ref(ref, value)
        self._certify(job, await self._verdict(job.version))
        if not found.named and not left:
            self._save_job(replace(job, done=True))
        return replace(found, checkpoints=[path for path in found.checkpoints if path not in left]).line()

    def _has_verdict(self, id: str) -> bool:
        return bool(ErasureCertificate.model_validate_json(self._files.certificate(id).read_bytes()).verdict)

    def _is_live(self, job: ErasureJob, live: PolicyVersion) -> bool:
        """Return True once the resulting version or a later one is live."""
        return job.version is not None and live.number >= job.version[0]

    async def _release_refs(self, job: ErasureJob) -> None:
        """Delete the refs of earlier replays' versions, which may know the people whom this one removed."""
        for ref, held in (await self._run.store.refs()).items():
            if ref.startswith(ERASURES) and ref != f"{ERASURES}{job.id}":
                await self._run.store.delete_ref(ref, held)

    async def _verdict(self, version: tuple[int, str]) -> str:
        """Return what the release ledger says of a version, newest last."""
        events = [row async for row in rows_of(self._run.log, ReleaseEvent) if row.policy.hash == version[1]]
        said = [f"{row.action}: {row.reason}" for row in events]
        return "; ".join(said[-2:]) or "a later version is live"


def delete_all(directory: Path) -> None:
    """Delete a directory. Raises Conflict, with its path, if anything in it cannot be deleted."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise Conflict(f"{directory} cannot be deleted: {error}; delete it, then restart the trainer") from error


def _deleted(checkpoint: Path) -> bool:
    """Delete a checkpoint. Return False if it still exists."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    return not checkpoint.exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tainted:
    """Checkpoints and stored versions that may know somebody: `free` versions, which no other ref names, and `named` ones by ref."""

    checkpoints: Sequence[Path]
    free: Sequence[PolicyVersion]
    named: dict[str, PolicyVersion]

    def line(self) -> str:
        """Return a line for the operator: what is deleted, and which versions wait until their refs move."""
        waits = ", ".join(f"{policy} (ref {ref})" for ref, policy in self.named.items())
        gone = f"{len(self.checkpoints)} checkpoints and {len(self.free)} versions"
        return f"{gone}; until their refs move: {waits}" if waits else gone


def store_of(run: Run) -> KeptStore:
    """Return the whole weight store of a run, with all refs; a branch's run may move only its own."""
    return open_store(serving_run(run.config)) if run.config.run.tenant else run.store


async def find_tainted(run: Run, first: int, last: int) -> Tainted:
    """Return what may know somebody whose first effect was on step `first`, if training continued without them after step `last`.

    For a branch that restarted, return versions alone: its earlier checkpoints are gone, and the numbers of the others are of other steps.
    """
    from ostinato.train.checkpoint import step_of, stored

    store, own = store_of(run), [] if run.config.run.tenant else stored(run.home.checkpoints)
    refs = {ref: root for ref, root in (await store.refs()).items() if not ref.startswith(VERSIONS)}
    versions = await versions_between(store, first, last, run.name)
    held = {root: ref for ref, root in refs.items()}
    return Tainted(
        checkpoints=[path for path in own if first <= step_of(path) <= last],
        free=[policy for policy in versions if policy.hash not in held],
        named={held[policy.hash]: policy for policy in versions if policy.hash in held},
    )


class OwnVersions:
    """The replay's own versions, in a store of their own: from the first batch that differs on, policy numbers in the log mean these.

    `wanted`: the numbers that the replay's batches name.
    """

    def __init__(self, place: Path, run: Run, first: int, wanted: frozenset[int]) -> None:
        self.wanted = wanted
        self._run, self._first = run, first
        store = DirectoryStore(place)
        self._publisher = VersionPublisher(store)
        self._follower = Follower(store, run.config.follow.model_copy(update={"keep": 2, "trusted": ()}))

    @classmethod
    async def open(cls, place: Path, run: Run, job: ErasureJob) -> OwnVersions:
        """Open the store, and collect the version numbers that the batches name."""
        named: set[int] = set()
        async for row in rows_of(run.log, Batch):
            if job.start < row.step <= job.last:
                named |= {policy.number for policy in (row.reference, row.base) if policy is not None}
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(place, run, job.first, frozenset(number for number in named if job.first <= number))

    async def keep(self, number: int, learned: Learned) -> None:
        """Store the weights after step `number`."""
        await self._publisher.publish(number, learned.weights, run="replay", base=None, ref=f"step/{number}")

    async def resolve(self, policy: PolicyVersion) -> PolicyVersion:
        """Return the version that stands for a version of the log in the replay. Raises NotFound."""
        if policy.number < self._first:
            return policy
        found = await self._follower.resolve(f"step/{policy.number}")
        if found is None:
            raise NotFound(
                f"the replay has no version {policy.number}, which a batch names; remove the erasure's folder and ask again"
            )
        return found

    async def snapshot(self, policy: PolicyVersion) -> Snapshot:
        """Return a version with its weights, the replay's own or the run's. Raises NotFound, Corrupt."""
        follower = self._run.follower if policy.number < self._first else self._follower
        return Snapshot(policy=policy, weights=await follower.fetch(policy))
