"""What this CPU's instruction sets allow the kernels, as numba compiles them."""

from __future__ import annotations

import ctypes
import platform
from functools import lru_cache
from typing import Any

from numba.core.registry import cpu_target

IS_ARM = platform.machine() in ("aarch64", "arm64")
_REQUEST, _TILE_DATA = 0x1023, 18  # of Linux's arch_prctl: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
_ARCH_PRCTL = 158  # the system call's number on x86-64


@lru_cache
def cpu_features() -> frozenset[str]:
    """The instruction sets that numba compiles for, without those masked by NUMBA_CPU_FEATURES. Example: {"avx2", "fma", ...}.

    Under NUMBA_CPU_NAME alone it is empty: numba then knows the name only.
    """
    context: Any = cpu_target.target_context
    _, _, features = context.codegen().magic_tuple()
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


@lru_cache
def tiles_allowed() -> bool:
    """Whether this process may use the CPU's tiles (AMX): Linux gives them on request, which holds for all threads started later."""
    if not {"amx-tile", "amx-bf16", "amx-int8"} <= cpu_features() or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0
