"""Runs what grows with a request: short work inline, long work on a thread, round-robin over the tenants, with a bounded queue for each.

So a long request delays other long ones of its tenant, and no stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ostinato.core.fair_queue import InTurn
from ostinato.serve.quotas import QuotaExceeded

AT_ONCE_CHARS = 4_000
"""Are tokenised in a millisecond or two, less than a round trip to a thread takes on a busy machine."""
PER_PARSED = 4
"""Bytes that are parsed or hashed in the time that a tokenizer takes for one."""
LONG = AT_ONCE_CHARS + 1
MOST_WAITING = 64

_T = TypeVar("_T")


class FairThread:
    """Runs tenants' work. Use it on one event loop only; `close` it when done.

    Example: ``prompt = await thread.run("acme", chars, lambda: sessions.render(question))``
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="requests")
        self._waiting: InTurn[str, tuple[asyncio.Future[Any], Callable[[], Any]]] = InTurn()
        self._busy = False

    async def run(self, tenant: str, chars: int, work: Callable[[], _T]) -> _T:
        """The result of `work`, which takes as long as tokenising `chars` characters. Raises whatever `work` raises, and QuotaExceeded."""
        if chars <= AT_ONCE_CHARS:
            return work()
        if (waiting := self._waiting.count(tenant)) >= MOST_WAITING:
            raise QuotaExceeded(
                f"{waiting} long requests of yours wait to be read; wait for some.",
                kind="requests",
                retry_after_s=1,
            )
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.put(tenant, (done, work))
        self._next()
        return await done

    def close(self) -> None:
        """Release the thread once its current work is done."""
        self._thread.shutdown(cancel_futures=True)

    def _next(self) -> None:
        """Start the oldest work of the next tenant."""
        while not self._busy and (waiting := self._waiting.next()) is not None:
            done, work = waiting
            if done.done():  # its caller has gone
                continue
            self._busy = True
            running = asyncio.get_running_loop().run_in_executor(self._thread, work)
            running.add_done_callback(partial(self._settle, done))

    def _settle(self, done: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        self._busy = False
        error = None if running.cancelled() else running.exception()
        if not done.done():
            if running.cancelled():
                done.cancel()
            elif error is not None:
                done.set_exception(error)
            else:
                done.set_result(running.result())
        self._next()
