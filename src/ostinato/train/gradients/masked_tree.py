"""Attention over a packed token tree with torch's operations, on any device; `tree_attention` does the same with our kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ostinato.model.devices.masks import tree
from ostinato.train.gradients.tree_attention import TreeAttention


class MaskedTree:
    """The model's `attend` for the tree of a `TreeAttention`, whose `on_layer` is called before each layer, forward and backward."""

    def __init__(self, attend: TreeAttention, device: torch.device) -> None:
        packed, self._on_layer = attend.packed, attend.on_layer
        self._attend = tree(*(torch.from_numpy(x).to(device) for x in (packed.ends_N, packed.positions_N)))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Queries [N, H, D], keys and values [N, KV, D] -> [N, H, D]."""
        del layer
        self._on_layer()
        out = self._attend(q, k, v, scale, window)
        return _Called.apply(out, self._on_layer)  # pyright: ignore[reportReturnType]


class _Called(torch.autograd.Function):
    """The identity, with a call in the backward pass; an exception from the call ends the pass."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call()
        return grads[0], None
