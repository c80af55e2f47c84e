"""Runs what grows with a request: short work inline, long work on a thread, round-robin over the tenants, with a bounded queue for each.

So a long request delays other long ones of its tenant, and no stream.
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
"""Are tokenised in a millisecond or two, less than a round trip to a thread takes on a busy machine."""
PER_PARSED = 4
"""Bytes that are parsed or hashed in the time that a tokenizer takes for one."""
PER_HASHED = 4
"""Characters that a tokenizer takes in the time in which one message's digest is hashed with those before it."""
LONG = AT_ONCE_CHARS + 1
MOST_WAITING = 64

_T = TypeVar("_T")


class _Work(NamedTuple):
    do: Callable[[], Any]
    done: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class FairThread:
    """Runs tenants' work. Use it on one event loop only; `close` it when done.

    Its thread takes the next work by itself: a hand-over through the event loop costs as much as reading a short request.

    Example: ``prompt = await thread.run("acme", chars, lambda: sessions.render(question))``
    """

    def __init__(self) -> None:
        self._waiting: InTurn[str, _Work] = InTurn()
        self._lock = threading.Lock()
        self._busy = False
        self._first: SimpleQueue[_Work | None] = SimpleQueue()  # what an idle thread begins with; None: it ends
        self._thread: threading.Thread | None = None

    async def run(self, tenant: str, chars: int, work: Callable[[], _T]) -> _T:
        """The result of `work`, which takes as long as tokenising `chars` characters. Raises whatever `work` raises, and QuotaExceeded."""
        if chars <= AT_ONCE_CHARS:
            return work()
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="requests", daemon=True)
            thread.start()  # where the machine has no thread left, nothing is queued, and the next call tries again
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
        """End the thread once its current work is done; what waits is cancelled."""
        with self._lock:
            while (work := self._waiting.next()) is not None:
                work.done.cancel()
        self._first.put(None)

    def _serve(self) -> None:
        while (work := self._first.get()) is not None:
            while work is not None:
                if not work.done.done():  # its caller may have gone
                    self._do(work)
                with self._lock:
                    work = self._waiting.next()
                    self._busy = work is not None

    @staticmethod
    def _do(work: _Work) -> None:
        result, failure = None, None
        try:
            result = work.do()
        except BaseException as error:  # noqa: BLE001 (it is raised again where the work came from)
            failure = error
        with suppress(RuntimeError):  # the loop has ended, and everybody who waits with it
            work.loop.call_soon_threadsafe(_settle, work.done, result, failure)


def _settle(done: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(result)
