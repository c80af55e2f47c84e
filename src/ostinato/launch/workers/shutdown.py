"""Graceful shutdown on SIGTERM, SIGINT or SIGHUP."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

CLEANING_S = 5.0
"""Seconds that cancelled work has to clean up."""
_T = TypeVar("_T")


class Stopped(Exception):
    """The process was told to end before its work was done."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask for a graceful shutdown. SIGHUP (the terminal was closed) is left out if it is ignored, as under
    nohup.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def until_stopped() -> asyncio.Event:
    """Install the signal handlers and return an event that is set when this process must end."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stopping.set)
    return stopping


class Interruption:
    """Makes SIGTERM and SIGHUP end a command as Ctrl-C does: with a KeyboardInterrupt, or the cancellation that asyncio makes of it.

    Only the first of them counts, since a closing terminal causes two SIGHUPs (the shell's and the kernel's). Ctrl-C alone cuts the
    clean-up short.
    """

    def __init__(self) -> None:
        self._number, self._ending = signal.SIGINT, False
        for number in stop_signals():
            if number is not signal.SIGINT:
                signal.signal(number, self._end)

    @property
    def code(self) -> int:
        """The exit code that shells expect after the received signal."""
        return 128 + self._number

    def _end(self, number: int, _: object) -> None:
        if self._ending:
            return
        self._number, self._ending = signal.Signals(number), True
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL):  # e.g. a background job of a script
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, _T], cleaning_s: float = CLEANING_S) -> _T:
    """Run `work` and return its result. If `stopping` is set first, cancel it, give it `cleaning_s` seconds to clean up and raise
    Stopped.
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
