"""Cancels a call's task when the client disconnects or a step takes too long, with one timer and one listener per call.

A step only records its deadline, which is checked when the timer fires, so steps need no timers of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed the connection or stopped reading, so nobody can be answered."""


class DisconnectWatch:
    """Cancels the task that entered it, and replaces the cancellation by the exception for its reason.

    Args:
        receive: the connection's remaining messages; a disconnect ends the task with `ClientGone`.

    Example::

        async with DisconnectWatch(receive) as watch:
            watch.allow(30.0, lambda: EngineFailed("..."))  # the next await may take 30 s
            chunk = await anext(chunks)
    """

    def __init__(self, receive: Receive) -> None:
        self.reason: Exception | None = None
        self.left = False  # the client closed the connection
        self.answered = False  # the whole response is handed over, so a disconnect no longer matters
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._deadline = float("inf")
        self._late: Callable[[], Exception] = ClientGone
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> DisconnectWatch:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._listener = self._loop.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._listener.cancel()
        if self.reason is not None and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self.reason from None

    def allow(self, seconds: float, late: Callable[[], Exception]) -> None:
        """Set the deadline of the step that begins now. `late` makes the exception that ends the task if the step takes longer."""
        self._deadline = deadline = self._loop.time() + seconds
        self._late = late
        if self._timer is None or self._timer.when() > deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._look)

    def end(self, reason: Exception) -> None:
        """Cancel the task for this reason. Only the first reason counts."""
        if self.reason is None:
            self.reason = reason
            self._task.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() >= self._deadline:
            self.end(self._late())
        else:
            self._timer = self._loop.call_at(self._deadline, self._look)

    async def _listen(self) -> None:
        message: Mapping[str, Any] = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await self._receive()
        if not self.answered:
            self.left = self.reason is None
            self.end(ClientGone())
