"""The CPU's instructions under torch's names, also with a torch that cannot name them itself."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

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
    first = dict(_pair(line) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    flags = first.get("flags", first.get("Features", "")).split()
    found: dict[str, Any] = {_TORCHS.get(name, name): True for name in flags}
    if name := first.get("model name"):
        found["cpu_name"] = name
    return found | {"architecture": platform.machine()}


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()
