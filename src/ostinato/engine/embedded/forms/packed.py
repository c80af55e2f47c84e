"""Linear layers whose weights are laid out for the CPU's matrix kernels once instead of at every call.

The kernel is the same and so are the bits of its results (checked for every layer when it is packed). This saves rearranging the weights,
which for few rows costs as much as the product itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ostinato.model import linear
from ostinato.model.linear import product
from ostinato.model.threads import team

_CHECK_ROWS = (2, 5, 64)


class PackedLinear(nn.Module):
    """`nn.Linear` for inference over a weight in oneDNN's own layout."""

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed, self._bias = packed, bias

    @classmethod
    def of(cls, layers: Sequence[nn.Linear]) -> PackedLinear:
        """One layer whose outputs are the concatenated outputs of several. Raises ValueError if they cannot be combined."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if cast("Tensor | None", layer.bias) is not None]
        if len(biases) not in (0, len(layers)) or not linear.ONEDNN or not _can_pack(weight):
            raise ValueError("these layers cannot be packed as one")
        packed = cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(weight, _CHECK_ROWS[-1]))
        return cls(packed, torch.cat(biases) if biases else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return product(x, self._packed, self._bias)


@torch.inference_mode()
def prepack_linears(model: nn.Module) -> int:
    """Replace the model's bf16 and fp32 linear layers on the CPU by packed ones, in place; returns how many.

    A layer whose packed result differs in any bit stays as it is, and so do all layers if this build of torch cannot pack.
    """
    if not linear.ONEDNN:
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and _can_pack(child.weight):
                packed = _packed(child)
                if packed is not None:
                    setattr(parent, name, packed)
                    count += 1
    return count


def _can_pack(weight: Tensor) -> bool:
    if not weight.is_cpu:
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _packed(layer: nn.Linear) -> PackedLinear | None:
    weight = cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _CHECK_ROWS[-1]))
    bias = cast("Tensor | None", layer.bias)  # the library's annotation ignores bias=False
    result = PackedLinear(weight, None if bias is None else bias.detach())
    with team(1):  # whichever thread this is, so that the compared bits come from equal thread counts
        for rows in _CHECK_ROWS:
            x = torch.linspace(-2, 2, rows * layer.in_features).view(rows, -1).sin().to(layer.weight.dtype)
            if not torch.equal(result(x), layer(x)):
                return None
    return result
