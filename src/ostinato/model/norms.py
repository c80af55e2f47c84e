"""RMS norms by our kernel: the library's module tree and parameter names, but one pass over memory instead of seven."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.model.backend import replace_parts
from ostinato.model.cpu import split
from ostinato.model.kernels.gradients import rms_norm_gradient
from ostinato.model.kernels.norm import LANES, rms_norm
from ostinato.model.paged import array

_MIN_ROWS = 64  # per thread: below it a second thread costs more than it saves
_MIN_EQUAL = 0.98  # share of equal bf16 results: an fp32 error sometimes crosses a rounding boundary
_GRADIENT_ROWS = 128  # rows per partial sum of the weight's gradient, whatever the number of threads


class RMSNorm(nn.Module):
    """weight * (x / sqrt(mean(x^2) + eps)), Zhang and Sennrich 2019 (1910.07467), with both products rounded to the dtype.

    With a `zero_centered` weight, as in Gemma: (1 + weight) * (x / sqrt(mean(x^2) + eps)), and only the result is rounded.
    """

    def __init__(self, weight: nn.Parameter, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """Norm [..., D] -> [..., D] in x's dtype."""
        return rms_normed(x, self.weight, self.eps, zero_centered=self.zero_centered)


def rms_normed(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Norm [..., D] and multiply by a weight [D]. The weight must be plain memory, because numpy views it. Works under autograd."""
    if not torch.is_grad_enabled():  # the autograd function below costs more than the kernel
        return _norm(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps, zero_centered)[0].view(x.shape)
    result: Tensor = _Norm.apply(x, weight, eps, zero_centered)  # pyright: ignore[reportAssignmentType]
    return result


def _norm(x_ND: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Return the normed rows, and each row's 1 / root-mean-square [N]."""
    out_ND = torch.empty_like(x_ND)
    scales_N = np.empty(len(x_ND), np.float32)
    xs, ws, os = array(x_ND), array(weight)[None], array(out_ND)
    terms = ws, np.float32(eps), zero_centered
    split(len(x_ND), lambda a, b: rms_norm(xs[a:b], *terms, os[a:b], scales_N[a:b]), least=_MIN_ROWS)
    return out_ND, torch.from_numpy(scales_N)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1]).contiguous()
        out_ND, scales_N = _norm(x_ND, weight, eps, zero_centered)
        ctx.save_for_backward(x_ND, weight, scales_N)
        ctx.zero_centered = zero_centered
        return out_ND.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ND, weight, scales_N = ctx.saved_tensors
        grad_ND, out_ND = grads[0].reshape(x_ND.shape).contiguous(), torch.empty_like(x_ND)
        xs, ws, gs, os, scales = array(x_ND), array(weight)[None], array(grad_ND), array(out_ND), scales_N.numpy()
        totals = np.zeros((-(-len(x_ND) // _GRADIENT_ROWS), 1, len(weight)), np.float32)

        def work(first: int, last: int) -> None:
            for part in range(first, last):
                at = slice(part * _GRADIENT_ROWS, (part + 1) * _GRADIENT_ROWS)
                rms_norm_gradient(xs[at], ws, ctx.zero_centered, scales[at], gs[at], os[at], totals[part])

        split(len(totals), work)
        return out_ND.view(grads[0].shape), torch.from_numpy(totals.sum((0, 1))).to(weight.dtype), None, None


@torch.no_grad()
def replace_norms(model: nn.Module) -> int:
    """Replace every norm of the model that computes the same as `RMSNorm` by it, keeping its weight; return how many.

    Whether a module computes the same is tested by running it, not guessed from its name. A norm whose epsilon is called `eps`, as in the
    library's zero-centred norms, is compared with the zero-centred form, and stays if it differs.
    """
    known: dict[tuple[type, int], bool] = {}

    def ours(child: nn.Module) -> RMSNorm | None:
        weight, eps = getattr(child, "weight", None), getattr(child, "variance_epsilon", None)
        zero_centered = eps is None
        eps = getattr(child, "eps", None) if zero_centered else eps
        if isinstance(child, RMSNorm) or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
            return None
        if not isinstance(eps, float):
            return None
        kind = (type(child), len(weight))
        if kind not in known:
            known[kind] = _is_same(type(child), len(weight), eps, zero_centered)
        return RMSNorm(weight, eps, zero_centered=zero_centered) if known[kind] else None

    return replace_parts(model, ours)


def _is_same(kind: type, width: int, eps: float, zero_centered: bool) -> bool:
    """Return whether a module of this class gives the same results as ours, up to rounding, for a test weight."""
    if width % LANES:
        return False
    x = torch.linspace(-3, 3, 4 * width).view(4, width).sin() * torch.tensor([[1e-3], [0.1], [1.0], [50.0]])
    try:
        theirs = kind(width, eps)
        theirs.weight.copy_(torch.linspace(-1, 2, width))
        ours = RMSNorm(theirs.weight, eps, zero_centered=zero_centered)
        if not torch.allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6):
            return False
        if not zero_centered:
            return True
        theirs.bfloat16()  # reveals where it rounds: 1 + weight in bf16, for example, would be another norm
        ours.weight, x = theirs.weight, x.bfloat16()
        return bool((ours(x) == theirs(x)).float().mean() > _MIN_EQUAL)
    except (TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError, IndexError):
        return False  # another constructor or call signature
