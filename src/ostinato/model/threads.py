"""Spread a kernel over as many threads as torch may use. The kernels release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise

import torch


@contextmanager
def team(count: int) -> Generator[None]:
    """`count` torch threads for what this thread computes meanwhile."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def split(count: int, run: Callable[[int, int], object], *, least: int = 1) -> None:
    """`run(a, b)` over parts of [0, count), one per thread; no part is smaller than `least`, for which a thread is not worth waking."""
    threads = max(1, min(torch.get_num_threads(), count // least))
    spread([count * i // threads for i in range(threads + 1)] if threads > 1 else [0, count], run)


def spread(cuts: Sequence[int], run: Callable[[int, int], object]) -> None:
    """`run` between each two neighbours of `cuts`: the first on this thread, the others beside it."""
    others = [_pool().submit(run, a, b) for a, b in pairwise(cuts[1:])]
    run(cuts[0], cuts[1])
    for other in others:
        other.result()


def together(run: Callable[[], object]) -> None:
    """`run` on this thread, and on as many more as torch may use as soon as they come; returns when this one is done.

    For a computation whose threads share it among themselves (`kernels.turns`): one that comes late finds it done.
    """
    for _ in range(torch.get_num_threads() - 1):
        _pool().submit(run)
    run()


@lru_cache
def _pool() -> ThreadPoolExecutor:
    """One for every team: a thread is started when there is work for it, so the size is only a bound."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ostinato-kernel")
