"""Tunes a worker's process for latency: garbage collection, thread switching, and its heaps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Generator

SWITCH_INTERVAL_S = 0.0002

THRESHOLDS = (50_000, 20, 20)
"""A long request's JSON alone creates thousands of objects. With Python's default of 700 they would be traversed again and again."""
_WHILE_LOADING = (THRESHOLDS[0] + 1, *THRESHOLDS[1:])  # distinguishable from those of `settle`

HEAPS = 2
# M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of glibc's malloc.h
_MALLOC_OPTIONS = {-8: HEAPS, -3: 2 << 20, -1: 32 << 20}


def settle() -> None:
    """Exempt all current objects from later garbage collections, and make these rarer. Call it once, when a worker is up and before
    anybody waits.

    A full collection traverses everything that torch, transformers and compiled kernels have created: 0.3 s in which no token is
    sampled and no call answered. Exempt objects, the weights among them, are still freed when their last reference goes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextlib.contextmanager
def collecting_rarely() -> Generator[None]:
    """Collect garbage inside the block as rarely as after `settle`.

    For imports, which create a million objects and no garbage: traversing them again and again takes a sixth of the import's time.
    Thresholds that are set inside the block, by `settle` or otherwise, stay.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_WHILE_LOADING)
    set_here = gc.get_threshold()  # read back from Python: 3.14 has no third threshold, and says 0
    try:
        yield
    finally:
        if gc.get_threshold() == set_here:
            gc.set_threshold(*before)


def take_short_turns() -> None:
    """Shorten the interpreter's thread switch interval from 5 ms to 0.2 ms, for the life of the process.

    The engine and the event loop release the GIL at every operation. To get it back they wait a full interval for each thread that
    reads a long request or renders a page, many times per answer.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))


def keep_heaps_small() -> None:
    """Make the process return freed memory, for its life. Call it before threads start. Without glibc it does nothing.

    glibc gives each thread a heap of its own, up to eight for each core. Once a block of up to 32 MiB was freed, it allocates others of
    that size on the heaps, where they leave holes. Here all threads share two heaps, and blocks of 2 MiB and more are returned at once.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        for name, value in _MALLOC_OPTIONS.items():
            libc.mallopt(name, value)
