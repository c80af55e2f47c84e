"""Linear layers as the engine computes them: laid out once for the CPU's matrix kernels, and several of one input as one product.

The kernel and its results are the same bits (checked for every kind of layer); what is saved is the rearranging of the weight and the
calls, which at few rows cost as much as the product itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn

from ostinato.model import linear
from ostinato.model.linear import product

CHECK_ROWS = (2, 6, 64)
_LAYOUT_ROWS = 64  # oneDNN chooses the layout by it; checked at other row counts


class PackedLinear(nn.Module):
    """The products of one input with several weights [out_i, in], side by side in the answer. Empty until `pack`.

    Example: ``layer = PackedLinear(); layer.pack(torch.cat([q, k, v]))`` then ``layer(x)`` for x [..., in] is [..., out_q + out_k + out_v].
    """

    def __init__(self) -> None:
        super().__init__()
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take a weight [out, in], which is not kept, and a bias [out]."""
        self._packed = cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS))
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return product(x, self._packed, self._bias)  # pyright: ignore[reportArgumentType]


def can_pack(layer: nn.Module) -> bool:
    """True if this layer gives the same bits when it is packed. Tried once for each class, shape and dtype, on numbers of the test's own."""
    if not isinstance(layer, nn.Linear):
        return False
    outputs, inputs = layer.weight.shape
    return _keeps_bits(type(layer), inputs, outputs, cast("Tensor | None", layer.bias) is not None, layer.weight.dtype)


@lru_cache
@torch.inference_mode()
def _keeps_bits(kind: type[nn.Linear], inputs: int, outputs: int, biased: bool, dtype: torch.dtype) -> bool:
    if not linear.ONEDNN or dtype not in (torch.float32, torch.bfloat16):
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    plain = kind.__new__(kind)
    nn.Linear.__init__(plain, inputs, outputs, bias=biased, dtype=dtype, device="cpu")
    plain.requires_grad_(False)
    packed = PackedLinear()
    packed.pack(plain.weight, plain.bias if biased else None)
    for rows in CHECK_ROWS:
        x = torch.linspace(-2, 2, rows * inputs).view(rows, -1).sin().to(dtype)
        if not torch.equal(packed(x), plain(x)):
            return False
    return True
