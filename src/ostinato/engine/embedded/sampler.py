"""The sampler: draws tokens from logits in one batch; each draw depends only on its (seed, sample index, position) and its own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ostinato.core import nucleus
from ostinato.core.generation import Tops
from ostinato.core.records import logit_divisor
from ostinato.model.logit_edits import Edit, edit_logits
from ostinato.model.logprobs import GREEDY, RowSoftmax, TensorSoftmax, softmax
from ostinato.model.steering import SteeredToken

_MASK = (1 << 64) - 1
_TOP_K = 512  # a nucleus almost always fits in this many tokens; otherwise the whole row is sorted


def uniform(seed: int, index: int, position: int) -> float:
    """Return a counter-based pseudorandom number in [0, 1): SplitMix64's finaliser applied to each argument in turn.

    The finaliser is Stafford's variant 13 as used in Steele, Lea, Flood (2014), "Fast splittable pseudorandom number generators".
    """
    return (key_of(seed, index, position) >> 11) / (1 << 53)


def key_of(seed: int, index: int, position: int) -> int:
    """Return the 64 bits from which `uniform` is made; they are also the key of an exponential race."""
    state = 0
    for part in (seed, index, position):
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The sampling parameters of one row. `u` in [0, 1) decides the draw; temperature 0 (greedy) ignores it.

    `race`: the key of an exponential race (`kernels.softmax.race`), which replaces `u`, so that similar distributions draw the same token
    more often. `edit`: the logit edits to apply first. `tops`: how many of the most likely tokens to return as well.

    Example: ``Draw(temperature=1.0, top_p=1.0, u=uniform(7, 0, 12))``.
    """

    temperature: float
    top_p: float
    u: float
    race: int | None = None
    edit: Edit | None = None
    tops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Drawn tokens, one entry per row. `sound` is False if the logits held a NaN or +inf, or only -inf; the token is then meaningless.

    `nuclei`: the token ids that `top_p` kept, encoded (`core.nucleus`); b"" if it kept all. `steered`: the effect of steering on the row.

    Example: ``Drawn(tokens=[5], logprobs=[-0.3], sound=[True], tops=[()], nuclei=[b""], steered=[None])``.
    """

    tokens: list[int]
    logprobs: list[float]
    sound: list[bool]
    tops: list[Tops]
    nuclei: list[bytes]
    steered: list[SteeredToken | None]


def draw(logits_MV: Tensor, rows: Sequence[Draw], kernels: Literal["own", "torch"] = "own") -> Drawn:
    """Draw one token per row.

    Args:
        logits_MV: [M, V] in any floating dtype; may be overwritten.
        rows: sampling parameters of the M rows.
        kernels: "own" or "torch"; "torch" takes logits on any device.

    Returns:
        Tokens and their log-probabilities: log_softmax(logits / temperature) of the edited logits, with -inf outside the nucleus and
        temperature 1 for greedy rows.
    """
    logits_MV, steered = edit_logits(logits_MV, {i: row.edit for i, row in enumerate(rows) if row.edit is not None})
    # explicit dtypes: another thread that builds a model may change the process's default dtype
    temperatures_M = torch.tensor([logit_divisor(row.temperature) for row in rows], dtype=torch.float32)
    nuclei = [
        _apply_top_p(logits_MV[i], row) if row.temperature and row.top_p < 1.0 else b"" for i, row in enumerate(rows)
    ]
    normal = softmax(logits_MV, temperatures_M, kernels)
    raced = {i: row.race for i, row in enumerate(rows) if row.race is not None and row.temperature}
    tokens_M = normal.draw(np.array([row.u if row.temperature else GREEDY for row in rows]))
    if raced:
        normal.race(np.array([*raced], np.int64), np.array([*raced.values()], np.uint64), tokens_M)
    return Drawn(
        tokens=tokens_M.tolist(),
        logprobs=normal.logprobs(tokens_M).tolist(),
        sound=normal.sound().tolist(),
        tops=_tops(logits_MV, normal, [row.tops for row in rows]),
        nuclei=nuclei,
        steered=[steered.get(i) for i in range(len(rows))],
    )


def _tops(logits_MV: Tensor, normal: RowSoftmax | TensorSoftmax, wanted: Sequence[int]) -> list[Tops]:
    """Return each row's `wanted` most likely tokens, without tokens of probability 0."""
    most = min(max(wanted), logits_MV.shape[1])
    if not most:
        return [()] * len(wanted)
    best_MK = logits_MV.topk(most, dim=-1).indices.cpu().numpy()
    logprobs_KM = [normal.logprobs(np.ascontiguousarray(best_M)).tolist() for best_M in best_MK.T]
    return [
        tuple(
            (token, row[i])
            for token, row in zip(best_MK[i, :count].tolist(), logprobs_KM, strict=False)
            if row[i] > -np.inf
        )
        for i, count in enumerate(wanted)
    ]


def _apply_top_p(logits_V: Tensor, row: Draw) -> bytes:
    """Set the logits outside the row's nucleus to -inf, like a grammar mask; return the encoded ids of the nucleus.

    The nucleus is the smallest set of most likely tokens with at least `top_p` of the mass (Holtzman et al., arXiv:1904.09751).
    """
    mass_V = (logits_V.float() / row.temperature).softmax(-1)
    target = float(mass_V.sum()) * row.top_p
    best_K, where_K = mass_V.topk(min(_TOP_K, len(mass_V)))
    if float(best_K.sum()) < target:
        best_K, where_K = mass_V.sort(descending=True)
    open_K = best_K.cumsum(-1) - best_K < target
    open_K[0] = True  # keeps the most likely token even if `top_p` is rounded to 0
    ids = where_K[open_K & (best_K > 0)].sort().values
    shut_V = torch.ones_like(logits_V, dtype=torch.bool)
    shut_V[ids] = False
    logits_V.masked_fill_(shut_V, -torch.inf)
    return nucleus.encode(ids.cpu().numpy())
