"""Reference policies that learning is kept near: the last release by a KL penalty, the anchor by a bound on the KL.

Data flow: micro-batches -> `fill_references`, before the step's own passes -> each token's log-probability under the release, and under the
anchor for a part of the tokens (for all, while the policy is further from it than allowed) -> the loss's penalties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.core.records import PolicyVersion
from ostinato.core.weights import Weights
from ostinato.train.config import TrainConfig
from ostinato.train.losses import Penalty, k3
from ostinato.train.masters import MasterWeights
from ostinato.train.microbatch import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The policies that a step is kept near, and the source of their weights.

    `release`: the last release that users got. `anchor`: the first release, which never changes: many small steps, each near the
    previous release, can lead far away from it. `fetch` is called when a policy's weights are needed for some token; it may block.

    Example: ``References(release=v17, anchor=v0, fetch=lambda policy: stored[policy])``
    """

    release: PolicyVersion | None = None
    anchor: PolicyVersion | None = None
    fetch: Callable[[PolicyVersion], Weights]


ReferenceLogprobs = Callable[[PolicyVersion, Sequence[Microbatch]], list[Tensor]]
"""(policy, micro-batches) -> the log-probabilities [M] of their tokens under the policy."""


def reference_logprobs(
    fetch: Callable[[PolicyVersion], Weights],
    masters: MasterWeights,
    forward: Callable[[Sequence[Microbatch]], list[Tensor]],
) -> ReferenceLogprobs:
    """Return a function for log-probabilities under other weights, which are in the compute model only during the call.

    A token that the policy sampled under the trainer's own numerics contract keeps its recorded log-probability; the weights are fetched
    only for other tokens, and only if there are any. Recorded values of another contract are not used, nor those of tokens after a weight
    swap, which attended to keys of older weights.
    """

    def under(policy: PolicyVersion, items: Sequence[Microbatch]) -> list[Tensor]:
        own = [item.made_by(lambda version: version.hash == policy.hash) & ~item.foreign_M for item in items]
        if all(bool(own_M.all()) for own_M in own):
            return [item.behaviour_M for item in items]
        masters.put(fetch(policy))
        try:
            asked = [number for number, own_M in enumerate(own) if not bool(own_M.all())]
            found = dict(zip(asked, forward([items[number] for number in asked]), strict=True))
            return [
                torch.where(own_M, item.behaviour_M, found[number]) if number in found else item.behaviour_M
                for number, (item, own_M) in enumerate(zip(items, own, strict=True))
            ]
        finally:
            masters.round_into_model()

    return under


def fill_references(
    work: Sequence[Microbatch], references: References, under: ReferenceLogprobs, *, step: int, config: TrainConfig
) -> float:
    """Fill in `release_M` and `anchor_M`; returns the anchor's beta, 0 within `train.anchor_kl`.

    Beyond the bound, beta is the slope of beta / (2 kl) max(0, KL - kl)^2: it starts gently and grows with the excess. Whether
    the policy is beyond it is determined from the sampler's log-probabilities, on the tokens that this step examines: before the
    step's own passes nothing newer is known, and the sampler is at most a few steps behind.
    """
    if references.release is not None and config.kl_beta:
        for item, found_M in zip(work, under(references.release, work), strict=True):
            item.release_M = found_M
    if references.anchor is None or config.anchor_kl is None:
        return 0.0
    if references.anchor == references.release and config.kl_beta:
        looked_at: Sequence[Microbatch] = work
        for item in work:
            item.anchor_M = item.release_M
    else:
        looked_at = _rotating_subset(work, step, config.anchor_tokens)
        _fill_anchor(references.anchor, looked_at, under)
    beta = config.anchor_beta * max(0.0, distance(looked_at, captured=True) / config.anchor_kl - 1)
    if beta:
        _fill_anchor(references.anchor, [item for item in work if item.anchor_M is None], under)
    return beta


def _fill_anchor(anchor: PolicyVersion, items: Sequence[Microbatch], under: ReferenceLogprobs) -> None:
    for item, found_M in zip(items, under(anchor, items), strict=True):
        item.anchor_M = found_M


def _rotating_subset(work: Sequence[Microbatch], step: int, tokens: int) -> list[Microbatch]:
    """Return micro-batches with at least `tokens` sampled tokens, or all; each step starts one further on, so that all get their turn."""
    chosen: list[Microbatch] = []
    for number in range(len(work)):
        if sum(len(item.turns_M) for item in chosen) >= tokens:
            break
        chosen.append(work[(step + number) % len(work)])
    return chosen


def distance(items: Sequence[Microbatch], *, captured: bool = False, cap: float = 1.0) -> float:
    """Return KL(policy || anchor) in nats per token, over the micro-batches whose `anchor_M` is known; 0 if there are none.

    The policy is the trainer's, with importance weights up to `cap`; or, if `captured`, the policy that sampled the tokens.
    """
    total = count = 0.0
    for item in items:
        if item.anchor_M is None:
            continue
        policy_M = item.behaviour_M if captured else item.logprobs_M
        weights_M = (policy_M - item.behaviour_M).exp().clamp(max=cap).double() * item.shares_M
        total += float((weights_M * k3(policy_M.double(), item.anchor_M.double())).sum())
        count += float(weights_M.sum())
    return total / count if count else 0.0


def penalties(item: Microbatch, *, anchor_beta: float, config: TrainConfig) -> list[Penalty]:
    """Return the penalties in a micro-batch's loss."""
    found: list[Penalty] = []
    if item.release_M is not None:
        found.append((item.release_M, config.kl_beta))
    if item.anchor_M is not None and anchor_beta:
        found.append((item.anchor_M, anchor_beta))
    return found
