"""Linear layers that multiply 8-bit integers: their results differ from the trainer's, and their weights take a quarter of fp32's memory.

Weights and activations are rotated by the same Hadamard matrix, which spreads a large channel over many (`kernels.hadamard`). Each output
has one scale for its weights, and each row one for its activations, computed per row at run time, so that an answer does not depend on
others in its batch. Sums are exact (`model.integers`); rounding happens when numbers become levels, and once more at the end.
The output head keeps its precision by default, since its errors would go directly into the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.core.errors import BadConfig
from ostinato.engine.embedded.forms.fused import fuse
from ostinato.model import routing
from ostinato.model.integers import WEIGHT_LEVELS, Integers
from ostinato.model.kernels.quantize import block, from_sums, rotate, to_levels
from ostinato.model.paged import array

_UNBIASED = np.empty((1, 0), np.float32)
NO_LINEARS = (
    "engine.products = 'int8' rounds linear layers, and this model's decoder has none: set engine.products = 'plain'"
)


def quantised(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Levels [O, I] in int8, in [-127, 127], and scales [O] in fp32: level x scale is within half a scale of the rotated weight.

    The scales are divided by the rotation's block size, as its products are that many times too large.
    """
    weight = torch.empty(weight_OI.shape, dtype=torch.float32)
    rotate(array(weight_OI.contiguous()), weight.numpy())
    scales_O = weight.abs().amax(1) / WEIGHT_LEVELS
    factors_O = torch.where(scales_O > 0, scales_O, 1.0).reciprocal()
    levels_OI = (weight * factors_O[:, None]).round_().clamp_(-WEIGHT_LEVELS, WEIGHT_LEVELS).to(torch.int8)
    return levels_OI, scales_O / block(weight.shape[1])


class Int8Linear(nn.Module):
    """`nn.Linear` for inference, rounded to `integers`; may combine several layers with concatenated outputs. Keeps the input's dtype."""

    def __init__(self, layers: Sequence[nn.Linear], integers: Integers) -> None:
        super().__init__()
        levels_OI, scales_O = quantised(torch.cat([layer.weight for layer in layers]))
        biases = [layer.bias.detach() for layer in layers if cast("Tensor | None", layer.bias) is not None]
        if len(biases) not in (0, len(layers)):
            raise ValueError("these layers cannot be one")
        self.inputs, self.outputs = levels_OI.shape[1], len(levels_OI)
        self._most, self._matrix = integers.most, integers.matrix(levels_OI)
        self._scales = scales_O.numpy()[None]
        self._biases = torch.cat(biases).float().numpy()[None] if biases else _UNBIASED

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        flat = x.reshape(-1, self.inputs).contiguous()
        rows, most = len(flat), self._most
        levels, zero = self._matrix.room(rows, self.inputs, most)
        scales = np.empty(rows, np.float32)
        to_levels(array(flat), np.float32(most), np.float32(zero), levels.numpy(), scales)
        sums = self._matrix.sums(levels, most)[:rows]
        out = sums if x.dtype == torch.float32 else torch.empty(rows, self.outputs, dtype=x.dtype)
        from_sums(sums.numpy(), scales, self._scales, self._biases, array(out))
        return out.view(*x.shape[:-1], self.outputs)


@torch.inference_mode()
def quantise(model: PreTrainedModel, integers: Integers, *, head: bool = False) -> int:
    """Replace the linear layers of a dense model's decoder by integer ones, in place; returns how many of the model's were replaced.

    The layers are fused where possible (`forms.fused`). With `head` the output head is replaced too. Raises BadConfig for a mixture
    of experts, whose experts are not linear layers, and for a decoder without linear layers.
    """
    check_dense(model)
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    top = model.get_output_embeddings()

    def make(layers: Sequence[nn.Linear]) -> nn.Module:
        return Int8Linear(layers, integers)

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
