"""Linear layers that multiply 8-bit integers: their results differ from the trainer's, and their weights take a quarter of fp32's memory.

Weights and activations are rotated by the same Hadamard matrix, which spreads a large channel over many (`kernels.quantize`). Each output
has one scale for its weights, and each row one for its activations, computed per row at run time, so that an answer does not depend on
others in its batch. Sums are exact (`model.integers`); rounding happens when numbers become levels, and once more at the end.
The output head keeps its precision by default, since its errors would go directly into the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.core.errors import BadConfig
from ostinato.engine.embedded.forms.condensed import condense
from ostinato.engine.embedded.forms.fused import fuse
from ostinato.model import routing
from ostinato.model.integers import Integers, in_int8_panels
from ostinato.model.linear import multiply

NO_LINEARS = (
    "engine.products = 'int8' rounds linear layers, and this model's decoder has none: set engine.products = 'plain'"
)


class Int8Linear(nn.Module):
    """`nn.Linear` for inference, rounded to `integers`; may combine several layers with concatenated outputs. Keeps the input's dtype."""

    def __init__(self, layers: Sequence[nn.Linear], integers: Integers) -> None:
        super().__init__()
        biases = [layer.bias.detach() for layer in layers if cast("Tensor | None", layer.bias) is not None]
        if len(biases) not in (0, len(layers)):
            raise ValueError("these layers cannot be one")
        self._panels = in_int8_panels(integers, torch.cat([layer.weight for layer in layers]))
        self._bias = torch.cat(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return multiply(x, self._panels, self._bias)


@torch.inference_mode()
def quantise(model: PreTrainedModel, integers: Integers, *, head: bool = False) -> int:
    """Replace the linear layers of a dense model's decoder by integer ones, in place; returns how many of the model's were replaced.

    All layers are one call where possible (`forms.condensed`), or else fused (`forms.fused`). With `head` the output head is replaced
    too. Raises BadConfig for a mixture of experts, whose experts are not linear layers, and for a decoder without linear layers.
    """
    check_dense(model)
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    top = model.get_output_embeddings()

    def make(layers: Sequence[nn.Linear]) -> nn.Module:
        return Int8Linear(layers, integers)

    if not condense(model, partial(in_int8_panels, integers)):
        fuse(model, make)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child is not top:
                setattr(parent, name, make([child]))
    if head and isinstance(top, nn.Linear):
        model.set_output_embeddings(make([top]))
    left = {id(part) for part in model.modules()}
    found = sum(id(part) not in left for part in linears)
    if not found:
        raise BadConfig(NO_LINEARS)
    return found


def check_dense(model: PreTrainedModel) -> None:
    """Raise BadConfig for a mixture of experts."""
    if routing.of(model) is not None:
        raise BadConfig(
            "engine.products = 'int8' is for dense models, and this one is a mixture of experts: set engine.products = 'plain'"
        )
