"""Returns memory that is free inside the process to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

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
