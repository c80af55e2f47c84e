"""How a worker learns that it should end: SIGTERM, SIGINT, or the death of the supervisor that started it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from ostinato.launch.placing.local import die_with_parent

_watching: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references to tasks


def until_stopped() -> asyncio.Event:
    """An event that is set when this worker should end."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    async def orphaned() -> None:
        await die_with_parent()
        stopping.set()

    task = loop.create_task(orphaned())
    _watching.add(task)
    task.add_done_callback(_watching.discard)
    return stopping


async def until(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or fails, or until `stopping` is set: then it is cancelled."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not task.done():
        task.cancel()
    await asyncio.gather(task, return_exceptions=stopping.is_set())
