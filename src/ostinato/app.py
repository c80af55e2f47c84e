"""The one composition root: Config -> objects. The only file that knows both sides of every seam."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, BadWeights, Conflict, NoSignal, NotFound
from ostinato.core.numerics import Contract
from ostinato.core.records import Batch, Learned, PolicyVersion, Sample, Snapshot, Stamp, Turn
from ostinato.demo import tasks as demo_tasks
from ostinato.envs.grader import python_tests
from ostinato.envs.sandbox import Sandbox
from ostinato.evaluate.evaluation import Evaluation
from ostinato.evaluate.graders import pattern
from ostinato.evaluate.runner import Grader, SuiteRunner
from ostinato.evaluate.statistics import clustered_difference
from ostinato.evaluate.suites import Item, Suite, build, load, parse
from ostinato.publish.content import version_ref
from ostinato.publish.follower import Follower
from ostinato.publish.opening import open_url
from ostinato.publish.publisher import Published, Publisher
from ostinato.publish.relay import RelayStore
from ostinato.publish.store import DirectoryStore, KeptStore, RefStore
from ostinato.record.log import SqlLog
from ostinato.release.controller import ReleaseController
from ostinato.reward.desk import RewardDesk
from ostinato.reward.loader import load as load_reward

if TYPE_CHECKING:
    import torch

    from ostinato.model.selftest import Verdict
    from ostinato.train.trainer import PolicyTrainer

EVALUATION_REF = "evaluation"
SERVED_REFS = ("live", "control", "canary", EVALUATION_REF)


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of a run."""

    root: Path

    @property
    def log(self) -> Path:
        """The append-only log."""
        return self.root / "log.db"

    @property
    def weights(self) -> Path:
        """The weight store."""
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        """The trainer's checkpoints."""
        return self.root / "checkpoints"

    @property
    def address(self) -> Path:
        """Where the gateway writes the URL that it serves."""
        return self.root / "gateway.url"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.json"

    def worker_log(self, worker: str) -> Path:
        """A worker's output."""
        return self.root / "logs" / f"{worker}.log"

    def admin_key(self) -> str:
        """The run's own key, made once; lets the release worker name a weight slot."""
        path = self.root / "admin.key"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return path.read_text().strip()
        with os.fdopen(descriptor, "w") as file:
            file.write(key := secrets.token_urlsafe(32))
        return key


def home(config: Config) -> Home:
    """The run's directory, made if need be."""
    config.run.directory.mkdir(parents=True, exist_ok=True)
    return Home(config.run.directory)


def open_log(config: Config) -> SqlLog:
    """The run's log, migrated to the newest schema."""
    return SqlLog.open(home(config).log, wall_clock)


def open_store(config: Config) -> KeptStore:
    """The run's weight store: a directory, or what `weights.url` names."""
    return open_url(config.weights) if config.weights.url else DirectoryStore(home(config).weights)


def open_cached_store(config: Config) -> RefStore:
    """The run's weight store for one who only reads, through the directory `follow.cache` if that is set."""
    store = open_store(config)
    if config.follow.cache is None:
        return store
    return RelayStore(store, DirectoryStore(config.follow.cache.expanduser()), config.relay)


def model_path(config: Config, progress: Callable[[str], None] | None = None) -> Path:
    """The checked directory of the model that training starts from."""
    from ostinato.model.load import resolve

    return resolve(config.model.source, config.model.cache.expanduser(), progress)


# ---------------------------------------------------------------- arithmetic


def engine_contract(config: Config) -> Contract:
    """The numerics contract of the serving worker; the same in every process of this machine.

    Imports torch. In exact mode it needs the model's directory (see `model_path`), and measures this machine for some seconds the
    first time. Raises BadConfig where exact mode cannot hold.
    """
    from ostinato.model.settings import served_dtype

    return _contract(config, served_dtype(config.model), threads=1)  # its lanes have one torch thread each


def trainer_contract(config: Config) -> Contract:
    """The numerics contract of the training worker: the engine's, unless its dtype is another or its threads give other bits."""
    from ostinato.train.trainer import compute_dtype

    return _contract(config, compute_dtype(config.train.compute), threads=config.train.threads)


def _contract(config: Config, dtype: torch.dtype, threads: int) -> Contract:
    from ostinato.model.numerics import contract

    mode, rows = config.model.numerics, 1
    if mode == "exact":
        found = verdict(config, dtype, threads)
        if not found.exact:
            raise BadConfig(found.reason)
        rows, threads = found.rows, found.threads
    return contract(dtype, mode, threads, rows, config.engine.block)


