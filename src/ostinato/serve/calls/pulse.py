"""Heartbeats in a silent stream, so that neither the client nor a proxy hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Pulse:
    """Calls `beat` once for every `every_s` seconds of silence. It uses a single timer: `silence` only notes when the silence began.

    Example::

        pulse.silence()
        chunk = await anext(chunks)
        await pulse.over()  # what was being sent is sent
    """

    def __init__(self, every_s: float, beat: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._every_s = every_s
        self._beat = beat
        self._silent = False
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None

    def silence(self) -> None:
        """Begin a silence."""
        self._silent = True
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._since + self._every_s, self._look)

    async def over(self) -> None:
        """End the silence; waits for a beat that is being sent."""
        self._silent = False
        if self._beating is not None:
            beating, self._beating = self._beating, None
            await beating

    def stop(self) -> None:
        """Stop beating, and cancel a beat that is being sent."""
        self._silent = False
        if self._timer is not None:
            self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()

    def _look(self) -> None:
        self._timer = None
        if not self._silent:
            return
        now = self._loop.time()
        if now >= self._since + self._every_s:
            self._since = now
            if self._beating is None or self._beating.done():
                self._beating = self._loop.create_task(self._beat())
        self._timer = self._loop.call_at(self._since + self._every_s, self._look)
