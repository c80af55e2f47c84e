"""Gated feed-forward layers (SwiGLU, GEGLU), down(activation(gate(x)) * up(x)), with our activation kernel.

They have the module tree and the parameter names of the library's layers.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ostinato.model.cpu import split
from ostinato.model.kernels.elementwise import activation_mul, activation_mul_gradients
from ostinato.model.paged import array

_WORTH = 64  # rows below which a second thread costs more than it saves
_NAMES = ("gate_proj", "up_proj", "down_proj")
Activation = Literal["silu", "gelu_tanh"]
"""SiLU, or GELU in its tanh approximation (in the library's configurations "gelu_pytorch_tanh"): see `kernels.elementwise`."""


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up for two tensors of one shape [..., F], whose last axis is contiguous. Works under autograd."""
    if torch.is_grad_enabled():
        result: Tensor = _Gated.apply(gate, up, activation)  # pyright: ignore[reportAssignmentType]
        return result
    return _gated(gate, up, activation)


def _gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype)
    g, u, o, gelu = _rows(gate), _rows(up), _rows(out), activation == "gelu_tanh"
    split(len(o), lambda a, b: activation_mul(g[a:b], u[a:b], gelu, o[a:b]), least=_WORTH)
    return out


def fill_gradients(
    gate: Tensor, up: Tensor, grad: Tensor, activation: Activation, *, again: Tensor, d_gate: Tensor, d_up: Tensor
) -> None:
    """Fill `again` with `gated(gate, up, activation)`, bit for bit, and then `d_gate` and `d_up` with the gradients, given its `grad`.

    All are of one shape and the last three contiguous. Each of those may be `grad`; if `again` is not needed, it may be `d_up`.
    """
    g, u, d, out, d_g, d_u = (_rows(x) for x in (gate, up, grad, again, d_gate, d_up))
    gelu = activation == "gelu_tanh"

    def work(a: int, b: int) -> None:
        activation_mul_gradients(g[a:b], u[a:b], d[a:b], gelu, out[a:b], d_g[a:b], d_u[a:b])

    split(len(g), work, least=_WORTH)


def _rows(x: Tensor) -> Any:
    return array(x.reshape(-1, x.shape[-1]))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _gated(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        fill_gradients(gate, up, grads[0].contiguous(), ctx.activation, again=d_up, d_gate=d_gate, d_up=d_up)
        return d_gate, d_up, None


class GatedMLP(nn.Module):
    """SwiGLU, or GEGLU for a GELU, Shazeer 2020 (2002.05202). The three layers are those of the module that it replaces."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, mlp: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.activation: Activation = activation
        for name in _NAMES:
            setattr(self, name, getattr(mlp, name))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))


@torch.no_grad()
def replace_mlps(model: nn.Module) -> int:
    """Replace every feed-forward layer of the model that computes exactly this by `GatedMLP`; returns how many.

    Whether a module computes this is tested, not guessed from its name.
    """
    known: dict[tuple[type, str], Activation | None] = {}
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if sorted(part for part, _ in child.named_children()) != sorted((*_NAMES, "act_fn")):
                continue
            kind = (type(child), str(child.act_fn))
            if kind not in known:
                known[kind] = _activation_of(child)
            if (activation := known[kind]) is not None:
                setattr(parent, name, GatedMLP(child, activation))
                count += 1
    return count


def _activation_of(mlp: nn.Module) -> Activation | None:
    """The activation with which a small layer of this class gives the same results as ours, up to rounding, for random weights."""
    if any(not isinstance(getattr(mlp, name), nn.Linear) for name in _NAMES):
        return None
    theirs = copy.copy(mlp)  # of its class, with its settings, but with layers of its own
    vars(theirs)["_modules"] = dict(mlp.named_children())
    source = torch.Generator().manual_seed(0)
    for name, (inputs, outputs) in zip(_NAMES, ((8, 24), (8, 24), (24, 8)), strict=True):
        layer = nn.Linear(inputs, outputs, dtype=torch.float32, device="cpu")
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source))
        setattr(theirs, name, layer)
    x = torch.randn(5, 8, generator=source) * 3
    try:
        expected = theirs(x)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None
    for activation in get_args(Activation):
        if torch.allclose(GatedMLP(theirs, activation)(x), expected, rtol=1e-4, atol=1e-5):
            return activation
    return None
