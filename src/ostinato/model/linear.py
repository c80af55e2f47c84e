"""The one matrix product of every model: fp32 on CPUs goes to oneDNN, all else to torch's own choice.

torch computes fp32 products with MKL, whose bits depend on the number of rows below 4 on some CPUs and below 16 on others. oneDNN uses
one order of additions from 2 rows on (the self-test measures it), gives the same bits when a weight is laid out in advance or its
outputs are divided, and is as fast. Products in bf16 are oneDNN's anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether this build of torch has oneDNN's product as an operation of its own."""
if ONEDNN:
    # the overload itself: looking it up for each call costs as much as a small product
    _PRODUCT: Any = torch.ops.mkldnn._linear_pointwise.default


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., in] -> [..., out] by oneDNN, for a weight [out, in], plain or in oneDNN's layout. Without gradients."""
    rows = x.numel() // x.shape[-1]
    added = padded_rows(rows) - rows
    if not added:
        return _PRODUCT(x, weight, bias, "none", [], "")
    padded = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, added))
    y: Tensor = _PRODUCT(padded, weight, bias, "none", [], "")
    return y[:rows].view(*x.shape[:-1], y.shape[-1])


def padded_rows(rows: int) -> int:
    """The row count that is computed for `rows` rows.

    oneDNN keeps code and buffers for each row count it has seen: some 0.5 MB each, in all up to half a gigabyte.
    """
    step = 1 if rows <= 32 else 4 if rows <= 128 else 16 if rows <= 512 else 64
    return -(-rows // step) * step


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., in] times a weight [out, in], plus a bias [out]: [..., out]. Works under autograd and inference_mode."""
    if not (ONEDNN and x.is_cpu and x.dtype == weight.dtype == torch.float32):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        result: Tensor = _Linear.apply(x, weight, bias)  # pyright: ignore[reportAssignmentType]
        return result
    return product(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` with this module's product. The weight and the bias are those of the layer that it replaces."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return linear(input, self.weight, self.bias)


def replace_linears(model: nn.Module) -> int:
    """Replace every plain linear layer of the model by `Linear`, keeping its parameters; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Linear(child))
                count += 1
    return count


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        wanted: tuple[bool, bool, bool] = ctx.needs_input_grad
        grad_NO = grads[0].reshape(-1, len(weight))
        return (
            (grad_NO @ weight).view(x.shape) if wanted[0] else None,
            grad_NO.t() @ x.reshape(-1, x.shape[-1]) if wanted[1] else None,
            grad_NO.sum(0) if wanted[2] else None,
        )
