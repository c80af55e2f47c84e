"""Runs a suite: the weights in a slot try every item, through the gateway and on the same path as training rollouts, and are graded.

The world, passed as `TaskWorld`, decides who works on a task, where, and how the outcome is graded. All versions are paired by item and
randomness: a draw's seed does not depend on the version. Where one call gives several answers, draw d is choice ``d % size`` of call number
``d // size``, for any version and any number of draws that are known already.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from blake3 import blake3

from ostinato.core.errors import Conflict, Corrupt, OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemScore
from ostinato.core.retry import Backoff, RetryPolicy
from ostinato.evaluate.config import RunnerConfig
from ostinato.evaluate.suites import Item, Suite

_LONGEST_PAUSE_S = 8.0
_T = TypeVar("_T")

# ---------------------------------------------------------------- the seam


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """One try at an item.

    Attributes:
        formed: it is not empty and ended by itself.
        policies: every version that generated a token of it.
        seconds: how long it took.
        grade: returns its score in [0, 1]; raises Unavailable if a retry may succeed.
        text: the answer, if there is one text.

    Example: ``Attempted(formed=True, policies=(v9,), seconds=0.4, grade=grade, text="return a + b")``
    """

    formed: bool
    policies: tuple[PolicyVersion, ...]
    seconds: float
    grade: Callable[[], Awaitable[float]]
    text: str | None = None


class TaskSlot(Protocol):
    """The weights in one slot of the gateway, working on a suite's items."""

    async def served(self) -> PolicyVersion | None:
        """Return the version in the slot; None if there is none. Raises Unavailable, Unauthorized."""
        ...

    def answers_per_call(self, item: Item) -> int:
        """Return how many tries at the item one call gives: 1 for a whole rollout."""
        ...

    async def tries(self, item: Item, seed: int, count: int) -> Sequence[Attempted]:
        """Return `count` tries from one seed. Raises Unavailable if a retry may succeed."""
        ...


class TaskWorld(Protocol):
    """The world that the items' tasks live in."""

    def open(self, slot: str) -> AbstractAsyncContextManager[TaskSlot]:
        """Return a context that provides what trying the items needs; the weights of `slot` answer the model's calls."""
        ...


# ---------------------------------------------------------------- the runner


@dataclass(frozen=True, slots=True)
class _Block:
    """One call for an item: the call's number, the number of tries that it gives, and the draws that the last of these tries are."""

    number: int
    tries: int
    draws: range


def item_seed(suite: Suite, item: Item, shift: int = 0, seed: int = 0) -> int:
    """Return the seed of a call: a hash of the arguments below 2**31 - 2**16, as a rollout's later calls count up from it."""
    digest = blake3(f"{suite.hash}\0{item.id}\0{shift}\0{seed}".encode()).digest(length=8)
    return int.from_bytes(digest, "big") % (2**31 - 2**16)


class SuiteRunner:
    """One suite, one world. Implements `Runner`."""

    def __init__(self, suite: Suite, world: TaskWorld, config: RunnerConfig) -> None:
        self.suite = suite
        self._world, self._config = world, config

    async def run(
        self, slot: str, policy: PolicyVersion, draws: range, items: Sequence[Item] | None = None, *, seed: int = 0
    ) -> list[ItemScore]:
        """Return the scores of `items` (default: all) for each draw, every token of which was made by `policy`. Another `seed` gives fresh
        draws.

        Raises:
            Unavailable: the gateway or a sandbox did not answer, or the slot did not serve `policy`, within the configured time.
            Conflict: the slot has moved on to a newer version.
            BadRequest, BadConfig, Unauthorized: a task cannot be tried or graded, or the gateway has another key.
        """
        chosen = self.suite.items if items is None else items
        if len(draws) == 0 or not chosen:
            return []
        graded: list[ItemScore] = []
        try:
            async with asyncio.timeout(self._config.deadline_s), self._world.open(slot) as tasks:
                # wait first: a wrong version must not cost a whole batch of samples
                await wait_for_version(self._config, slot, policy, tasks.served)
                await self._all(tasks, slot, policy, draws, chosen, seed, graded)
        except TimeoutError as error:
            raise Unavailable(
                f"evaluation of {policy} in slot {slot!r} passed its deadline of {self._config.deadline_s:g} s with "
                f"{len(graded)} of {len(chosen) * len(draws)} tries graded; raise evaluate.runner.deadline_s or shrink the suite"
            ) from error
        place = {item.id: number for number, item in enumerate(chosen)}
        return sorted(graded, key=lambda score: (place[score.item], score.draw))

    async def _all(
        self,
        tasks: TaskSlot,
        slot: str,
        policy: PolicyVersion,
        draws: range,
        items: Sequence[Item],
        seed: int,
        graded: list[ItemScore],
    ) -> None:
        places, grading = (asyncio.Semaphore(self._config.concurrency) for _ in range(2))

        async def tried(item: Item, block: _Block) -> Sequence[Attempted]:
            # the call's number goes into the hash, since a rollout's later calls count up from its first seed
            call_seed = item_seed(self.suite, item, self._config.seed, seed + block.number)
            found = await tasks.tries(item, call_seed, block.tries)
            for each in found:
                if not each.policies:
                    raise Corrupt(f"a try at {item.id!r} names no version; nothing can be concluded from it")
                for version in each.policies:
                    check_version(slot, policy, version)
            return found

        async def one(item: Item, block: _Block) -> None:
            what = f"item {item.id!r} in slot {slot!r}"
            async with places:
                found = await patiently(self._config, what, lambda: tried(item, block))
            for draw, each in zip(block.draws, found[-len(block.draws) :], strict=True):
                # retry a grade that fails: sampling another answer would favour answers that can be graded
                async with grading:
                    score = await patiently(self._config, f"grading {what}", each.grade, hint="look at its grader")
                graded.append(_scored(item, draw, each, score))

        try:
            async with asyncio.TaskGroup() as group:
                for item in items:
                    for block in _blocks(draws, tasks.answers_per_call(item)):
                        group.create_task(one(item, block))
        except* OstinatoError as errors:
            raise first_error(errors) from errors


