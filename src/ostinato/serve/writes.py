"""Writes to the log that outlast the request that began them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Writes:
    """Writes that go on when the request that started them is cancelled. `drain` waits for them at shutdown."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, write: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a write to its end whatever happens to the caller, who awaits it under `asyncio.shield`."""
        task = asyncio.get_running_loop().create_task(write)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def drain(self) -> None:
        """Wait for all running writes."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone: whoever is still there has it from the shield
