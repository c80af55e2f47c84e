"""Softmax, log-probabilities and sampling over the vocabulary, shared by sampler and trainer.

`RowSoftmax` computes on the CPU by our kernels. `TensorSoftmax` and `TensorLogprobs` compute by torch's operations on any device;
`TensorLogprobs` has gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ostinato.model.cpu import split
from ostinato.model.kernels.softmax import TILE, invert, logprobs, logs, normalise, race
from ostinato.model.logit_edits import Edit, edit_logits
from ostinato.model.paged import array

GREEDY = -1.0
"""Passed as u, it asks for the most likely token."""


@dataclass(frozen=True, slots=True)
class RowSoftmax:
    """The softmax of rows of logits [M, V]: each row's maximum of logits / temperature, and its sums of exp relative to that, by tile."""

    logits: NDArray[Any]
    temperatures_M: NDArray[np.float32]
    tops_M: NDArray[np.float32]
    sums_MK: NDArray[np.float32]
    totals_M: NDArray[np.float64]

    @staticmethod
    def of(logits_MV: Tensor, temperatures_M: Tensor) -> RowSoftmax:
        """Compute it in one pass over the logits, bf16 or fp32. Temperatures must be positive."""
        rows, vocab = logits_MV.shape
        made = RowSoftmax(
            array(logits_MV.contiguous()),
            temperatures_M.to(torch.float32).numpy(),
            np.empty(rows, np.float32),
            np.empty((rows, -(-vocab // TILE)), np.float32),
            np.empty(rows, np.float64),
        )
        every = (made.logits, made.temperatures_M, made.tops_M, made.sums_MK, made.totals_M)
        split(rows, lambda a, b: normalise(*(x[a:b] for x in every)))
        return made

    def log_totals(self) -> Tensor:
        """Return log sum exp(logits / temperature), [M], fp32."""
        logs_M = np.empty_like(self.totals_M)
        logs(self.totals_M, logs_M)
        return torch.from_numpy((self.tops_M + logs_M).astype(np.float32))

    def sound(self) -> NDArray[np.bool_]:
        """Return [M]: False where the logits hold a NaN or +inf, or only -inf."""
        return np.isfinite(self.totals_M) & np.isfinite(self.tops_M)

    def logprobs(self, tokens_M: NDArray[np.int64]) -> Tensor:
        """Return log p of one token per row, [M], fp32."""
        out = np.empty(len(tokens_M), np.float32)
        logprobs(self.logits, self.temperatures_M, self.tops_M, self.totals_M, tokens_M, out)
        return torch.from_numpy(out)

    def draw(self, u_M: NDArray[np.float64]) -> NDArray[np.int64]:
        """Draw by inversion: the token at which the cumulative probability passes u in [0, 1); the most likely for `GREEDY`."""
        tokens = np.zeros(len(u_M), np.int64)
        every = (self.logits, self.temperatures_M, self.tops_M, self.sums_MK, self.totals_M, u_M, tokens)
        split(len(u_M), lambda a, b: invert(*(x[a:b] for x in every)))
        return tokens

    def race(self, rows_P: NDArray[np.int64], keys_P: NDArray[np.uint64], tokens_M: NDArray[np.int64]) -> None:
        """Draw by exponential races with keys, into `tokens_M`: similar distributions give the same token more often than by `draw`."""
        where = (self.logits, self.temperatures_M, self.tops_M)
        split(len(rows_P), lambda a, b: race(*where, rows_P[a:b], keys_P[a:b], tokens_M))


def softmax(logits_MV: Tensor, temperatures_M: Tensor, kernels: Literal["own", "torch"]) -> RowSoftmax | TensorSoftmax:
    """Return the softmax of M rows of logits, by our kernels or by torch's."""
    return (RowSoftmax if kernels == "own" else TensorSoftmax).of(logits_MV, temperatures_M)


# ---------------------------------------------------------------- by torch's operations


_PART = 1024


@dataclass(frozen=True, slots=True)
class TensorSoftmax:
    """The softmax of rows of logits [M, V]: temperatures [M], and log sum exp(logits / temperature) [M], fp32."""

    logits: Tensor
    temperatures_M: Tensor
    totals_M: Tensor

    @staticmethod
    def of(logits_MV: Tensor, temperatures_M: Tensor) -> TensorSoftmax:
        """Compute it in one pass over the logits, with one temporary fp32 copy of them. Temperatures must be positive."""
        temperatures_M = temperatures_M.to(logits_MV.device, torch.float32)
        totals_M = (logits_MV.float() / temperatures_M[:, None]).logsumexp(-1)
        return TensorSoftmax(logits_MV, temperatures_M, totals_M)

    def sound(self) -> NDArray[np.bool_]:
        """Return [M]: False where the logits hold a NaN or +inf, or only -inf."""
        return self.totals_M.isfinite().cpu().numpy()

    def of_tokens(self, tokens_M: Tensor) -> Tensor:
        """Return log p of one token per row, [M], fp32, on the logits' device."""
        chosen_M = self.logits.gather(1, tokens_M[:, None])[:, 0].float()
        return chosen_M / self.temperatures_M - self.totals_M

    def logprobs(self, tokens_M: NDArray[np.int64]) -> Tensor:
        """Return log p of one token per row, [M], fp32, on the host."""
        return self.of_tokens(torch.from_numpy(tokens_M).to(self.logits.device)).cpu()

    def draw(self, u_M: NDArray[np.float64]) -> NDArray[np.int64]:
        """Draw by inversion: the token at which the cumulative probability passes u in [0, 1); the most likely for u below 0."""
        tokens_M = np.zeros(len(u_M), np.int64)
        greedy, drawn = np.flatnonzero(u_M < 0), np.flatnonzero(u_M >= 0)
        if len(greedy):
            at = torch.from_numpy(greedy).to(self.logits.device)
            tokens_M[greedy] = self.logits[at].argmax(-1).cpu().numpy()
        if len(drawn):
            at = torch.from_numpy(drawn).to(self.logits.device) if len(greedy) else slice(None)
            scaled_CV = (self.logits[at].float() / self.temperatures_M[at, None]).sub_(self.totals_M[at, None])
            tokens_M[drawn] = invert_masses(scaled_CV.exp_(), torch.from_numpy(u_M[drawn])).cpu().numpy()
        return tokens_M

    def race(self, rows_P: NDArray[np.int64], keys_P: NDArray[np.uint64], tokens_M: NDArray[np.int64]) -> None:
        """Draw by exponential races with keys, into `tokens_M`, as `kernels.softmax.race` does."""
        at = torch.from_numpy(rows_P).to(self.logits.device)
        logs_PV = (self.logits[at].float() / self.temperatures_M[at, None]).sub_(self.totals_M[at, None])
        keys_P1 = torch.from_numpy(keys_P.view(np.int64)).to(self.logits.device)[:, None]
        numbers_V = torch.arange(1, logs_PV.shape[1] + 1, device=logs_PV.device)
        exponentials_PV = uniforms(keys_P1 + numbers_V * _signed(0x9E3779B97F4A7C15)).log_().neg_()
        tokens_M[rows_P] = exponentials_PV.div_(logs_PV.double().exp_()).argmin(-1).cpu().numpy()


def _signed(number: int) -> int:
    """Convert an unsigned 64-bit number to the signed one with the same bits, because torch has no unsigned ones."""
    return number - (1 << 64) if number >> 63 else number


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Shift right logically, filling with zeros."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def uniforms(states: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to 64-bit states; return float64 in (0, 1]."""
    mixed = (states ^ _shift_right(states, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (_shift_right(mixed ^ _shift_right(mixed, 31), 11).double() + 1.0) * 2.0**-53


def invert_masses(mass_CV: Tensor, u_C: Tensor) -> Tensor:
    """Return [C]: the token at which a row's cumulative mass passes the share u_C of its total. Sums are float64; `u_C` may be on the host.

    Cumulative sums are computed over the parts of a row, and then inside the one part that passes.
    """
    size = mass_CV.shape[-1]
    parts, rest = divmod(size, _PART)
    whole_CPS = mass_CV[:, : size - rest].unflatten(-1, (parts, _PART))
    last_CV = mass_CV[:, size - rest :]
    parts_CP = torch.cat([x.sum(-1, dtype=torch.float64) for x in (whole_CPS, last_CV[:, None])], -1)
    sums_CP = parts_CP.cumsum(-1)
    target_C1 = (u_C.to(sums_CP) * sums_CP[:, -1])[:, None]
    part_C1 = _passing(sums_CP, parts_CP, target_C1)
    before_C1 = F.pad(sums_CP[:, :-1], (1, 0)).gather(-1, part_C1)
    where_CS = part_C1 * _PART + torch.arange(_PART, device=mass_CV.device)
    found_CS = mass_CV.gather(-1, where_CS.clamp(max=size - 1)).double().masked_fill_(where_CS >= size, 0.0)
    at_C1 = _passing(before_C1 + found_CS.cumsum(-1), found_CS, target_C1)
    return where_CS.gather(-1, at_C1)[:, 0].clamp(max=size - 1)  # clamped for a row without mass


def _passing(sums_CN: Tensor, mass_CN: Tensor, target_C1: Tensor) -> Tensor:
    """Return [C, 1]: the first entry whose cumulative sum exceeds the target; the last one with mass if rounding put the target beyond."""
    last_C1 = mass_CN.shape[-1] - 1 - (mass_CN > 0).flip(-1).byte().argmax(-1, keepdim=True)
    return torch.minimum((sums_CN <= target_C1).sum(-1, keepdim=True), last_C1)


class TensorLogprobs(torch.autograd.Function):
    """log softmax(edited logits / T)[target], the torch counterpart of the kernels' in `train.policy`. May overwrite the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor, edits: Mapping[int, Edit]
    ) -> Tensor:
        """Return [M], fp32."""
        ctx.dtype = logits_MV.dtype
        logits_MV, _ = edit_logits(logits_MV, edits)
        normal = TensorSoftmax.of(logits_MV, temperatures_M)
        ctx.save_for_backward(logits_MV, targets_M, normal.temperatures_M, normal.totals_M)
        return normal.of_tokens(targets_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return (onehot - softmax) x gradient / T, in the dtype of the logits before the edits."""
        logits_MV, targets_M, temperatures_M, totals_M = ctx.saved_tensors
        each_M1 = (grads[0] / temperatures_M)[:, None]
        out_MV = (logits_MV.float() / temperatures_M[:, None]).sub_(totals_M[:, None]).exp_().mul_(-each_M1)
        out_MV.scatter_add_(1, targets_M[:, None], each_M1)
        return out_MV.to(ctx.dtype), None, None, None
