"""The distance between two policies on tokens that one of them drew, and the trust in a batch that follows from it. Pure torch maths.

d = trainer - sampler throughout, in nats; w = e^d is a token's importance weight. If the sampler drew the tokens, E[w] = 1 at every
token, however far the trainer has moved, so the mean weight tests the samples themselves (Hesterberg 1995).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.train.losses import turn_means

# d beyond this is as good as infinite, and the square of its exponential, e^600, still fits into float64
_FINITE = 300.0


def k1(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """Per-token estimate log p - log ref of KL(p || ref) from samples of p: unbiased, can be negative (Schulman 2020)."""
    return logprobs_M - reference_M


def k3(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """Per-token estimate r - 1 - log r with r = ref / p of KL(p || ref) from samples of p: unbiased, never negative (Schulman 2020)."""
    log_ratio = reference_M - logprobs_M
    return log_ratio.exp() - 1 - log_ratio


def effective_share(weights: Tensor, shares: Tensor | None = None) -> float:
    """ESS/n of importance weights w, (sum s w)^2 / (sum s * sum s w^2), in [0, 1]: 1 if all are equal, 0 if all are zero (Kong 1992).

    `shares` is how much each sample counts, 1 if None.
    """
    w = weights.double()
    s = torch.ones_like(w) if shares is None else shares.double()
    square = float((s * w * w).sum())
    return float((s * w).sum()) ** 2 / (float(s.sum()) * square) if square > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How far a batch can be trusted by a policy that did not draw it. Without drift every field is 1, except `k3`, which is 0.

    `mean_weight`: the mean of w, 1 in expectation. `k3`: KL(sampler || trainer) in nats per token. `ess`: ESS/n of the truncated token
    weights. `ess_turns`: ESS/n of whole turns.

    Example: all of d = -12 gives ``Trust(mean_weight=6.1e-06, k3=11.0, ess=1.0, ess_turns=0.0)``: the tokens' ESS alone sees nothing.
    """

    mean_weight: float
    k3: float
    ess: float
    ess_turns: float

    @property
    def scale(self) -> float:
        """The factor on the learning rate, in [0, 1]: the minimum over the measures.

        Adam undoes any scaling of the gradient, so a batch with little information must be scaled down here. Turns count by the square
        root of their ESS, as in VCPO (2602.17616, which follows the square-root rule for Adam).
        """
        balance = min(self.mean_weight, 1 / self.mean_weight) if self.mean_weight > 0 else 0.0
        return min(balance, self.ess, math.sqrt(self.ess_turns))


def trust(
    d_M: Tensor, turns_M: Tensor, shares_M: Tensor, *, cap: float, horizon: int, turn_cap: float | None = None
) -> Trust:
    """Measure a batch from each token's d, its turn and its share.

    A turn's weight is the product of its tokens' w, truncated at `turn_cap` (None: at `cap`). Over a long turn that product vanishes
    under any drift at all, e^-5 for 1,000 tokens of 0.005 nats, so a turn longer than `horizon` counts as that many of its tokens would
    on average: a horizon of 1 would give the geometric mean of GSPO (2507.18071), no horizon the plain product. Thanks to the
    truncation a single stray turn cannot veto a batch, but a policy that has left its samples, with most weights near 0, can.
    """
    d, s = d_M.detach().double().clamp(max=_FINITE), shares_M.double()
    w = d.exp()
    _, turns_M = torch.unique(turns_M, return_inverse=True)
    lengths_S = torch.bincount(turns_M)
    turn_S = (turn_means(d, turns_M) * lengths_S.clamp(max=horizon)).exp().clamp(max=turn_cap or cap)
    return Trust(
        mean_weight=float((s * w).sum() / s.sum()),
        k3=float((s * k3(torch.zeros_like(d), d)).sum() / s.sum()),
        ess=effective_share(w.clamp(max=cap), s),
        ess_turns=effective_share(turn_S, turn_means(s, turns_M)),
    )


def drift(
    logprobs_M: Tensor, behaviour_M: Tensor, *, cap: float, prefix: str, turns_M: Tensor | None = None
) -> dict[str, float]:
    """How far the trainer's logprobs are from the sampler's, on tokens that the sampler drew.

    Keys, each after `prefix`: tokens, differing = tokens with d != 0, k1 = mean(-d) and k3 = mean(e^d - 1 - d) which estimate
    KL(sampler || trainer) in nats per token, chi2 = mean(e^2d) - 1, max_abs, p99.9_abs, over_ln2 = share of tokens with
    |d| > ln 2, truncated = share of tokens whose weight was cut at `cap`, ess = ESS/n of the truncated weights, and with
    `turns_M` log_ppl_abs_diff = mean over turns of |mean d|, the difference of the two log-perplexities.
    """
    count = len(logprobs_M)
    if count == 0:
        return {f"{prefix}tokens": 0.0, f"{prefix}differing": 0.0}
    d = (logprobs_M.detach() - behaviour_M).double()
    weights = d.exp()
    found = {
        f"{prefix}tokens": float(count),
        f"{prefix}differing": float((d != 0).sum()),
        f"{prefix}k1": float(k1(behaviour_M, logprobs_M.detach()).double().mean()),
        f"{prefix}k3": float(k3(behaviour_M.double(), logprobs_M.detach().double()).mean()),
        f"{prefix}chi2": float((2 * d).exp().mean()) - 1,
        f"{prefix}max_abs": float(d.abs().max()),
        f"{prefix}p99.9_abs": float(d.abs().sort().values[int(count * 0.999)]),
        f"{prefix}over_ln2": float((d.abs() > math.log(2)).double().mean()),
        f"{prefix}truncated": float((weights > cap).double().mean()),
        f"{prefix}ess": effective_share(weights.clamp(max=cap)),
    }
    if turns_M is not None:
        means_S = turn_means(d, torch.unique(turns_M, return_inverse=True)[1])
        found[f"{prefix}log_ppl_abs_diff"] = float(means_S.abs().mean())
    return found
