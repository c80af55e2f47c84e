"""Log-probabilities over the vocabulary and draws from it, the kernels' interface to torch: shared by the sampler and the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.model.cpu import split
from ostinato.model.devices.softmax import TensorSoftmax
from ostinato.model.kernels.softmax import TILE, invert, logprobs, logs, normalise, race
from ostinato.model.paged import array

GREEDY = -1.0
"""Passed as u, this asks for the likeliest token."""


@dataclass(frozen=True, slots=True)
class RowSoftmax:
    """The softmax of each row of logits [M, V]: the maximum of logits / temperature, and the sums of exp relative to it, by tile."""

    logits: NDArray[Any]
    temperatures_M: NDArray[np.float32]
    tops_M: NDArray[np.float32]
    sums_MK: NDArray[np.float32]
    totals_M: NDArray[np.float64]

    @staticmethod
    def of(logits_MV: Tensor, temperatures_M: Tensor) -> RowSoftmax:
        """Compute it in one reading of the logits, bf16 or fp32; temperatures are positive."""
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
        """Log of the sum of exp(logits / temperature), [M], fp32."""
        found = np.empty_like(self.totals_M)
        logs(self.totals_M, found)
        return torch.from_numpy((self.tops_M + found).astype(np.float32))

    def sound(self) -> NDArray[np.bool_]:
        """False where the logits held a NaN or +inf, or nothing but -inf."""
        return np.isfinite(self.totals_M) & np.isfinite(self.tops_M)

    def logprobs(self, tokens_M: NDArray[np.int64]) -> Tensor:
        """Log p of one token per row, [M], fp32."""
        out = np.empty(len(tokens_M), np.float32)
        logprobs(self.logits, self.temperatures_M, self.tops_M, self.totals_M, tokens_M, out)
        return torch.from_numpy(out)

    def draw(self, u_M: NDArray[np.float64]) -> NDArray[np.int64]:
        """The token at which the running sum of probabilities passes u in [0, 1); `GREEDY` for the likeliest."""
        tokens = np.zeros(len(u_M), np.int64)
        every = (self.logits, self.temperatures_M, self.tops_M, self.sums_MK, self.totals_M, u_M, tokens)
        split(len(u_M), lambda a, b: invert(*(x[a:b] for x in every)))
        return tokens

    def race(self, rows_P: NDArray[np.int64], keys_P: NDArray[np.uint64], tokens_M: NDArray[np.int64]) -> None:
        """Fill in the winners of these rows' races: a draw by a key, the same for near distributions more often than by `draw`."""
        where = (self.logits, self.temperatures_M, self.tops_M)
        split(len(rows_P), lambda a, b: race(*where, rows_P[a:b], keys_P[a:b], tokens_M))


def softmax(logits_MV: Tensor, temperatures_M: Tensor, kernels: Literal["own", "torch"]) -> RowSoftmax | TensorSoftmax:
    """The distributions of M rows of logits by our kernels or by torch's."""
    return (RowSoftmax if kernels == "own" else TensorSoftmax).of(logits_MV, temperatures_M)
