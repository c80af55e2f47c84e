"""Compares two versions: what changed per tensor, with each tensor's layer and kind. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadRequest
from ostinato.core.weights import ITEMSIZES, WeightArray, Weights
from ostinato.weights.delta.codec import changed_elements

_NUMBERED = re.compile(r"\.(\d+)\.")
_PART = 1 << 22  # elements compared at a time, so that a large tensor needs little memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """The change of one tensor. `moved`: the norm of the difference divided by the old norm; None for integers or an old norm of 0.

    Example: ``TensorChange(name="model.norm.weight", elements=576, changed=3, moved=2.1e-4)``
    """

    name: str
    elements: int
    changed: int
    moved: float | None

    @property
    def share(self) -> float:
        """The share of the elements that changed."""
        return self.changed / max(1, self.elements)

    @property
    def layer(self) -> int | None:
        """The first number in the name, which is the layer in Hugging Face models; None outside of layers."""
        found = _NUMBERED.search(self.name)
        return int(found.group(1)) if found else None

    @property
    def kind(self) -> str:
        """The name without layer, prefix and suffix: "self_attn.q_proj" for "model.layers.3.self_attn.q_proj.weight"."""
        rest = _NUMBERED.split(self.name, maxsplit=1)[-1] if self.layer is not None else self.name
        return rest.removesuffix(".weight").removeprefix("model.")


def compare(old: Weights, new: Weights) -> list[TensorChange]:
    """Return one `TensorChange` per tensor, sorted by name. Raises BadRequest if the versions are of different models."""
    before, after = ({name: (each.dtype, each.shape) for name, each in weights.items()} for weights in (old, new))
    if before != after:
        apart = sorted(before.keys() ^ after.keys()) or sorted(name for name in old if before[name] != after[name])
        raise BadRequest(f"the versions are of different models: {', '.join(apart[:3])} is not the same in both")
    return [_change(name, old[name], new[name]) for name in sorted(old)]


def total(changes: Sequence[TensorChange]) -> TensorChange:
    """Return the sums over all tensors as one `TensorChange`, without `moved`."""
    return TensorChange(
        name="all",
        elements=sum(change.elements for change in changes),
        changed=sum(change.changed for change in changes),
        moved=None,
    )


def _change(name: str, old: WeightArray, new: WeightArray) -> TensorChange:
    itemsize = ITEMSIZES[old.dtype]
    changed, difference, norm = 0, 0.0, 0.0
    for start in range(0, old.data.size, _PART * itemsize):
        a, b = (x.data[start : start + _PART * itemsize] for x in (old, new))
        changed += changed_elements(a, b, itemsize)
        floats = _floats(a, old.dtype), _floats(b, old.dtype)
        if floats[0] is not None and floats[1] is not None:
            difference += float(np.square(floats[1] - floats[0]).sum())
            norm += float(np.square(floats[0]).sum())
    return TensorChange(
        name=name,
        elements=old.data.size // itemsize,
        changed=changed,
        moved=(difference / norm) ** 0.5 if norm > 0 else None,
    )


def _floats(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float64] | None:
    match dtype:
        case "BF16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        case "F16" | "F32" | "F64":
            return data.view(np.dtype(f"f{ITEMSIZES[dtype]}")).astype(np.float64)
        case _:
            return None
