"""Runs a kernel on as many threads as torch may use. The kernels release the GIL."""

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
    """Use `count` torch threads for this thread's computations inside the context."""
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
    """Call `run(a, b)` over parts of [0, count), one per thread; a part smaller than `least` is not worth waking a thread for."""
    threads = max(1, min(torch.get_num_threads(), count // least))
    spread([count * i // threads for i in range(threads + 1)] if threads > 1 else [0, count], run)


def spread(cuts: Sequence[int], run: Callable[[int, int], object]) -> None:
    """Call `run` for each pair of neighbours in `cuts`: the first on this thread, the others on pool threads in parallel."""
    others = [_pool().submit(run, a, b) for a, b in pairwise(cuts[1:])]
    run(cuts[0], cuts[1])
    for other in others:
        other.result()


def together(run: Callable[[], object]) -> None:
    """Call `run` on this thread, and on as many more as torch may use as they become free; returns when this thread is done.

    For a computation that its threads divide among themselves (`kernels.turns`): a thread that comes late finds it done.
    """
    for _ in range(torch.get_num_threads() - 1):
        _pool().submit(run)
    run()


os.register_at_fork(after_in_child=lambda: _pool.cache_clear())  # a child has none of the threads


@lru_cache
def _pool() -> ThreadPoolExecutor:
    """One pool for all teams: a thread is started when there is work for it, so the size is only a bound."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ostinato-kernel")
