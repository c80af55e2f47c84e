"""The engine's form of a model: all layers in one call, or fused layers, if that changes no bit; otherwise linear layers in panels.

If rounding to integers is requested, it is fused layers of integer products.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ostinato.engine.embedded.forms.condensed import condense
from ostinato.engine.embedded.forms.fused import fuse
from ostinato.engine.embedded.forms.int8 import quantise
from ostinato.model.experts import lay_out_experts
from ostinato.model.integers import Integers
from ostinato.model.linear import replace_by_panels


def prepack(model: nn.Module, integers: Integers | None = None) -> int:
    """Bring a model, or a part of a model, into the engine's form, in place. Returns how many linear layers were laid out anew.

    Results keep their bits, unless a model's decoder is rounded to `integers`. Raises BadConfig for a model that cannot be rounded.
    """
    if not isinstance(model, PreTrainedModel):
        return replace_by_panels(model)
    taken = (condense(model) or fuse(model)) if integers is None else quantise(model, integers)
    lay_out_experts(model)
    return taken + replace_by_panels(model)