def verdict(config: Config, dtype: torch.dtype, threads: int) -> Verdict:
    """What the self-test says about this machine and the configured model; measured once per process.

    Best is that the trainer's threads give the bits of one, as which each of the engine's computes. If they do not, the verdict is on
    `threads` alone.
    """
    path = model_path(config)
    found = _examined(path, dtype, tuple(sorted({1, config.train.threads})))
    return found if found.exact else _examined(path, dtype, (threads,))


@lru_cache
def _examined(path: Path, dtype: torch.dtype, threads: tuple[int, ...]) -> Verdict:
    from ostinato.model.selftest import examine
    from ostinato.serve.packed import pack

    return examine(path, dtype, threads, pack)


async def stamp(log: SqlLog, contract: Contract) -> None:
    """Write down what a contract's id stands for, before the first turn that names it. Idempotent."""
    await log.append(Stamp(id=contract.id, contract=contract.to_json(), at=wall_clock()))


async def stamped(log: SqlLog) -> dict[str, Contract]:
    """Every contract that turns of this log may name, by id, oldest first. Raises Corrupt."""
    rows = [row async for _, row in log.read(0, {Stamp})]
    return {row.id: Contract.from_json(row.contract) for row in rows if isinstance(row, Stamp)}


# ---------------------------------------------------------------- learning


class Follows:
    """What is live, as the trainer last saw it; fetches a version's weights and keeps the last one fetched."""

    def __init__(self, follower: Follower, live: PolicyVersion) -> None:
        self.follower, self.live = follower, live
        self._held: Snapshot | None = None

    async def refresh(self) -> PolicyVersion:
        """Look at the ref again."""
        self.live = await self.follower.resolve("live") or self.live
        return self.live

    async def snapshot(self, policy: PolicyVersion) -> Snapshot:
        """A version with its weights."""
        if self._held is None or self._held.policy != policy:
            self._held = Snapshot(policy=policy, weights=await self.follower.fetch(policy))
        return self._held


class DeskSource:
    """`TurnSource` and `Rewards` of the loop over one reward desk. `batch` is the batch that `score` made last."""

    def __init__(self, desk: RewardDesk, config: Config, follows: Follows) -> None:
        self._desk, self._config, self._follows = desk, config.learn, follows
        self.step = 0
        self.base: PolicyVersion | None = None  # where the next step starts, if not from the last one
        self.batch: Batch | None = None

    async def collect(self) -> Sequence[Turn]:
        """Wait until a batch of turns is ready."""
        while True:
            await self._desk.poll()
            ready = await self._desk.ready(self.step, self._config.batch, self.base)
            if len(ready) >= self._config.batch:
                return [entry.turn for entry in ready]
            await asyncio.sleep(self._config.poll_s)

    async def score(self, turns: Sequence[Turn]) -> Sequence[Sample]:
        """The batch with its credits, in the log before it is returned. Raises NoSignal."""
        reference = await self._follows.refresh()
        made = await self._desk.batch(self.step + 1, len(turns), reference, self.base)
        if made is None:
            raise Conflict("turns that were ready are not any more: another trainer is using this log; stop it")
        self.batch, samples = made
        return samples


class ThreadedTrainer:
    """The loop's `Trainer`: the synchronous trainer in a thread, with the batch's reference release and starting point."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        source: DeskSource,
        follows: Follows,
        on_learned: Callable[[Learned], None],
    ) -> None:
        self._trainer, self._source, self._follows, self._on_learned = trainer, source, follows, on_learned
        self._pool = ThreadPoolExecutor(1)  # always the same one: each thread's heap keeps what a step freed

    async def step(self, samples: Sequence[Sample]) -> Learned:
        """Take the step that the source's batch describes. A refused step counts, and leaves the weights alone."""
        batch = self._source.batch
        assert batch is not None
        self._source.step, self._source.base = batch.step, None
        if batch.base is not None:
            self._trainer.go_back((await self._follows.snapshot(batch.base)).weights, batch.base.number)
        reference = await self._follows.snapshot(batch.reference)
        try:
            learned = await asyncio.wrap_future(self._pool.submit(self._trainer.step, samples, reference))
        except (NoSignal, BadWeights):
            self._trainer.skip_step()
            raise
        self._on_learned(learned)
        return learned