def _blocks(draws: range, size: int) -> list[_Block]:
    """Return the calls that give these draws. A block that is wanted from its middle is sampled from its start."""
    blocks: list[_Block] = []
    for number in range(draws.start // size, (draws.stop - 1) // size + 1):
        first, stop = number * size, min(draws.stop, (number + 1) * size)
        blocks.append(_Block(number, stop - first, range(max(draws.start, first), stop)))
    return blocks


def _scored(item: Item, draw: int, tried: Attempted, score: float) -> ItemScore:
    if not (math.isfinite(score) and 0.0 <= score <= 1.0):
        raise Corrupt(f"a grader gave item {item.id!r} the score {score}; it must lie in [0, 1]")
    answer = "" if tried.text is None else blake3(" ".join(tried.text.split()).encode()).hexdigest(length=4)
    return ItemScore(item=item.id, draw=draw, score=score, formed=tried.formed, seconds=tried.seconds, answer=answer)


def first_error(errors: BaseExceptionGroup[OstinatoError]) -> OstinatoError:
    """Return one error of a task group's tree: the tasks fail for the same reason, and callers catch by type."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OstinatoError)
    return error


# ---------------------------------------------------------------- waiting


class WrongVersion(Unavailable):
    """Another version than the one under evaluation generated a try, in part or whole, or the slot is empty."""


def check_version(slot: str, policy: PolicyVersion, found: PolicyVersion | None) -> None:
    """Raise WrongVersion while the slot does not hold `policy` yet, Conflict once it holds another version that is newer."""
    if found is None or (found.hash != policy.hash and found.number <= policy.number):
        serves = "is not loaded" if found is None else f"serves {found}"
        raise WrongVersion(
            f"waiting for slot {slot!r} to serve {policy}; it {serves}. Does the engine follow this ref?"
        )
    if found.hash != policy.hash:
        raise Conflict(
            f"slot {slot!r} has moved on to {found} while {policy} was evaluated; evaluate again, now {found}"
        )


async def wait_for_version(
    config: RunnerConfig, slot: str, policy: PolicyVersion, served: Callable[[], Awaitable[PolicyVersion | None]]
) -> None:
    """Wait until the slot holds `policy`. Raises as `check_version` and `patiently` do."""

    async def check() -> None:
        check_version(slot, policy, await served())

    await patiently(config, f"the gateway's /health for slot {slot!r}", check)


async def patiently(
    config: RunnerConfig,
    what: str,
    ask: Callable[[], Awaitable[_T]],
    hint: str = "is `ostinato serve` running?",
) -> _T:
    """Call `ask` with retries. Failures and waiting for a version have separate budgets. Raises Unavailable with the hint."""
    policy = RetryPolicy(pause_s=config.retry_pause_s, longest_s=_LONGEST_PAUSE_S, jitter=0.25)
    rng = random.Random()
    failing = Backoff(replace(policy, attempts=config.attempts), rng=rng)
    version = Backoff(replace(policy, total_s=config.slot_timeout_s), rng=rng)
    while True:
        try:
            return await ask()
        except WrongVersion as error:
            pause = version.failed(error)
            if pause is None:
                raise
        except (Unavailable, TimeoutError) as error:
            pause = failing.failed(error)
            if pause is None:
                raise Unavailable(
                    f"{what}: failed {failing.failures} times, last with {type(error).__name__}: {error}; {hint}"
                ) from error
        await asyncio.sleep(pause)
