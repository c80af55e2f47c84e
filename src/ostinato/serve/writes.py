"""Log writes that outlive the request that started them, and a health check of the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from ostinato.core.errors import BadRequest, OstinatoError, Unavailable
from ostinato.core.seams import Clock

_LOG = logging.getLogger(__name__)
# after this time the failure is forgotten: a gateway that reports failure may get no more calls that would notice the recovery
FAILING_S = 30.0


@asynccontextmanager
async def in_time(seconds: float) -> AsyncGenerator[None]:
    """Limit the wait for the log. Raises Unavailable."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unavailable(
            "The log did not answer in time; after a start it may still be reading its past. What was sent may or may not be recorded: "
            "send it again."
        ) from None


class Writes:
    """Runs writes that continue when the request that started them is cancelled. `drain` waits for them at shutdown.

    Args:
        clock: seconds.
        slow_s: the log counts as failing while a write takes longer than this.
    """

    def __init__(self, clock: Clock, *, slow_s: float) -> None:
        self._clock = clock
        self._slow_s = slow_s
        self._tasks: dict[asyncio.Task[Any], float] = {}  # pending writes -> start time, the oldest first
        self._failed: tuple[str, float] | None = None

    def begin(self, write: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a write that completes even if the caller is cancelled; the caller awaits it under `asyncio.shield`."""
        task = asyncio.get_running_loop().create_task(write)
        self._tasks[task] = self._clock()
        task.add_done_callback(self._ended)
        return task

    async def drain(self) -> None:
        """Wait for all pending writes."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def failing(self) -> str | None:
        """Return "store_slow" while a write hangs, or the error code of the last write if it failed at most `FAILING_S` ago, or None."""
        now = self._clock()
        if self._tasks and now - next(iter(self._tasks.values())) > self._slow_s:
            return "store_slow"
        if self._failed is None:
            return None
        code, at = self._failed
        self._failed = code, min(at, now)  # in case the clock was set back
        return code if now - at <= FAILING_S else None

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if task.cancelled():
            return
        # retrieve the exception in case the caller is gone; otherwise the caller gets it, too
        error = task.exception()
        if error is None:
            if self._failed is not None:
                _LOG.warning("The log accepts writes again.")
            self._failed = None
        elif not isinstance(error, BadRequest):  # a fault of the rows, not of the log
            if self._failed is None:
                _LOG.error("The log accepted no write: %s", error)
            self._failed = (error.code if isinstance(error, OstinatoError) else OstinatoError.code, self._clock())
