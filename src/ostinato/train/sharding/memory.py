"""What glibc does with freed memory, for a process whose peak counts."""

from __future__ import annotations

import ctypes
import sys

_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
_LARGE = 1 << 17


def return_freed_memory() -> None:
    """Blocks of 128 KiB and more go back to the system when they are freed. Without glibc nothing is done.

    By itself glibc raises that bound to the largest block that was freed, up to 32 MiB. Gathered layers, activations and gradients of other
    sizes then lie between each other in one heap that never shrinks during a step.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
