"""The engine's form of a model: all layers in one call or fused ones where that changes no bit, packed linear layers elsewhere."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ostinato.engine.embedded.forms.condensed import condense
from ostinato.engine.embedded.forms.fused import fuse
from ostinato.engine.embedded.forms.packed import prepack_linears


def prepack(model: nn.Module, rows: int = 1) -> int:
    """Bring a model, or a part of one, into the engine's form, in place. Returns how many linear layers were laid out anew.

    `rows` is the row rule: what is computed at multiples of it keeps its bits.
    """
    taken = (condense(model, rows) or fuse(model, rows)) if isinstance(model, PreTrainedModel) else 0
    return taken + prepack_linears(model)
