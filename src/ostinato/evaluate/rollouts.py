"""Runs a suite whose items are tasks of a simulated world: each draw is a whole rollout by the task's harness, in the slot under test.

The world, passed as `TaskWorld`, decides who works on a task, where, and how the outcome is graded. As for a single answer, a draw's seed
does not depend on the version, so versions are paired by (item, draw).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from ostinato.core.errors import Corrupt, OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemScore
from ostinato.evaluate.config import RunnerConfig
from ostinato.evaluate.gateway import check_version, first_error, patiently, served_model
from ostinato.evaluate.runner import item_seed
from ostinato.evaluate.suites import Item, Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTry:
    """One rollout of an item's task: `score` in [0, 1], `formed` if it ended by itself, and every version that made a token of it.

    Example: ``WholeTry(score=1.0, formed=True, policies=(v9,))``
    """

    score: float
    formed: bool
    policies: tuple[PolicyVersion, ...]


TryOnce = Callable[[Item, int], Awaitable[WholeTry]]
"""(item, seed of the first call) -> the rollout. Raises Unavailable if a retry may succeed."""


class TaskWorld(Protocol):
    """The world that the items' tasks live in."""

    def open(self, slot: str) -> AbstractAsyncContextManager[TryOnce]:
        """A context that provides what rollouts need; their model calls are answered by the weights of `slot`."""
        ...


class RolloutRunner:
    """One suite of tasks, one world, one gateway. Implements `Runner`."""

    def __init__(
        self, suite: Suite, world: TaskWorld, base_url: str, admin_key: str | None, config: RunnerConfig
    ) -> None:
        self.suite = suite
        self._world = world
        self._health = base_url.rstrip("/").removesuffix("/v1") + "/health"
        self._headers = {} if admin_key is None else {"X-Ostinato-Key": admin_key}
        self._config = config

    async def run(
        self, slot: str, policy: PolicyVersion, draws: range, items: Sequence[Item] | None = None, *, seed: int = 0
    ) -> list[ItemScore]:
        """Scores of `items` (default: all) for each draw, every token of which was made by `policy`. Another `seed`: fresh draws.

        Raises:
            Unavailable: the gateway or a sandbox did not answer, or the slot did not come to serve `policy`, in the configured time.
            Conflict: the slot has moved on to a newer version.
            BadRequest, BadConfig: a task cannot be tried, or not graded.
        """
        chosen = self.suite.items if items is None else items
        if len(draws) == 0 or not chosen:
            return []
        progress = [0, len(chosen) * len(draws)]
        try:
            async with asyncio.timeout(self._config.deadline_s):
                await self._ready(slot, policy)
                async with self._world.open(slot) as try_once:
                    return await self._all(try_once, slot, policy, draws, chosen, seed, progress)
        except TimeoutError as error:
            raise Unavailable(
                f"evaluation of {policy} in slot {slot!r} passed its deadline of {self._config.deadline_s:g} s with "
                f"{progress[0]} of {progress[1]} rollouts graded; raise evaluate.runner.deadline_s or shrink the taskset"
            ) from error

    async def _ready(self, slot: str, policy: PolicyVersion) -> None:
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            await patiently(
                self._config, f"GET {self._health}", lambda: served_model(session, self._health, slot, policy)
            )

    async def _all(
        self,
        try_once: TryOnce,
        slot: str,
        policy: PolicyVersion,
        draws: range,
        items: Sequence[Item],
        seed: int,
        progress: list[int],
    ) -> list[ItemScore]:
        places = asyncio.Semaphore(self._config.concurrency)

        async def checked(item: Item, draw: int) -> tuple[WholeTry, float]:
            began = time.monotonic()
            # the draw goes into the hash, since a rollout's later calls count up from its first seed
            tried = await try_once(item, item_seed(self.suite, item, self._config.seed, seed + draw))
            seconds = time.monotonic() - began
            if not tried.policies:
                raise Corrupt(f"a rollout of {item.id!r} names no version; nothing can be concluded from it")
            for found in tried.policies:
                check_version(slot, policy, found)
            return tried, seconds

        async def one(item: Item, draw: int) -> ItemScore:
            async with places:
                what = f"task {item.id!r} in slot {slot!r}"
                tried, seconds = await patiently(self._config, what, lambda: checked(item, draw))
            progress[0] += 1
            return _score_of(item, draw, tried, seconds)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(item, draw)) for item in items for draw in draws]
        except* OstinatoError as errors:
            raise first_error(errors) from errors
        return [task.result() for task in tasks]


def _score_of(item: Item, draw: int, tried: WholeTry, seconds: float) -> ItemScore:
    if not (math.isfinite(tried.score) and 0.0 <= tried.score <= 1.0):
        raise Corrupt(f"grader {item.grader!r} gave task {item.id!r} the score {tried.score}; it must lie in [0, 1]")
    return ItemScore(item=item.id, draw=draw, score=tried.score, formed=tried.formed, seconds=seconds)
