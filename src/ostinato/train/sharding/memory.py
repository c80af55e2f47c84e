"""Makes glibc return freed memory, for processes whose peak memory matters."""

from __future__ import annotations

import ctypes
import os
import sys

_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
_LARGE = 1 << 17
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it makes its first tensor


def return_freed_memory() -> None:
    """Make blocks of 128 KiB and more go back to the system when they are freed. Without glibc nothing is done.

    By default glibc raises that bound to the largest block freed so far, up to 32 MiB. Gathered layers, activations and gradients of
    different sizes are then interleaved in one heap that never shrinks during a step.

    Memory that is new to the process costs a page fault for every 4 KiB, so torch asks for pages of 2 MiB from now on, if it has made no
    tensor yet. The environment variable THP_MEM_ALLOC_ENABLE=0 prevents that.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        os.environ.setdefault(_LARGE_PAGES, "1")
