"""Graceful shutdown: how a process ends on SIGTERM, SIGINT or SIGHUP."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

CLEANING_S = 5.0
"""How long cancelled work may take to clean up."""
_T = TypeVar("_T")


class Stopped(Exception):
    """The process was told to end before the work was done."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask for an orderly end. SIGHUP, a closed terminal, only if it is not ignored, as under nohup."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def until_stopped() -> asyncio.Event:
    """An event that is set when this process should end."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stopping.set)
    return stopping


class Interruption:
    """Lets SIGTERM and SIGHUP end a command as Ctrl-C does: with a KeyboardInterrupt, or the cancellation that asyncio makes of it.

    The first of them counts: a closing terminal sends SIGHUP twice, its shell's and the kernel's. Only Ctrl-C cuts the clean-up short.
    """

    def __init__(self) -> None:
        self._number, self._ending = signal.SIGINT, False
        for number in stop_signals():
            if number is not signal.SIGINT:
                signal.signal(number, self._end)

    @property
    def code(self) -> int:
        """The exit code that shells expect after the signal that came."""
        return 128 + self._number

    def _end(self, number: int, _: object) -> None:
        if self._ending:
            return
        self._number, self._ending = signal.Signals(number), True
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL):  # as in the background of a script
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, _T], cleaning_s: float = CLEANING_S) -> _T:
    """Run `work` and return its result. Raises Stopped if `stopping` is set first: `work` is then cancelled and has `cleaning_s` seconds
    to clean up.
    """
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        stop.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=cleaning_s)
    raise Stopped
