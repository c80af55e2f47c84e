"""Runs work whose cost grows with a request: short work inline, long work on one thread, round-robin over the tenants with bounded queues.

A long request thus delays other long requests, mainly its own tenant's, but no stream.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from ostinato.core.fair_share import InTurn
from ostinato.serve.quotas import QuotaExceeded

AT_ONCE_CHARS = 4_000
"""Work up to this cost (in characters to tokenise) runs inline: 1-2 ms, less than a hop to a thread on a busy machine."""
PARSED_PER_CHAR = 4
"""Bytes that are parsed or hashed in the time in which one character is tokenised."""
CHARS_PER_DIGEST = 4
"""Characters that are tokenised in the time in which one message is added to a hash chain."""
LONG = AT_ONCE_CHARS + 1
MOST_WAITING = 64

_T = TypeVar("_T")


class _Work(NamedTuple):
    do: Callable[[], Any]
    done: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class FairThread:
    """Runs tenants' work on its thread. Use it from one event loop only; `close` it when done.

    The thread takes the next work by itself, because a hand-over through the event loop would cost as much as parsing a short request.

    Example: ``prompt = await thread.run("acme", chars, lambda: sessions.render(question))``
    """

    def __init__(self) -> None:
        self._waiting: InTurn[str, _Work] = InTurn()
        self._lock = threading.Lock()
        self._busy = False
        self._first: SimpleQueue[_Work | None] = SimpleQueue()  # hands work to the idle thread; None ends it
        self._thread: threading.Thread | None = None

    async def run(self, tenant: str, chars: int, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, which costs as much as tokenising `chars` characters. Raises QuotaExceeded, and `work`'s errors."""
        if chars <= AT_ONCE_CHARS:
            return work()
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="requests", daemon=True)
            thread.start()  # if the machine cannot start one, nothing is queued, and the next call tries again
            self._thread = thread
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()
        with self._lock:
            waiting, idle = self._waiting.count(tenant), not self._busy
            if idle:
                self._busy = True
                self._first.put(_Work(work, done, loop))
            elif waiting < MOST_WAITING:
                self._waiting.put(tenant, _Work(work, done, loop))
        if not idle and waiting >= MOST_WAITING:
            raise QuotaExceeded(
                f"{waiting} of your long requests are waiting to be read; wait for some.",
                kind="requests",
                retry_after_s=1,
            )
        return await done

    def close(self) -> None:
        """End the thread after its current work; queued work is cancelled."""
        with self._lock:
            while (work := self._waiting.next()) is not None:
                work.done.cancel()
        self._first.put(None)

    def _serve(self) -> None:
        while (work := self._first.get()) is not None:
            while work is not None:
                if not work.done.done():  # else its caller is gone
                    self._do(work)
                with self._lock:
                    work = self._waiting.next()
                    self._busy = work is not None

    @staticmethod
    def _do(work: _Work) -> None:
        result, failure = None, None
        try:
            result = work.do()
        except BaseException as error:  # noqa: BLE001 (it is raised in the caller)
            failure = error
        with suppress(RuntimeError):  # the loop is closed, and with it every caller
            work.loop.call_soon_threadsafe(_settle, work.done, result, failure)


def _settle(done: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(result)
