"""Erasure from the weights (exact machine unlearning): training since somebody's first effect on it, repeated without them.

request (`ostinato forget --replay`) -> the trainer takes it up -> the batches of a `CreditRefold`, from the last checkpoint before the
first that differs -> a version with a new number, from which training goes on -> the gate, as any candidate -> once it is live: the
versions and checkpoints that knew the person are deleted, and the certificate has the verdict.

From the first batch that differs on, a policy number in the log means the replay's own version: the recorded one knew the person, and a
KL penalty would pull the replay back to it. For the same reason nothing is promised about recorded log-probabilities. AdamW's moments
come from the checkpoint.

A tenant's branch is not replayed: it begins anew at the shared version, once that was trained without the person (`app.branch_erasure`).

Everything is in `Home.erasure`. The trainer may be killed at any instant: the replay has its own checkpoints, each step gives the same bits
again, and each act of the end can be repeated.
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
"""What the refs of replayed versions begin with."""

_LOCKED_S = 10.0  # seconds to wait for another process that changes the requests

BASE = "base"
"""The name of the start of training, where there is no checkpoint before the first batch that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureRequest:
    """Somebody to take out of the weights: a tenant's user, or all of its users (None), up to a place in the log."""

    tenant: str
    user: str | None
    upto: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureJob:
    """A replay that was begun. `first`: the first step that differs; `last`: the last to replay; `start`: the step of the checkpoint.

    `version`: what came out, once training goes on from it; `done`: it is live, and what knew the people is deleted. `begun`: the shared
    version that a branch begins anew at.
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
        """True if this version of the replayed line may know the people; never before one came out without them."""
        return self.version is not None and self.first <= policy.number < self.version[0]

    @property
    def phase(self) -> Literal["replay", "release", "done"]:
        """What it waits for."""
        return "done" if self.done else "replay" if self.version is None else "release"


_requests = TypeAdapter(list[ErasureRequest])
_job = TypeAdapter(ErasureJob)


class ErasureFiles:
    """The files of a run's erasures. Every write is durable and atomic."""

    def __init__(self, place: Home) -> None:
        self.root = place.erasure
        self.work = self.root / "work"
        self.checkpoints = self.work / "checkpoints"

    def certificate(self, id: str) -> Path:
        """The certificate of an erasure."""
        return self.root / f"{id}.json"

    def rows(self, id: str) -> Path:
        """The batches behind the weights that came out, a line each: [step, [turn ids]]."""
        return self.root / f"{id}.rows.jsonl"

    def steps(self, id: str) -> Path:
        """The replayed steps, a line each: root of the weights, effective share of the turns, or why it was refused."""
        return self.root / f"{id}.steps.jsonl"

    def note(self, id: str, step: Mapping[str, Any]) -> None:
        """Note a replayed step, durably: a checkpoint must not hold one that a power cut takes out of the certificate."""
        with self.steps(id).open("a") as file:
            file.write(json.dumps(step) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def requests(self) -> list[ErasureRequest]:
        """The requests that no replay has taken up. Raises Corrupt."""
        return self._read("requests.json", _requests, [])

    def request(self, request: ErasureRequest) -> None:
        """Add a request. Raises Conflict if another process keeps the file for `_LOCKED_S`."""
        with hold(self.root, "requests", wait_s=_LOCKED_S):
            asked = dict.fromkeys([*self.requests(), request])
            self.put("requests.json", [asdict(each) for each in asked])

    def asked(self) -> list[ErasureRequest]:
        """The requests that no replay has taken up, even if its trainer was killed just then. Raises Corrupt."""
        requests, job = self.requests(), self.job()  # in this order: a job is written before its requests are removed
        return [each for each in requests if job is None or each not in job.people]

    def take(self, people: Sequence[ErasureRequest]) -> None:
        """Remove these requests; others may have come meanwhile. Raises Conflict like `request`."""
        with hold(self.root, "requests", wait_s=_LOCKED_S):
            self.put("requests.json", [asdict(each) for each in self.requests() if each not in people])

    def job(self) -> ErasureJob | None:
        """The newest replay. Raises Corrupt."""
        return self._read("job.json", _job, None)

    def put(self, name: str, value: Any) -> None:
        """Write a file of JSON."""
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


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasurePlan:
    """What a replay would do. `first` is None if no step would learn anything else without the people: nothing is to be replayed.

    `touched`: batches that would differ; `checkpoints`: those that it may begin at, newest first, as one may be damaged.
    """

    first: int | None
    last: int
    touched: int
    erased_turns: int
    checkpoints: Sequence[Path]

    @property
    def checkpoint(self) -> Path | None:
        """The newest of them; None for the start of training."""
        return next(iter(self.checkpoints), None)

    @property
    def start(self) -> int:
        """The step that the replay begins after."""
        return 0 if self.checkpoint is None else int(self.checkpoint.name.split("-")[0])


def open_refold(
    config: Config, log: RowLog, people: Sequence[ErasureRequest], tokens: ModelTokens, *, others: bool = True
) -> CreditRefold:
    """The log's batches without these people and, with `others`, without all whose words are erased."""
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
    """Read the log as the replay would, without training. Raises as `CreditRefold.batches`."""
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


# ---------------------------------------------------------------- the replay


class ErasureReplay:
    """The training worker's part in erasures.

    Args:
        run: the run's stores.
        learning: the trainer and what is around it.
    """

    def __init__(self, run: Run, learning: Learning) -> None:
        self._run, self._parts, self._tokens = run, learning, learning.tokens
        self._files = ErasureFiles(run.home)
        self.job = self._files.job()
        self._looked: Mapping[str, str] | None = None  # the store's refs at the last look for what is to be deleted
        self.trouble = ""
        """What a person has to delete; "" if nothing."""

    async def due(self) -> bool:
        """True if a replay was begun and has not ended, or is asked for. Raises Corrupt."""
        return (self.job is not None and self.job.phase == "replay") or bool(self._files.asked())

    def knows_erased(self, live: PolicyVersion) -> bool:
        """True if this version knew somebody whom the last erasure took out: training must not go back to it."""
        return self.job is not None and self.job.knows(live)

    async def replay(self, say: Callable[[str, bool], None], *, fresh: bool) -> bool:
        """Do what is pending; True if training goes on from another version now. `fresh`: the trainer has not loaded or learned anything.
        `say` is told what is done, and whether that takes no longer than a step.

        Raises Conflict if the replay has to begin at the start of training, and the trainer is not fresh.
        """
        job = self.job if await self._goes_on() else await self._begin(say, fresh=fresh)
        if job is None:
            return False
        job = await self._load(job, fresh=fresh)
        await self._steps(job, say)
        await self._adopt(job)
        return True

    async def _goes_on(self) -> bool:
        """True if a replay was begun and the run took no step since, but for the one without turns with which a replay ends. False if its
        checkpoints are gone, which no backup has: from the start of training, every step would be taken again.
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
        """Take up the requests; None if no step would differ without the people. Raises Conflict as `replay`, or if what the last replay
        left cannot be deleted; the requests are kept then.
        """
        # if what the last replay came to is not live yet, this one takes its place
        people = [*(() if self.job is None else self.job.people), *self._files.asked()]
        say("looking for what was learned from people who are forgotten", False)
        plan = await plan_erasure(self._run.config, self._run.log, self._run.home, people, self._tokens)
        if plan.first is None:
            logger.info(
                "nothing was learned from whom `ostinato forget --replay` named: no step would differ without them"
            )
            self._files.take(people)
            return None
        if plan.checkpoint is None and not fresh:
            raise Conflict(
                f"the replay without forgotten people begins at the start of training, as no checkpoint is older than step {plan.first}: "
                "restart the trainer, which does it first"
            )
        job = ErasureJob(
            id=secrets.token_hex(6),  # not made of names, which could be guessed from it
            people=tuple(people),
            first=plan.first,
            last=plan.last,
            start=plan.start,
            checkpoint=BASE if plan.checkpoint is None else plan.checkpoint.name,
            erased_turns=plan.erased_turns,
        )
        if self._files.work.exists():
            delete_all(self._files.work)  # the replay would go on from a checkpoint that is left in it
        for older in plan.checkpoints:
            (links := self._files.checkpoints / older.name).mkdir(mode=0o700, parents=True)
            for file in older.iterdir():  # the error of `copytree` would not tell that the disk is full
                os.link(file, links / file.name)
            shutil.copystat(older, links)  # which of two of a step is newer
        self._keep(job)
        self._files.take(people)
        return job

    def _keep(self, job: ErasureJob) -> None:
        self._files.put("job.json", asdict(job))
        self.job = job

    async def _load(self, job: ErasureJob, *, fresh: bool) -> ErasureJob:
        """Load the replay's last checkpoint. The start of training is what a fresh trainer has. Returns the job, with an earlier start if
        the checkpoint that it was to begin at is damaged. Raises Conflict as `replay`.
        """
        from ostinato.train.checkpoint import step_of, stored

        trainer = self._parts.trainer
        if not await asyncio.to_thread(trainer.resume, self._files.checkpoints) and not fresh:
            raise Conflict(
                "a replay was begun from the start of training: restart the trainer, which goes on with it first"
            )
        noted = [line for line in self._noted(job.id) if line["step"] <= trainer.step_count]  # the rest is taken again
        text = "".join(json.dumps(line) + "\n" for line in noted)
        await asyncio.to_thread(write_atomic, self._files.steps(job.id), text, durable=True)
        if trainer.step_count < job.start:
            taken = (path.name for path in stored(self._files.checkpoints) if step_of(path) == trainer.step_count)
            job = replace(job, start=trainer.step_count, checkpoint=next(taken, BASE))
            self._keep(job)
        return job

    def _noted(self, id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            for line in self._files.steps(id).read_text().splitlines():
                with suppress(ValueError):  # the last line of a killed process
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
        say(f"folding credits anew, up to step {trainer.step_count}", False)
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
            await asyncio.to_thread(self._files.note, job.id, note)
            if step in own.wanted:
                await own.keep(step, await asyncio.to_thread(trainer.present))
            if step % every == 0 or step == job.last:
                await asyncio.to_thread(trainer.save, self._files.checkpoints, cursor=0, keep=1)
        text = "".join(json.dumps([step, list(turns)]) + "\n" for step, turns in rows)
        await asyncio.to_thread(write_atomic, self._files.rows(job.id), text, durable=True)

    async def _step(
        self, stepper: Stepper, own: OwnVersions, made: TrainingBatch, batch: RefoldedBatch
    ) -> dict[str, Any]:
        """Take a step, or count one that is refused. Returns what to note."""
        base = batch.row.base
        if base is not None:
            # one with this step's number is an earlier erasure's: here the replay is that version already
            base = None if base.number == batch.row.step else await own.of(base)
        row = replace(batch.row, reference=await own.of(batch.row.reference), base=base)
        note: dict[str, Any] = {"step": row.step, "refused": batch.refused}
        try:
            learned: Learned = await stepper.step(TrainingBatch(row=row, samples=made.samples))
            note |= {"ess_turns": learned.metrics["ess_turns"]}
        except (NoSignal, BadWeights) as error:
            note["refused"] = batch.refused or str(error)
        return note | {"root": weights_root(await asyncio.to_thread(self._parts.trainer.weights))}

    async def _check(self, row: Batch, step: int) -> None:
        """Compare the weights with a version that the log names: before the first batch that differs the replay must have its bits."""
        if row.reference.number == step and step > 0:
            root = weights_root(await asyncio.to_thread(self._parts.trainer.weights))
            if root != row.reference.hash:
                raise Corrupt(
                    f"step {step} gives {root[:16]} here, and the log has {row.reference.hash[:16]}: the replay needs the machine "
                    "type, torch and threads of the run"
                )

    # ------------------------------------------------------------ the end

    async def _adopt(self, job: ErasureJob) -> None:
        """Publish what came out under a new number, and let training go on from it."""
        from ostinato.train.checkpoint import ALL

        parts, step = self._parts, job.last + 1
        await asyncio.to_thread(parts.trainer.skip_step)
        parts.candidates.last = None  # a full snapshot: no delta may need what will be deleted
        version = await parts.candidates.publish(await asyncio.to_thread(parts.trainer.present))
        await parts.desk.poll()
        if parts.desk.last_step != step or (await parts.desk.last_batch()).base != version:
            await parts.desk.restart(step, version, await parts.released.refresh())
        cursor = await self._run.log.append()
        await asyncio.to_thread(parts.trainer.save, self._run.home.checkpoints, cursor=cursor, keep=ALL)
        await asyncio.to_thread(parts.trainer.resume, self._run.home.checkpoints)
        await parts.desk.save()
        self._certify(replace(job, version=(version.number, version.hash)), "")
        await point_ref(self._run.store, f"{ERASURES}{job.id}", version.hash)  # so that it is kept
        await parts.candidates.offer()
        self._keep(replace(job, version=(version.number, version.hash)))
        shutil.rmtree(self._files.work, ignore_errors=True)
        logger.warning("training goes on from %s, which was trained without forgotten people", version)

    def _certify(self, job: ErasureJob, verdict: str) -> None:
        """Write the certificate, or what the gate said into it."""
        assert job.version is not None
        path = self._files.certificate(job.id)
        if verdict and path.exists():
            made = ErasureCertificate.model_validate_json(path.read_bytes()).model_copy(update={"verdict": verdict})
        else:
            noted = [line for line in self._noted(job.id) if line["step"] > job.start]
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
        """Once the version or a later one is live: delete what knew the people, as far as no ref names it. Returns what was done."""
        job = self.job
        if job is None or job.phase != "release" or job.version is None or not self._is_over(job, live):
            return ""
        refs = await self._run.store.refs()
        if refs == self._looked:
            return ""  # each look reads every version's manifest, and a trainer that waits asks twice a second
        self._looked = refs
        await self._let_go(job)
        found = await knowing(self._run, job.first, job.last)
        left = [path for path in found.checkpoints if not _deleted(path)]
        named = ", ".join(map(str, left))
        self.trouble = f"checkpoints that may know forgotten people cannot be deleted: {named}" if left else ""
        nothing = not found.free and len(left) == len(found.checkpoints)
        if nothing and (found.named or left) and self._has_verdict(job.id):
            return ""  # as at the last look
        store = store_of(self._run)
        for version in found.free:
            ref = VERSIONS + version.hash
            if (value := await store.read_ref(ref)) is not None:
                await store.delete_ref(ref, value)
        self._certify(job, await self._verdict(job.version))
        if not found.named and not left:
            self._keep(replace(job, done=True))
        return replace(found, checkpoints=[path for path in found.checkpoints if path not in left]).line()

    def _has_verdict(self, id: str) -> bool:
        return bool(ErasureCertificate.model_validate_json(self._files.certificate(id).read_bytes()).verdict)

    def _is_over(self, job: ErasureJob, live: PolicyVersion) -> bool:
        """True once what came out, or a later version, answers."""
        return job.version is not None and live.number >= job.version[0]

    async def _let_go(self, job: ErasureJob) -> None:
        """Delete the names of what earlier replays came to, which may know whom this one took out."""
        for ref, held in (await self._run.store.refs()).items():
            if ref.startswith(ERASURES) and ref != f"{ERASURES}{job.id}":
                await self._run.store.delete_ref(ref, held)

    async def _verdict(self, version: tuple[int, str]) -> str:
        """What the ledger says of a version, newest last."""
        events = [row async for row in rows_of(self._run.log, ReleaseEvent) if row.policy.hash == version[1]]
        said = [f"{row.action}: {row.reason}" for row in events]
        return "; ".join(said[-2:]) or "a later version is live"


def delete_all(directory: Path) -> None:
    """Delete a directory. Raises Conflict, with its path, if something of it cannot be deleted."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise Conflict(f"{directory} cannot be deleted: {error}; delete it, then restart the trainer") from error


def _deleted(checkpoint: Path) -> bool:
    """Delete a checkpoint. False if it is still there."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    return not checkpoint.exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowing:
    """The checkpoints and stored versions that may know somebody: `free` ones that only their number names, and `named` ones by ref."""

    checkpoints: Sequence[Path]
    free: Sequence[PolicyVersion]
    named: dict[str, PolicyVersion]

    def line(self) -> str:
        """What is deleted, and what waits, for people."""
        waits = ", ".join(f"{policy} (ref {ref})" for ref, policy in self.named.items())
        gone = f"{len(self.checkpoints)} checkpoints and {len(self.free)} versions"
        return f"{gone}; until their refs move: {waits}" if waits else gone


def store_of(run: Run) -> KeptStore:
    """The whole weight store of a run, with everybody's refs; a branch's run itself has only its own to move."""
    return open_store(serving_run(run.config)) if run.config.run.tenant else run.store


async def knowing(run: Run, first: int, last: int) -> Knowing:
    """What may know somebody whose first effect was on step `first`, if training went on without them after step `last`.

    Of a branch that began anew, versions alone: its checkpoints of before are gone, and others' have the numbers of their own steps.
    """
    from ostinato.train.checkpoint import step_of, stored

    store, own = store_of(run), [] if run.config.run.tenant else stored(run.home.checkpoints)
    refs = {ref: root for ref, root in (await store.refs()).items() if not ref.startswith(VERSIONS)}
    versions = await versions_between(store, first, last, run.name)
    held = {root: ref for ref, root in refs.items()}
    return Knowing(
        checkpoints=[path for path in own if first <= step_of(path) <= last],
        free=[policy for policy in versions if policy.hash not in held],
        named={held[policy.hash]: policy for policy in versions if policy.hash in held},
    )


class OwnVersions:
    """The replay's own versions, in a store of their own: what a policy number in the log means from the first batch that differs on.

    `wanted`: the numbers that batches of the replay name.
    """

    def __init__(self, place: Path, run: Run, first: int, wanted: frozenset[int]) -> None:
        self.wanted = wanted
        self._run, self._first = run, first
        store = DirectoryStore(place)
        self._publisher = VersionPublisher(store)
        self._follower = Follower(store, run.config.follow.model_copy(update={"keep": 2, "trusted": ()}))

    @classmethod
    async def open(cls, place: Path, run: Run, job: ErasureJob) -> OwnVersions:
        """Look for what the batches name."""
        named: set[int] = set()
        async for row in rows_of(run.log, Batch):
            if job.start < row.step <= job.last:
                named |= {policy.number for policy in (row.reference, row.base) if policy is not None}
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(place, run, job.first, frozenset(number for number in named if job.first <= number))

    async def keep(self, number: int, learned: Learned) -> None:
        """Keep the weights after step `number`."""
        await self._publisher.publish(number, learned.weights, run="replay", base=None, ref=f"step/{number}")

    async def of(self, policy: PolicyVersion) -> PolicyVersion:
        """What a version in the log means to the replay. Raises NotFound."""
        if policy.number < self._first:
            return policy
        found = await self._follower.resolve(f"step/{policy.number}")
        if found is None:
            raise NotFound(
                f"the replay has no version {policy.number}, which a batch names; remove the erasure's folder and ask again"
            )
        return found

    async def snapshot(self, policy: PolicyVersion) -> Snapshot:
        """A version with its weights, the replay's own or the run's. Raises NotFound, Corrupt."""
        follower = self._run.follower if policy.number < self._first else self._follower
        return Snapshot(policy=policy, weights=await follower.fetch(policy))
