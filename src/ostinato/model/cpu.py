"""The CPU that models run on: its instructions under torch's names, kernels on as many threads as torch may use, memory given back."""

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


# ---------------------------------------------------------------- which CPU


_CPUINFO = Path("/proc/cpuinfo")
_TORCHS = {
    "avx512f": "avx512_f",
    "avx512bw": "avx512_bw",
    "avx512dq": "avx512_dq",
    "avx512vl": "avx512_vl",
    "fma": "fma3",
}
"""The kernel's name of an instruction -> torch's, where they differ."""


def capabilities() -> Mapping[str, Any]:
    """`torch.cpu.get_capabilities()`, which torch 2.8 lacks; there what the kernel says of the CPU, under the same names.

    Example: ``capabilities().get("avx512_bf16")``.
    """
    asked = getattr(torch.cpu, "get_capabilities", None)
    return asked() if asked is not None else kernels_word(_CPUINFO.read_text() if _CPUINFO.exists() else "")


def kernels_word(text: str) -> dict[str, Any]:
    """The first CPU of a /proc/cpuinfo: each instruction as True, `cpu_name` where there is one, and `architecture`."""
    pairs = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    first = {name.strip(): value.strip() for name, _, value in pairs}
    flags = first.get("flags", first.get("Features", "")).split()
    found: dict[str, Any] = {_TORCHS.get(name, name): True for name in flags}
    if name := first.get("model name"):
        found["cpu_name"] = name
    return found | {"architecture": platform.machine()}


# ---------------------------------------------------------------- memory


GIVE_BACK_EVERY = 8
"""Micro-batches of a step between two calls: memory given back must be requested again, and each page of it filled with zeros."""


@cache
def _trim() -> Callable[[int], object]:
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc has it


def give_back() -> None:
    """Return the free pages of the heap to the system, including those between pages in use. Takes about 0.1 s per GiB; glibc only.

    Tensors of many sizes that come and go leave holes that the next ones do not fit into, so the heap grows.
    """
    _trim()(0)
