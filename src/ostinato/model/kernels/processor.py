"""Detects the CPU's instruction sets, as far as numba compiles for them, and requests the use of AMX tiles."""

from __future__ import annotations

import ctypes
import platform
from functools import lru_cache
from typing import Any

from numba.core.registry import cpu_target

IS_ARM = platform.machine() in ("aarch64", "arm64")
_REQUEST, _TILE_DATA = 0x1023, 18  # arguments of Linux's arch_prctl: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
_ARCH_PRCTL = 158  # the system call's number on x86-64


@lru_cache
def cpu_features() -> frozenset[str]:
    """Return the instruction sets for which numba compiles, without those masked by NUMBA_CPU_FEATURES. Example: {"avx2", "fma", ...}.

    Empty if only NUMBA_CPU_NAME is set, because numba then only knows the name.
    """
    context: Any = cpu_target.target_context
    _, _, features = context.codegen().magic_tuple()
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


@lru_cache
def tiles_allowed() -> bool:
    """Return whether this process may use the CPU's tiles (AMX). Requests them from Linux; a grant holds for all threads started later."""
    if not {"amx-tile", "amx-bf16", "amx-int8"} <= cpu_features() or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0
