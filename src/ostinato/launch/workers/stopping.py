"""How a process learns that it should end: SIGTERM, SIGINT, or the death of the supervisor that started it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from ostinato.launch.placing.sign import PARENT

_watching: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references to tasks
_PR_SET_PDEATHSIG = 1
_T = TypeVar("_T")


class Stopped(Exception):
    """The process was told to end before this was done."""


def until_stopped() -> asyncio.Event:
    """An event that is set when this process should end."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    async def orphaned() -> None:
        await parent_gone()
        stopping.set()

    task = loop.create_task(orphaned())
    _watching.add(task)
    task.add_done_callback(_watching.discard)
    return stopping


def die_with_parent() -> None:
    """Have the kernel kill this process when the supervisor that started it dies, kill -9 included.

    Where the kernel cannot (`parent_gone` is left), or nobody started it, nothing happens.
    """
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != parent:  # it died before it was asked
        os._exit(1)


async def parent_gone(interval_s: float = 1.0) -> None:
    """Return once the supervisor that started this process is gone; never, if nobody did."""
    parent = os.environ.get(PARENT)
    if parent is None:
        await asyncio.Event().wait()
    while str(os.getppid()) == parent:
        await asyncio.sleep(interval_s)


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns. Raises Stopped, with `work` cancelled, if `stopping` is set first."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
        if not task.done():
            task.cancel()
    if not task.done():
        raise Stopped
    return task.result()


async def until(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or fails, or until `stopping` is set: then it is cancelled."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not task.done():
        task.cancel()
    await asyncio.gather(task, return_exceptions=stopping.is_set())
