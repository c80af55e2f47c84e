"""Weights as bytes, and the results of loading them into a slot and of learning them in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ostinato.core.records import PolicyVersion

ITEMSIZES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""All supported dtypes (safetensors names) and their bytes per element."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightArray:
    """One tensor as bytes: a safetensors dtype name ("BF16", "F32"), a shape, and a flat read-only uint8 array.

    Example: ``WeightArray("BF16", (576, 576), data)`` where ``data.nbytes == 576 * 576 * 2``.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


Weights = Mapping[str, WeightArray]
"""Tensor name -> bytes. The common format of trainer, weight store and engine; needs no torch."""

CHUNK_ELEMENTS: Final = 1 << 21
"""Tensors are hashed, stored and divided among ranks in chunks of this many elements, the last one shorter."""

ChunkName = tuple[str, int]
"""A tensor's name and the index of one of its chunks."""

Form = tuple[str, tuple[int, ...]]
"""A tensor's safetensors dtype name and its shape."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightPart:
    """Some chunks of a model's weights: all of them, or those that one of several ranks publishes.

    `forms` has every tensor of the model. `chunks`: flat uint8 arrays.

    Example: ``WeightPart({"w": ("BF16", (1 << 22,))}, {("w", 1): data})`` where ``data.nbytes == 1 << 22``.
    """

    forms: Mapping[str, Form]
    chunks: Mapping[ChunkName, NDArray[np.uint8]]


def chunks_of(name: str, array: WeightArray) -> Iterator[tuple[ChunkName, NDArray[np.uint8]]]:
    """Yield a tensor's chunks by name, not copied; an empty tensor has none."""
    step = CHUNK_ELEMENTS * ITEMSIZES[array.dtype]
    for index, start in enumerate(range(0, array.data.nbytes, step)):
        yield (name, index), array.data[start : start + step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A policy version with its full weights in memory."""

    policy: PolicyVersion
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """The cost of a hot swap: the seconds during which no token could be sampled, and the number of streams that continued across it."""

    slot: str
    policy: PolicyVersion
    pause_s: float
    streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The result of one optimizer step. `metrics` are scalars for the log and the screen.

    `weights`: the weights that this process publishes. With several ranks, each has a part.
    """

    step: int
    policy_number: int
    weights: Weights | WeightPart
    metrics: Mapping[str, float]

    @property
    def whole(self) -> Weights:
        """`weights`, for a process that trains alone."""
        assert not isinstance(self.weights, WeightPart), "each of several ranks has a part of the weights"
        return self.weights
