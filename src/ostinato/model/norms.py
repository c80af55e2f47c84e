"""The library's RMS norms, computed by our kernel: the same module tree and parameter names, a seventh of the passes over memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.model.cpu import split
from ostinato.model.kernels.gradients import rms_norm_gradient
from ostinato.model.kernels.norm import LANES, rms_norm
from ostinato.model.paged import array

_WORTH = 64  # rows below which a second thread costs more than it saves
_SUMMED = 128  # rows whose parts of the weight's gradient are summed together, for any number of threads


class RMSNorm(nn.Module):
    """weight * (x / sqrt(mean(x^2) + eps)), Zhang and Sennrich 2019 (1910.07467), with both products rounded to the dtype."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in x's dtype."""
        return rms_normed(x, self.weight, self.eps)


def rms_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., D] normed and times a weight [D], which must be plain memory, because numpy makes a view of it. Works under autograd."""
    if not torch.is_grad_enabled():  # calling the function below costs more than the kernel does
        return _norm(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps)[0].view(x.shape)
    result: Tensor = _Norm.apply(x, weight, eps)  # pyright: ignore[reportAssignmentType]
    return result


def _norm(x_ND: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows and each row's 1 / root-mean-square [N]."""
    out_ND = torch.empty_like(x_ND)
    scales_N = np.empty(len(x_ND), np.float32)
    xs, ws, os = array(x_ND), array(weight)[None], array(out_ND)
    split(len(x_ND), lambda a, b: rms_norm(xs[a:b], ws, np.float32(eps), os[a:b], scales_N[a:b]), least=_WORTH)
    return out_ND, torch.from_numpy(scales_N)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1]).contiguous()
        out_ND, scales_N = _norm(x_ND, weight, eps)
        ctx.save_for_backward(x_ND, weight, scales_N)
        return out_ND.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ND, weight, scales_N = ctx.saved_tensors
        grad_ND, out_ND = grads[0].reshape(x_ND.shape).contiguous(), torch.empty_like(x_ND)
        xs, ws, gs, os, scales = array(x_ND), array(weight)[None], array(grad_ND), array(out_ND), scales_N.numpy()
        totals = np.zeros((-(-len(x_ND) // _SUMMED), 1, len(weight)), np.float32)

        def work(first: int, last: int) -> None:
            for part in range(first, last):
                at = slice(part * _SUMMED, (part + 1) * _SUMMED)
                rms_norm_gradient(xs[at], ws, scales[at], gs[at], os[at], totals[part])

        split(len(totals), work)
        return out_ND.view(grads[0].shape), torch.from_numpy(totals.sum((0, 1))).to(weight.dtype), None


@torch.no_grad()
def replace_norms(model: nn.Module) -> int:
    """Replace every norm of the model that computes exactly this by `RMSNorm`, keeping its weight; returns how many.

    Whether a module computes this is tested, not guessed from its name: other variants (Gemma's 1 + weight) stay as they are.
    """
    known: dict[tuple[type, int], bool] = {}
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight, eps = getattr(child, "weight", None), getattr(child, "variance_epsilon", None)
            if not isinstance(weight, nn.Parameter) or not isinstance(eps, float) or weight.dim() != 1:
                continue
            kind = (type(child), len(weight))
            if kind not in known:
                known[kind] = _is_plain(type(child), len(weight), eps)
            if known[kind]:
                setattr(parent, name, RMSNorm(weight, eps))
                count += 1
    return count


def _is_plain(kind: type, width: int, eps: float) -> bool:
    """True if a module of this class gives the same results as ours, up to rounding, for a test weight."""
    if width % LANES:
        return False
    try:
        theirs = kind(width, eps)
    except TypeError:
        return False
    x = torch.linspace(-3, 3, 4 * width).view(4, width).sin() * torch.tensor([[1e-3], [0.1], [1.0], [50.0]])
    theirs.weight.copy_(torch.linspace(-1, 2, width))
    ours = RMSNorm(theirs.weight, eps)
    return bool(torch.allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6))
