"""Logits -> tokens: one batched pass in which every draw depends on (seed, sample index, position) and its own logits only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_MASK = (1 << 64) - 1
_TILE = 256  # tokens per tile of the two-level inverse of the distribution function
_TOP = 512  # a nucleus almost always lies within this many tokens; else the whole row is sorted


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that depends on its three arguments only: SplitMix64's finaliser applied to each in turn.

    The finaliser is Stafford's variant 13 as used in Steele, Lea, Flood (2014), "Fast splittable pseudorandom number generators".
    """
    state = 0
    for part in (seed, index, position):
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one row is drawn. `u` in [0, 1) decides; temperature 0 ignores it.

    Example: ``Draw(temperature=1.0, top_p=1.0, u=uniform(7, 0, 12))``.
    """

    temperature: float
    top_p: float
    u: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One entry per row. `sound` is False where the logits held a NaN or +inf, or nothing but -inf; the token then means nothing.

    Example: ``Drawn(tokens=[5], logprobs=[-0.3], sound=[True])``.
    """

    tokens: list[int]
    logprobs: list[float]
    sound: list[bool]


def draw(logits_MV: Tensor, rows: Sequence[Draw]) -> Drawn:
    """Draw one token per row.

    Args:
        logits_MV: [M, V] in any floating dtype.
        rows: M ways to draw.

    Returns:
        Tokens and their log-probabilities: log_softmax(logits / temperature) before any top-p cut, temperature 1 where greedy.
    """
    scaled_MV = logits_MV.float()
    if any(row.temperature not in (0.0, 1.0) for row in rows):
        scaled_MV = scaled_MV / torch.tensor([[row.temperature or 1.0] for row in rows])
    top_M1 = scaled_MV.amax(-1, keepdim=True)
    mass_MV = (scaled_MV - top_M1).exp_()
    log_total_M = mass_MV.sum(-1).log() + top_M1[:, 0]
    sound_M = log_total_M.isfinite()
    tokens_M = torch.zeros(len(rows), dtype=torch.long)
    drawn = [i for i, row in enumerate(rows) if row.temperature > 0]
    greedy = [i for i, row in enumerate(rows) if row.temperature == 0]
    if greedy:
        tokens_M[greedy] = scaled_MV[greedy].argmax(-1)
    if drawn:
        kept_DV = mass_MV if len(drawn) == len(rows) else mass_MV[drawn]
        cut = [i for i, row in enumerate(drawn) if rows[row].top_p < 1.0]
        if cut:
            kept_DV[cut] = _nucleus(kept_DV[cut], torch.tensor([rows[drawn[i]].top_p for i in cut]))
        u_D = torch.tensor([rows[i].u for i in drawn], dtype=torch.float64)
        tokens_M[drawn] = _invert(kept_DV, u_D)
    logprobs_M = scaled_MV.gather(1, tokens_M[:, None])[:, 0] - log_total_M
    return Drawn(tokens=tokens_M.tolist(), logprobs=logprobs_M.tolist(), sound=sound_M.tolist())


def _nucleus(mass_CV: Tensor, top_p_C: Tensor) -> Tensor:
    """Zero all but the smallest set of likeliest tokens with at least `top_p` of the mass (Holtzman et al., arXiv:1904.09751)."""
    target_C1 = (mass_CV.sum(-1) * top_p_C)[:, None]
    best_CK, where_CK = mass_CV.topk(min(_TOP, mass_CV.shape[-1]), dim=-1)
    if bool((best_CK.sum(-1, keepdim=True) < target_C1).any()):
        best_CK, where_CK = mass_CV.sort(dim=-1, descending=True)
    before_CK = best_CK.cumsum(-1) - best_CK
    best_CK = best_CK.masked_fill(before_CK >= target_C1, 0.0)
    return torch.zeros_like(mass_CV).scatter_(1, where_CK, best_CK)


def _invert(mass_DV: Tensor, u_D: Tensor) -> Tensor:
    """The token at which the running sum passes u: first the tile, then the token in it; no running sum over the vocabulary."""
    rows, vocab = mass_DV.shape
    tiles_DKT = F.pad(mass_DV, (0, -vocab % _TILE)).view(rows, -1, _TILE)
    tile_D, left_D = _pick(tiles_DKT.sum(-1), u_D)
    token_D, _ = _pick(tiles_DKT[torch.arange(rows), tile_D], left_D)
    return (tile_D * _TILE + token_D).clamp_(max=vocab - 1)


def _pick(mass_DN: Tensor, u_D: Tensor) -> tuple[Tensor, Tensor]:
    """(the entry whose share of the running sum holds u, u's place within that share in [0, 1))."""
    sums_DN = mass_DN.double().cumsum(-1)
    target_D1 = (u_D * sums_DN[:, -1])[:, None]
    at_D1 = (sums_DN <= target_D1).sum(-1, keepdim=True).clamp_(max=mass_DN.shape[-1] - 1)
    share_D1 = mass_DN.gather(1, at_D1).double()
    before_D1 = sums_DN.gather(1, at_D1) - share_D1
    place_D = ((target_D1 - before_D1) / share_D1)[:, 0].clamp(0.0, 1.0 - 2**-53)
    return at_D1[:, 0], place_D
