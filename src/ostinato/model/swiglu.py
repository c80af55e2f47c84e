"""The feed-forward layer down(silu(gate(x)) * up(x)) with our activation kernel: the same module tree and parameter names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.model.cpu import split
from ostinato.model.kernels.gate import silu_mul, silu_mul_gradients
from ostinato.model.paged import array

_WORTH = 64  # rows below which a second thread costs more than it saves
_NAMES = ("gate_proj", "up_proj", "down_proj")


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for two tensors of one shape [..., F], whose last axis is contiguous. Works under autograd."""
    if torch.is_grad_enabled():
        result: Tensor = _Gated.apply(gate, up)  # pyright: ignore[reportAssignmentType]
        return result
    return _gated(gate, up)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype)
    g, u, o = _rows(gate), _rows(up), _rows(out)
    split(len(o), lambda a, b: silu_mul(g[a:b], u[a:b], o[a:b]), least=_WORTH)
    return out


def fill_gradients(gate: Tensor, up: Tensor, grad: Tensor, *, again: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    """Fill `again` with `gated(gate, up)`, bit for bit, and then `d_gate` and `d_up` with the gradients, given its gradient `grad`.

    All are of one shape and the last three contiguous. Each of those may be `grad`; if `again` is not needed, it may be `d_up`.
    """
    every = [_rows(x) for x in (gate, up, grad, again, d_gate, d_up)]
    split(len(every[0]), lambda a, b: silu_mul_gradients(*(x[a:b] for x in every)), least=_WORTH)


def _rows(x: Tensor) -> Any:
    return array(x.reshape(-1, x.shape[-1]))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        fill_gradients(gate, up, grads[0].contiguous(), again=d_up, d_gate=d_gate, d_up=d_up)
        return d_gate, d_up


class GatedMLP(nn.Module):
    """SwiGLU, Shazeer 2020 (2002.05202). The three layers are those of the module that it replaces."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        for name in _NAMES:
            setattr(self, name, getattr(mlp, name))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


@torch.no_grad()
def replace_mlps(model: nn.Module) -> int:
    """Replace every feed-forward layer of the model that computes exactly this by `GatedMLP`; returns how many.

    Whether a module computes this is tested, not guessed from its name.
    """
    known: dict[tuple[type, str], bool] = {}
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if sorted(part for part, _ in child.named_children()) != sorted((*_NAMES, "act_fn")):
                continue
            kind = (type(child), str(child.act_fn))
            if kind not in known:
                known[kind] = _is_plain(child)
            if known[kind]:
                setattr(parent, name, GatedMLP(child))
                count += 1
    return count


def _is_plain(mlp: nn.Module) -> bool:
    """True if a small layer of this class gives the same results as ours, up to rounding, for random weights."""
    if any(not isinstance(getattr(mlp, name), nn.Linear) for name in _NAMES):
        return False
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
        return False
    return bool(torch.allclose(GatedMLP(theirs)(x), expected, rtol=1e-4, atol=1e-5))
