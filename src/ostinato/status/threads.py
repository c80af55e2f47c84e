"""The page's own thread pool: for its questions, and what is put into words and drawn. Nothing else in the gateway waits for viewers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ostinato.core.errors import Unavailable
from ostinato.status.index_queries import TooWide

T = TypeVar("T")

THREADS = 2
"""Tenants' pages are made one at a time, which leaves the other for the operator."""


class Threads:
    """The page's thread pool. Its creator must close it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ostinato-page")
        self._closed = False

    async def ask(self, question: Callable[[], T], /) -> T:
        """Run a blocking question and return its result. Raises its errors, and Unavailable after `close`."""
        if self._closed:
            raise Unavailable("the page is closed because the gateway is stopping; try again in a moment")
        return await asyncio.get_running_loop().run_in_executor(self._pool, question)

    async def ask_index(self, question: Callable[[], T], otherwise: T) -> T:
        """The index's answer, or `otherwise` if it takes too long or cannot be read, so that the rest can still be shown."""
        try:
            return await self.ask(question)
        except (TooWide, Unavailable):
            return otherwise

    def close(self) -> None:
        """Start no further question; one that is running ends by itself."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
