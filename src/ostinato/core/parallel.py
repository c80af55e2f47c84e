"""Bounded concurrency: a call for each item, a limited number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def for_each(items: Iterable[T], parallel: int, work: Callable[[T], Awaitable[object]]) -> None:
    """Call `work` with each item, at most `parallel` at once. Raises the first failure once all have stopped.

    Example: ``await for_each(names, 8, store.get)``
    """
    rest = iter(items)

    async def worker() -> None:
        for item in rest:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(worker())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed
