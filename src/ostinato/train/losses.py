"""The policy-gradient loss, and the distance (KL, ESS) of the trainer's policy from the sampler's. Pure torch maths: no model.

Axes: M sampled tokens of a micro-batch, turn by turn in sampling order; S its turns. Logs are natural.

d = trainer - sampler throughout, in nats; w = e^d is a token's importance weight. If the sampler drew the tokens, E[w] = 1 at every
token, however far the trainer has moved, so the mean weight tests the samples themselves (Hesterberg 1995).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def rewards_to_go(values_M: Tensor, turns_M: Tensor) -> Tensor:
    """Return the sum of the values from each token to the end of its turn, summed in float64 against cancellation in long micro-batches.

    Example: values ``[1, 2, 4, 8]`` of turns ``[0, 0, 0, 1]`` give ``[7, 6, 4, 8]``.
    """
    total = values_M.double().cumsum(0)
    before = total - values_M.double()
    last = torch.ones_like(turns_M, dtype=torch.bool)
    last[:-1] = turns_M[1:] != turns_M[:-1]
    ends = total[last]
    return (ends[last.cumsum(0) - last.long()] - before).to(values_M.dtype)


def turn_means(values_M: Tensor, turns_M: Tensor) -> Tensor:
    """Return each turn's mean as float64 [S], where S is one more than the largest index in `turns_M`; NaN for an index without tokens.

    Example: values ``[1, 3, 8]`` of turns ``[0, 0, 1]`` give ``[2, 8]``.
    """
    sums_S = torch.zeros(int(turns_M.max()) + 1, dtype=torch.float64).index_add_(0, turns_M, values_M.double())
    return sums_S / torch.bincount(turns_M)


def sequence_mask(logprobs_M: Tensor, behaviour_M: Tensor, turns_M: Tensor, *, bound: float) -> Tensor:
    """Return True for the tokens of turns whose geometric mean ratio exp(mean d) lies in [1/bound, bound], d = trainer - sampler.

    Where two arithmetics differ, token weights truncate single outliers; a turn that is off as a whole was drawn from another
    distribution and is masked as a whole. d = 0 is never masked. A NaN is masked, but the loss, which multiplies by the mask, stays
    NaN and is refused. Source: geometric sequence rejection, "MIS" in the notes of verl's rollout correction.

    Example: d = ``[ln 2, ln 8, 0]`` of turns ``[0, 0, 1]`` has ratios 4 and 1: with bound 2 the mask is ``[False, False, True]``.
    """
    means_S = turn_means(logprobs_M.detach() - behaviour_M, turns_M)
    return (means_S.abs() <= math.log(bound))[turns_M]


def turn_ess(d_M: Tensor, turns_M: Tensor) -> Tensor:
    """Return each turn's own estimate of ESS/n under weights of whole turns, exp(-sum d^2), as float64 [S], d = trainer - sampler in nats.

    Where d is small and of both signs, the turns' log-weights are normal with variance sum d^2. Unlike the weight itself, this estimate
    hardly depends on what was sampled, so selecting by it introduces hardly any bias.
    """
    return (-turn_means(d_M.double().square(), turns_M) * torch.bincount(turns_M)).exp()


def importance_weights(d_M: Tensor, turns_M: Tensor, *, cap: float, turn_cap: float, least_ess: float | None) -> Tensor:
    """Return the importance weight of each token, d = trainer - sampler. Where the turn's own ESS is at least `least_ess` (None: nowhere),
    it is the turn's weight, prod e^d truncated at `turn_cap`; otherwise the token's own, e^d truncated at `cap`.

    A turn's advantage depends on all of its tokens, so only the weight of the whole turn makes the off-policy gradient that of the
    policy's own turns. But over long turns or much drift its variance grows without bound.
    """
    weights_M = d_M.exp().clamp(max=cap)
    if least_ess is None:
        return weights_M
    sums_S = turn_means(d_M, turns_M) * torch.bincount(turns_M)
    whole_M = sums_S.exp().clamp(max=turn_cap).to(d_M.dtype)[turns_M]
    return torch.where((turn_ess(d_M, turns_M) >= least_ess)[turns_M], whole_M, weights_M)


Penalty = tuple[Tensor, float]
"""A policy's log-probabilities [M] of the sampled tokens, and beta, the price per nat of divergence from it."""


def policy_loss(
    logprobs_M: Tensor,
    *,
    behaviour_M: Tensor,
    advantages_M: Tensor,
    turns_M: Tensor,
    normaliser: float,
    penalties: Sequence[Penalty] = (),
    cap: float = 2.0,
    turn_cap: float = 4.0,
    least_ess: float | None = None,
    keep_M: Tensor | None = None,
    shares_M: Tensor | None = None,
) -> Tensor:
    r"""Return the loss of REINFORCE with truncated importance weights and token-level KL penalties in the reward: a differentiable scalar.

    .. math::
        L = -\frac{1}{Z} \sum_t s_t w_t A_t \log \pi(y_t), \quad
        A_t = a_t - \sum_j \beta_j \sum_{s \ge t} (\log \pi(y_s) - \log \pi_j(y_s))

    w and A carry no gradient. w are the `importance_weights` of pi(y) / mu(y); mu is the policy that sampled the token (`behaviour_M`), a
    each token's advantage (`advantages_M`), s its turn's weight (`shares_M`; 1 if None: see `Sample.factor`), and `penalties` are the pi_j
    with their beta_j. `normaliser` is Z = episodes of the whole batch x the token budget of a turn: a constant, so a long wrong answer
    costs as much per token as a short one. Tokens outside `keep_M` get weight 0; the caller must leave their turns out of Z,
    too, or the others would count for less.

    The sum over s >= t ends with the turn. The text after a turn was written by others, may be in another batch, held back or masked, and
    adds noise with every token; a sum over the episode would also reward steering a conversation to where the policy has not
    changed. A turn's penalty is then its own KL, whatever else is in the batch.

    If mu is pi the gradient is exact. Off-policy it is biased: by truncation alone where turns are weighted as a whole; with weights per
    token, also because the weights of the tokens before and after are left out. Limits on drift bound the bias (`trust`).

    Sources: importance truncation, Ionides 2008 and CISPO (2506.13585), whose loss this equals with weights per token; constant Z, Dr. GRPO
    (2503.20783); the k1 penalty as a reward-to-go inside the advantage, REINFORCE++ (2501.03262).
    """
    now_M = logprobs_M.detach()
    weights_M = importance_weights(now_M - behaviour_M, turns_M, cap=cap, turn_cap=turn_cap, least_ess=least_ess)
    if keep_M is not None:
        weights_M = weights_M * keep_M
    shaped_M = advantages_M
    if penalties:
        prices_M = torch.stack([beta * (now_M - policy_M) for policy_M, beta in penalties]).sum(0)
        shaped_M = advantages_M - rewards_to_go(prices_M, turns_M)
    terms_M = weights_M * shaped_M * logprobs_M
    return -(terms_M if shares_M is None else terms_M * shares_M).sum() / normaliser


# ---------------------------------------------------------------- distances between policies

# a larger d counts as infinite; the square of its exponential, e^600, still fits into float64
_FINITE = 300.0


def k1(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """Return the per-token estimate log p - log ref of KL(p || ref) from samples of p: unbiased, can be negative (Schulman 2020)."""
    return logprobs_M - reference_M


def k3(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """Return the per-token estimate r - 1 - log r, r = ref / p, of KL(p || ref) from samples of p: unbiased, >= 0 (Schulman 2020)."""
    log_ratio = reference_M - logprobs_M
    return log_ratio.exp() - 1 - log_ratio


def effective_share(weights: Tensor, shares: Tensor | None = None) -> float:
    """Return ESS/n of importance weights w, (sum s w)^2 / (sum s * sum s w^2), in [0, 1]: 1 if all are equal, 0 if all are 0 (Kong 1992).

    `shares`: how much each sample counts; None: all the same.
    """
    w = weights.double()
    s = torch.ones_like(w) if shares is None else shares.double()
    square = float((s * w * w).sum())
    return float((s * w).sum()) ** 2 / (float(s.sum()) * square) if square > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Measures of how far a batch can be trusted by a policy that did not sample it. Without drift all fields are 1, but `k3` is 0.

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

        Adam undoes any scaling of the gradient, so the learning rate must be scaled down for a batch with little information. Turns count
        by the square root of their ESS, as in VCPO (2602.17616, which follows the square-root rule for Adam).
        """
        balance = min(self.mean_weight, 1 / self.mean_weight) if self.mean_weight > 0 else 0.0
        return min(balance, self.ess, math.sqrt(self.ess_turns))


def trust(
    d_M: Tensor, turns_M: Tensor, shares_M: Tensor, *, cap: float, horizon: int, turn_cap: float | None = None
) -> Trust:
    """Measure a batch from each token's d, its turn and its share.

    A turn's weight is the product of its tokens' w, truncated at `turn_cap` (None: at `cap`). Over a long turn that product vanishes
    under any drift, e^-5 for 1,000 tokens of 0.005 nats. So a turn longer than `horizon` counts as that many of its tokens would
    on average: a horizon of 1 would give the geometric mean of GSPO (2507.18071), no horizon the plain product. Because of the
    truncation a single stray turn cannot cause a refusal, but a policy that has left its samples, with most weights near 0, can.
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
    """Return metrics of how far the trainer's logprobs are from the sampler's, on tokens that the sampler drew.

    Keys, each after `prefix`: tokens, differing = tokens with d != 0, k1 = mean(-d) and k3 = mean(e^d - 1 - d), which estimate
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
