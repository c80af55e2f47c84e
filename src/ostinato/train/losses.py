"""The policy-gradient loss. Pure torch maths: no IO, no clock, no model.

Axes: M sampled tokens of a micro-batch, turn by turn in sampling order; S its turns. Logs are natural.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def rewards_to_go(values_M: Tensor, turns_M: Tensor) -> Tensor:
    """Sum of the values from each token to the end of its turn. Summed in float64, so that long micro-batches do not cancel.

    Example: values ``[1, 2, 4, 8]`` of turns ``[0, 0, 0, 1]`` give ``[7, 6, 4, 8]``.
    """
    total = values_M.double().cumsum(0)
    before = total - values_M.double()
    last = torch.ones_like(turns_M, dtype=torch.bool)
    last[:-1] = turns_M[1:] != turns_M[:-1]
    ends = total[last]
    return (ends[last.cumsum(0) - last.long()] - before).to(values_M.dtype)


def turn_means(values_M: Tensor, turns_M: Tensor) -> Tensor:
    """Each turn's mean as float64 [S], where S is one more than the largest index in `turns_M`. NaN for an index without tokens.

    Example: values ``[1, 3, 8]`` of turns ``[0, 0, 1]`` give ``[2, 8]``.
    """
    sums_S = torch.zeros(int(turns_M.max()) + 1, dtype=torch.float64).index_add_(0, turns_M, values_M.double())
    return sums_S / torch.bincount(turns_M)


def sequence_mask(logprobs_M: Tensor, behaviour_M: Tensor, turns_M: Tensor, *, bound: float) -> Tensor:
    """True for the tokens of turns whose geometric mean ratio exp(mean d) lies in [1/bound, bound], d = trainer - sampler.

    Where two arithmetics differ, token weights truncate single outliers; a turn that is off as a whole was drawn from another
    distribution and is masked as a whole. d = 0 is never masked. A NaN is masked, but the loss, which multiplies by the mask, stays
    NaN and is refused. Source: geometric sequence rejection, "MIS" in the notes of verl's rollout correction.

    Example: d = ``[ln 2, ln 8, 0]`` of turns ``[0, 0, 1]`` has ratios 4 and 1: with bound 2 the mask is ``[False, False, True]``.
    """
    means_S = turn_means(logprobs_M.detach() - behaviour_M, turns_M)
    return (means_S.abs() <= math.log(bound))[turns_M]


def turn_ess(d_M: Tensor, turns_M: Tensor) -> Tensor:
    """Each turn's own estimate of ESS/n under weights of whole turns, exp(-sum d^2), as float64 [S], d = trainer - sampler in nats.

    Where d is small and of both signs, the turns' log-weights are normal with the variance sum d^2. Unlike the weight itself it
    hardly depends on what was sampled, so selecting by it hardly biases.
    """
    return (-turn_means(d_M.double().square(), turns_M) * torch.bincount(turns_M)).exp()


def importance_weights(d_M: Tensor, turns_M: Tensor, *, cap: float, turn_cap: float, least_ess: float | None) -> Tensor:
    """The importance weight of each token, d = trainer - sampler: its turn's, prod e^d truncated at `turn_cap`, where the turn's own ESS is
    at least `least_ess` (None: nowhere), else its own, e^d truncated at `cap`.

    A turn's advantage depends on all of its tokens, so only the weight of the whole turn makes the gradient off-policy that of the
    policy's own turns; over long turns or much drift its variance grows without bound.
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
    r"""REINFORCE with truncated importance weights and token-level KL penalties in the reward: a differentiable scalar.

    .. math::
        L = -\frac{1}{Z} \sum_t s_t w_t A_t \log \pi(y_t), \quad
        A_t = a_t - \sum_j \beta_j \sum_{s \ge t} (\log \pi(y_s) - \log \pi_j(y_s))

    w and A carry no gradient. w are the `importance_weights` of pi(y) / mu(y); mu is the policy that sampled the token (`behaviour_M`), a
    each token's advantage (`advantages_M`), s its turn's weight (`shares_M`; 1 if None: see `Sample.factor`), and `penalties` are the pi_j
    with their beta_j. `normaliser` is Z = episodes of the whole batch x the token budget of a turn: a constant, so a long wrong answer
    costs as much per token as a short one. Tokens outside `keep_M` get weight 0; the caller leaves their turns out of Z
    too, or the others would count for less.

    The sum over s >= t ends with the turn. The text after a turn was said by others, may be in another batch, held back or masked, and
    adds noise with every token; a sum over the episode would also reward steering a conversation to where the policy has not
    changed. A turn's price is then its own KL, whatever else is in the batch.

    Where mu is pi the gradient is exact. Off-policy it is biased, by truncation alone where turns are weighted as a whole; with weights per
    token, the weights of the tokens before and after are left out, too. Limits on drift bound the bias (`drift.trust`).

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
