"""Memory that is free inside the process, for the others on the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

GIVE_BACK_EVERY = 8
"""Micro-batches of a step between two calls: what was given back must be asked for again, and each page of it filled with zeros."""


@cache
def _trim() -> Callable[[int], object]:
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc has it


def give_back() -> None:
    """Return the free pages of the heap to the system, those between pages in use too. Takes about 0.1 s for a GiB; glibc only.

    Tensors of many sizes that come and go leave holes that the next ones do not fit into, and the heap grows over them.
    """
    _trim()(0)
