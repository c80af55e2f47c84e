"""The threads that answer the page's questions: a few of their own, so that nothing else of the gateway waits for who looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from ostinato.core.errors import Unavailable

T = TypeVar("T")

THREADS = 2
"""Tenants' questions come one at a time, which leaves the other for the operator."""


class Ask(Protocol):
    """How a question is asked: `Threads.ask`."""

    async def __call__(self, question: Callable[[], T], /) -> T: ...


class Threads:
    """Whoever makes it closes it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ostinato-page")
        self._closed = False

    async def ask(self, question: Callable[[], T], /) -> T:
        """What a question that blocks returns. Raises what it raises, and Unavailable after `close`."""
        if self._closed:
            raise Unavailable("the page is closed: the gateway ends; look again in a moment")
        return await asyncio.get_running_loop().run_in_executor(self._pool, question)

    def close(self) -> None:
        """Begin no other question; one that is being answered ends by itself."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
