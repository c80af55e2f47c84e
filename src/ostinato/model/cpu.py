"""The CPU that models run on: its instruction sets, kernels on torch's number of threads, and trimming of the heap."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch


@contextmanager
def team(count: int) -> Generator[None]:
    """Inside the context, use `count` torch threads for this thread's computations."""
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
    """Call `run(a, b)` for parts of [0, count) in parallel, one part per torch thread, each with at least `least` items."""
    threads = max(1, min(torch.get_num_threads(), count // least))
    spread([count * i // threads for i in range(threads + 1)] if threads > 1 else [0, count], run)


def spread(cuts: Sequence[int], run: Callable[[int, int], object]) -> None:
    """Call `run(a, b)` in parallel for each pair of neighbours in `cuts`: the first on this thread, the others on pool threads."""
    others = [_pool().submit(run, a, b) for a, b in pairwise(cuts[1:])]
    run(cuts[0], cuts[1])
    for other in others:
        other.result()


def together(run: Callable[[], object]) -> None:
    """Call `run` on this thread, and on pool threads as they become free, torch's number in all; return when this thread is done.

    For a computation that its threads divide among themselves (`kernels.thread_barrier`): a late thread finds nothing left to do.
    """
    for _ in range(torch.get_num_threads() - 1):
        _pool().submit(run)
    run()


os.register_at_fork(after_in_child=lambda: _pool.cache_clear())  # threads do not survive a fork


@lru_cache
def _pool() -> ThreadPoolExecutor:
    """Return the pool that all teams share. Threads start when there is work for them, so its size is only a bound."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ostinato-kernel")


# ---------------------------------------------------------------- instruction sets


_CPUINFO = Path("/proc/cpuinfo")
_TORCH_NAMES = {
    "avx512f": "avx512_f",
    "avx512bw": "avx512_bw",
    "avx512dq": "avx512_dq",
    "avx512vl": "avx512_vl",
    "fma": "fma3",
}
"""Linux's name of an instruction set -> torch's, where they differ."""


def capabilities() -> Mapping[str, Any]:
    """Return `torch.cpu.get_capabilities()`, or, for torch 2.8, which lacks it, /proc/cpuinfo under the same names.

    Example: ``capabilities().get("avx512_bf16")``.
    """
    by_torch = getattr(torch.cpu, "get_capabilities", None)
    return by_torch() if by_torch is not None else parse_cpuinfo(_CPUINFO.read_text() if _CPUINFO.exists() else "")


def parse_cpuinfo(text: str) -> dict[str, Any]:
    """Parse the first CPU of /proc/cpuinfo: each instruction set as True, `cpu_name` if it has one, and `architecture`."""
    pairs = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    first = {name.strip(): value.strip() for name, _, value in pairs}
    flags = first.get("flags", first.get("Features", "")).split()
    about: dict[str, Any] = {_TORCH_NAMES.get(name, name): True for name in flags}
    if name := first.get("model name"):
        about["cpu_name"] = name
    return about | {"architecture": platform.machine()}


# ---------------------------------------------------------------- memory


TRIM_EVERY = 8
"""Micro-batches between two calls of `trim_heap`: the system zeroes each page that is returned and requested again."""


@cache
def _trim() -> Callable[[int], object]:
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc has it


def trim_heap() -> None:
    """Return the heap's free pages to the system, including those between pages in use. Takes about 0.1 s per GiB; glibc only.

    Without it the heap grows by fragmentation: tensors of many sizes leave holes into which the next ones do not fit.
    """
    _trim()(0)
