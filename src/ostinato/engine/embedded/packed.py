"""bf16 linear layers with their weights laid out once for the CPU's matrix kernels instead of at every call.

The kernel and its results are the same bits (checked for every layer when it is packed); what is saved is the rearranging, which at
few rows costs as much as the product itself.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

_CHECK_ROWS = (1, 5, 64)
_LINEAR = (
    torch.ops.mkldnn._linear_pointwise.default
)  # the overload by name: looking it up costs as much as a small product


class PackedLinear(nn.Module):
    """`nn.Linear` for inference over a weight that only oneDNN can read."""

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed, self._bias = packed, bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return _LINEAR(x, self._packed, self._bias, "none", [], "")


@torch.inference_mode()
def prepack(model: nn.Module) -> int:
    """Replace the model's bf16 CPU linear layers by packed ones, in place; returns how many.

    A layer whose packed result differs in any bit stays as it is, and so does every layer where this torch cannot pack.
    """
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
                packed = _packed(child)
                if packed is not None:
                    setattr(parent, name, packed)
                    count += 1
    return count


def _packed(layer: nn.Linear) -> PackedLinear | None:
    weight = cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _CHECK_ROWS[-1]))
    bias = cast("Tensor | None", layer.bias)  # the library's annotation forgets bias=False
    result = PackedLinear(weight, None if bias is None else bias.detach())
    for rows in _CHECK_ROWS:
        x = torch.linspace(-2, 2, rows * layer.in_features).view(rows, -1).sin().to(torch.bfloat16)
        if not torch.equal(result(x), layer(x)):
            return None
    return result
