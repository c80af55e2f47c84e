"""Weights as bytes, and what is done with them: loaded into a slot, learned in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.records import PolicyVersion

ITEMSIZES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""The closed list of dtypes (safetensors names) and their bytes per element."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightArray:
    """One tensor as bytes: a safetensors dtype name ("BF16", "F32"), a shape, and a flat read-only uint8 array.

    Example: ``WeightArray("BF16", (576, 576), data)`` where ``data.nbytes == 576 * 576 * 2``.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


Weights = Mapping[str, WeightArray]
"""Tensor name -> bytes. The common currency of trainer, weight store and engine; needs no torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A policy version with its full weights in memory."""

    policy: PolicyVersion
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """What a hot swap cost: seconds during which no token could be made, and the streams that went on across it."""

    slot: str
    policy: PolicyVersion
    pause_s: float
    streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What one optimizer step did. `metrics` are scalars for the log and the screen."""

    step: int
    policy_number: int
    weights: Weights
    metrics: Mapping[str, float]
