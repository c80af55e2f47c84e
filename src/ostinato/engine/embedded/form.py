"""The engine's form of a model: fused layers where that changes no bit, packed linear layers elsewhere."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ostinato.engine.embedded.fused import fuse
from ostinato.engine.embedded.packed import prepack_linears


def prepack(model: nn.Module, rows: int = 1) -> int:
    """Bring a model, or a part of one, into the engine's form, in place. Returns how many linear layers were laid out anew.

    `rows` is the row rule: what is computed at multiples of it keeps its bits.
    """
    fused = fuse(model, rows) if isinstance(model, PreTrainedModel) else 0
    return fused + prepack_linears(model)
