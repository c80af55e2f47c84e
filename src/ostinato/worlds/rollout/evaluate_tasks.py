"""Tries tasks to measure only: each a given number of times, with nothing learned. Their turns are reported as measured."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from ostinato.worlds.rollout.attempt import FinishedRollout, Trying, Workshop
from ostinato.worlds.rollout.groups import measured
from ostinato.worlds.tasks.task import Task


class Measurement:
    """Tries each of some tasks `tries` times.

    Args:
        tasks: the tasks to try.
        shop: works on them.
        tries: rollouts of each task.
        concurrency: rollouts at once.
        token: the prefix of the episodes' names.
        again: how often, at most, a rollout is tried that something other than the policy ends.
        pause_s: seconds before the first retry of what was unavailable.
        patience_s: how long something may be unavailable.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        shop: Workshop,
        *,
        tries: int,
        concurrency: int,
        token: str,
        again: int,
        pause_s: float,
        patience_s: float = 3600.0,
    ) -> None:
        self._tasks, self._shop, self._tries = tasks, shop, tries
        self._token, self._again = token, again
        self._places = asyncio.Semaphore(concurrency)
        self._trying = Trying(shop, pause_s=pause_s, patience_s=patience_s)

    async def results(self) -> AsyncGenerator[FinishedRollout]:
        """Each rollout as it ends; all tasks are begun once before any of them twice.

        Raises errors that no retry would change: BadConfig, BadRequest. Closing it early cancels the rollouts in progress.
        """
        work = [
            asyncio.ensure_future(self._one(task, f"{self._token}.{draw}.{place}"))
            for draw in range(self._tries)
            for place, task in enumerate(self._tasks)
        ]
        try:
            for ended in asyncio.as_completed(work):
                yield await ended
        finally:
            for each in work:
                each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*work, return_exceptions=True)

    async def _one(self, task: Task, episode: str) -> FinishedRollout:
        async with self._places:
            number = 0
            while True:
                tried = await self._trying.once(task, episode if not number else f"{episode}.again{number}", None)
                if events := measured(tried.turns):
                    await self._trying.patiently(lambda: self._shop.gateway.say(events))
                number += 1
                if tried.value is not None or number >= self._again:
                    return tried
