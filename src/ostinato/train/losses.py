"""The policy-gradient loss and what is measured about it. Pure torch maths: no IO, no clock, no model.

Data flow: hidden states of the sampled positions -> `token_logprobs` -> `sequence_mask` (where arithmetics differ) -> `policy_loss`
-> backward; after the batch, `drift` and `effective_share` tell how far the sampled tokens' own policy was from this one.

Axes: M sampled tokens of a micro-batch, turn by turn in sampling order; V vocabulary; D hidden size. Logs are natural.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ostinato.model.logprobs import RowSoftmax

_ROWS = 64
"""Rows of logits held in fp32 at a time: 64 x 49,152 floats are 12 MB, which stays in a CPU's last-level cache."""


class _Gather(torch.autograd.Function):
    """log softmax(logits / T)[target] as the sampler computes it; the backward pass rebuilds the softmax from the kept logits."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor) -> Tensor:
        normal = RowSoftmax.of(logits_MV, temperatures_M)
        ctx.save_for_backward(logits_MV, targets_M, temperatures_M, normal.log_totals())
        return normal.logprobs(targets_M.numpy())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_MV, targets_M, temperatures_M, norms_M = ctx.saved_tensors
        grad_M = grads[0] / temperatures_M
        out = torch.empty_like(logits_MV)
        for start in range(0, len(targets_M), _ROWS):
            rows = slice(start, start + _ROWS)
            p = (logits_MV[rows].float() / temperatures_M[rows, None]).sub_(norms_M[rows, None]).exp_()
            p.mul_(-grad_M[rows, None])
            p.scatter_add_(1, targets_M[rows, None], grad_M[rows, None])
            out[rows] = p
        return out, None, None


def token_logprobs(
    head: Callable[[Tensor], Tensor], hidden_MD: Tensor, targets_M: Tensor, temperatures_M: Tensor, *, rows: int = 2048
) -> Tensor:
    """fp32 log-probability of each sampled token under softmax(head(hidden) / temperature), under autograd.

    `head` maps [m, D] to logits [m, V] and is called on at most `rows` rows at a time. bf16 logits of a micro-batch are kept for
    the backward pass; fp32 logits are not (the head runs again instead), so no fp32 [M, V] tensor ever stands in memory.
    """

    def chunk(hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        return _Gather.apply(head(hidden), targets, temperatures)  # pyright: ignore[reportReturnType]

    half = hidden_MD.dtype in (torch.bfloat16, torch.float16)
    step = rows if half else min(rows, 512)
    parts: list[Tensor] = []
    for start in range(0, len(targets_M), step):
        part = slice(start, start + step)
        args = (hidden_MD[part], targets_M[part], temperatures_M[part])
        again = torch.is_grad_enabled() and not half
        made = checkpoint(chunk, *args, use_reentrant=False, preserve_rng_state=False) if again else chunk(*args)
        parts.append(made)  # pyright: ignore[reportArgumentType]
    return torch.cat(parts)


def rewards_to_go(values_M: Tensor, turns_M: Tensor) -> Tensor:
    """Sum of the values from each token to the end of its turn. Summed in float64, so that long micro-batches do not cancel.

    Example: values ``[1, 2, 4, 8]`` of turns ``[0, 0, 0, 1]`` give ``[7, 6, 4, 8]``.
    """
    total = values_M.double().cumsum(0)
    before = total - values_M.double()
    last = torch.ones_like(turns_M, dtype=torch.bool)
    last[:-1] = turns_M[1:] != turns_M[:-1]
    ends = total[last]
    which = (last.cumsum(0) - last.long()).clamp(max=len(ends) - 1)
    return (ends[which] - before).to(values_M.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """`loss` is a differentiable scalar; `weights_M` (the truncated importance weights), `advantages_M` (with the KL penalty) are not."""

    loss: Tensor
    weights_M: Tensor
    advantages_M: Tensor


def policy_loss(
    logprobs_M: Tensor,
    *,
    behaviour_M: Tensor,
    advantages_M: Tensor,
    turns_M: Tensor,
    normaliser: float,
    reference_M: Tensor | None = None,
    beta: float = 0.0,
    cap: float = 2.0,
    keep_M: Tensor | None = None,
    shares_M: Tensor | None = None,
) -> PolicyLoss:
    r"""REINFORCE with truncated token importance weights and a token-level KL penalty in the reward.

    .. math::
        L = -\frac{1}{Z} \sum_t s_t w_t A_t \log \pi(y_t), \quad w_t = \min(\pi(y_t) / \mu(y_t), cap), \quad
        A_t = A_{turn} - \beta \sum_{s \ge t} (\log \pi(y_s) - \log \pi_{ref}(y_s))

    w and A carry no gradient. mu is the policy that sampled the token (`behaviour_M`), `advantages_M` each token's credit,
    `shares_M` the part s that its turn is of its episode (1 if None), the sum over s >= t runs to the end of the turn, `normaliser`
    is Z = episodes of the whole batch x the token budget of a turn: a constant, so a long wrong answer costs as much per token as a
    short one, and an episode of many turns as much as one of one. Tokens outside `keep_M`
    get weight 0; the caller leaves their turns out of Z too, or the others would count for less.

    Sources: importance truncation, Ionides 2008 and CISPO (2506.13585), whose loss this equals; constant Z, Dr. GRPO
    (2503.20783); the k1 penalty as a reward-to-go inside the advantage, REINFORCE++ (2501.03262).
    """
    now_M = logprobs_M.detach()
    weights_M = (now_M - behaviour_M).exp().clamp(max=cap)
    if keep_M is not None:
        weights_M = weights_M * keep_M
    shaped_M = advantages_M
    if reference_M is not None and beta:
        shaped_M = advantages_M - beta * rewards_to_go(now_M - reference_M, turns_M)
    terms_M = weights_M * shaped_M * logprobs_M
    loss = -(terms_M if shares_M is None else terms_M * shares_M).sum() / normaliser
    return PolicyLoss(loss=loss, weights_M=weights_M, advantages_M=shaped_M)


def k1(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """Per-token estimate log p - log ref of KL(p || ref) from samples of p: unbiased, can be negative (Schulman 2020)."""
    return logprobs_M - reference_M


def k3(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """Per-token estimate r - 1 - log r with r = ref / p of KL(p || ref) from samples of p: unbiased, never negative (Schulman 2020)."""
    log_ratio = reference_M - logprobs_M
    return log_ratio.exp() - 1 - log_ratio


def effective_share(weights_M: Tensor) -> float:
    """ESS/n of importance weights, (sum w)^2 / (n sum w^2), in [0, 1]; 1 if all are equal (Kong 1992). 0 if all are zero.

    Taken over the truncated weights, the ones that enter the gradient: one stray token cannot veto a batch, a policy that has
    left its samples behind (most weights near 0) can.
    """
    w = weights_M.double()
    square = float((w * w).sum())
    return float(w.sum()) ** 2 / (len(w) * square) if square > 0 else 0.0


def turn_means(values_M: Tensor, turns_M: Tensor) -> Tensor:
    """Each turn's mean as float64 [S], where S is one more than the largest index in `turns_M`. NaN for an index without tokens.

    Example: values ``[1, 3, 8]`` of turns ``[0, 0, 1]`` give ``[2, 8]``.
    """
    sums_S = torch.zeros(int(turns_M.max()) + 1, dtype=torch.float64).index_add_(0, turns_M, values_M.double())
    return sums_S / torch.bincount(turns_M, minlength=len(sums_S))


def sequence_mask(logprobs_M: Tensor, behaviour_M: Tensor, turns_M: Tensor, *, bound: float) -> Tensor:
    """True for the tokens of turns whose geometric mean ratio exp(mean d) lies in [1/bound, bound], d = trainer - sampler.

    Where two arithmetics differ, token weights truncate single outliers; a turn that is off as a whole was drawn from another
    distribution and goes as a whole. d = 0 is never masked. A NaN is: the loss, which multiplies by the mask, stays NaN and is
    refused. Source: geometric sequence rejection, "MIS" in the notes of verl's rollout correction.

    Example: d = ``[ln 2, ln 8, 0]`` of turns ``[0, 0, 1]`` has ratios 4 and 1: with bound 2 the mask is ``[False, False, True]``.
    """
    means_S = turn_means(logprobs_M.detach() - behaviour_M, turns_M)
    return (means_S.abs() <= math.log(bound))[turns_M]


def drift(
    logprobs_M: Tensor, behaviour_M: Tensor, *, cap: float, prefix: str, turns_M: Tensor | None = None
) -> dict[str, float]:
    """How far the trainer's logprobs are from the sampler's, on tokens that the sampler drew; d = trainer - sampler.

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
        f"{prefix}p99.9_abs": float(d.abs().sort().values[min(count - 1, int(count * 0.999))]),
        f"{prefix}over_ln2": float((d.abs() > math.log(2)).double().mean()),
        f"{prefix}truncated": float((weights > cap).double().mean()),
        f"{prefix}ess": effective_share(weights.clamp(max=cap)),
    }
    if turns_M is not None:
        means_S = turn_means(d, torch.unique(turns_M, return_inverse=True)[1])
        found[f"{prefix}log_ppl_abs_diff"] = float(means_S.abs().mean())
    return found