class Candidates:
    """The loop's `Publisher` over the weight store: each version is stored, every few are named by the ref `candidate`."""

    def __init__(
        self,
        publisher: Publisher,
        run: str,
        every: int,
        on_published: Callable[[Published], None],
        *,
        numerics: str = "",
    ) -> None:
        self._publisher, self._run, self._every, self._on_published = publisher, run, every, on_published
        self._numerics = numerics
        self.last: PolicyVersion | None = None

    async def publish(self, learned: Learned) -> PolicyVersion:
        """Store the version under its root; idempotent."""
        done = await self._publisher.publish(
            learned.policy_number,
            learned.weights,
            run=self._run,
            base=self.last,
            meta={"step": learned.step},
            numerics=self._numerics,
            ref="candidate" if learned.step % self._every == 0 else None,
        )
        self.last = done.policy
        self._on_published(done)
        return done.policy


class Overlapped:
    """Publishes beside the trainer: one version is stored while the next step is computed."""

    def __init__(self, inner: Candidates) -> None:
        self._inner = inner
        self._under_way: asyncio.Task[PolicyVersion] | None = None

    async def begin(self, learned: Learned) -> None:
        """Begin to store the version, once the one before is stored. Raises what went wrong with that, after beginning with this."""
        try:
            await self.settle()
        finally:
            self._under_way = asyncio.create_task(self._inner.publish(learned))

    async def settle(self) -> None:
        """Wait until all that was begun is stored. Raises what went wrong with it."""
        if (task := self._under_way) is not None:
            self._under_way = None
            await task


def open_desk(config: Config, log: SqlLog, contract: Contract | None = None) -> RewardDesk:
    """The reward desk over the run's log. With a contract it holds back what was made under another, if the config says so."""
    only = contract.id if contract is not None and config.train.foreign_numerics == "refuse" else None
    function = load_reward(config.reward.function, config.reward.options)
    return RewardDesk(log, function, wall_clock, config.reward, numerics=only)


# ---------------------------------------------------------------- proving


def open_suite(config: Config) -> Suite:
    """The evaluation suite, cut to `evaluate.items` if that is set."""
    named = config.evaluate.suite
    suite = _demo_suite() if named == "demo" else load(Path(named))
    items = suite.items[: config.evaluate.items] if config.evaluate.items else suite.items
    return suite if len(items) == len(suite.items) else build(suite.name, items)


def _demo_suite() -> Suite:
    """The copilot's held-out function families, which no user ever asks for."""
    _, held_out = demo_tasks.split(demo_tasks.load())
    return parse("demo-heldout", "".join(json.dumps(item) + "\n" for item in demo_tasks.suite_items(held_out)))


def open_grader(config: Config) -> Grader:
    """Grades one answer to a suite item: in the sandbox, or by pattern. Raises BadConfig for a grader that does not exist."""
    sandbox = Sandbox(config.sandbox)

    async def grade(item: Item, text: str) -> float:
        if item.grader == "pattern":
            return pattern(item, text)
        if item.grader == "python_tests":
            data = item.data
            return await python_tests(data["head"], text, data["tests"], sandbox, config.evaluate.grade_timeout_s)
        raise BadConfig(f"suite item {item.id!r}: no grader {item.grader!r}; there are 'python_tests' and 'pattern'")

    return grade


def open_runner(config: Config, url: str) -> SuiteRunner:
    """The suite runner against a gateway."""
    return SuiteRunner(open_suite(config), open_grader(config), url, home(config).admin_key(), config.evaluate.runner)


class StoreVersions:
    """`Versions` of the release room: refs hold the roots of weights, and a root is a version's hash."""

    def __init__(self, store: RefStore, follower: Follower) -> None:
        self._store, self._follower = store, follower

    async def resolve(self, ref: str) -> tuple[PolicyVersion, str] | None:
        value = await self._store.read_ref(ref)
        policy = await self._follower.resolve(ref)
        return None if policy is None or value is None else (policy, value)

    async def manifest_of(self, policy: PolicyVersion) -> str:
        if await self._store.read_ref(version_ref(policy.hash)) is None:
            raise NotFound(f"{policy} is not in the weight store; see `ostinato weights log`", field="policy")
        return policy.hash


def open_releases(config: Config, log: SqlLog, evaluation: Evaluation | None = None) -> ReleaseController:
    """The release controller; without an evaluation it can only look and roll back."""
    store = open_store(config)
    versions = StoreVersions(store, Follower(store, config.follow))
    settings = config.release.model_copy(update={"evaluation_ref": EVALUATION_REF})
    return ReleaseController(log, store, versions, evaluation, settings, wall_clock, clustered_difference)


def open_evaluation(config: Config, url: str) -> Evaluation:
    """Candidate against live through the gateway at `url`."""
    return Evaluation(open_runner(config, url), config.evaluate.gate, candidate_slot=EVALUATION_REF)
