"""Makes glibc return freed memory, for processes whose peak memory matters."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
_LARGE = 1 << 17
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it makes its first tensor


def return_freed_memory() -> None:
    """Make blocks of 128 KiB and more go back to the system when they are freed. Without glibc nothing is done.

    By default glibc raises that bound to the largest block freed so far, up to 32 MiB. Gathered layers, activations and gradients of
    different sizes are then interleaved in one heap that never shrinks during a step.

    Memory that is new to the process costs a page fault for every 4 KiB, so torch asks for pages of 2 MiB from now on, if it has made no
    tensor yet. Where the environment variable THP_MEM_ALLOC_ENABLE is set, it decides.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        if _LARGE_PAGES not in os.environ:
            os.environ[_LARGE_PAGES] = "1"
            torch.empty(1)
            del os.environ[_LARGE_PAGES]  # not for programs that this process starts
