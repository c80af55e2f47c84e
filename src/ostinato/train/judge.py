"""What one step's batch says about itself: the metrics of a step, and the reasons to refuse it.

Tokens fall into three groups that are measured apart, because they call for different remedies:

- `mismatch_`: made under the trainer's own contract by the weights that it holds. In exact mode d is 0, to the bit.
- `stale_`: the same contract, other weights: training moved on since.
- `foreign_`: another contract, whatever the weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ostinato.core.errors import BadWeights, NoSignal
from ostinato.train.config import TrainConfig
from ostinato.train.losses import drift, effective_share, k1, k3
from ostinato.train.batch.microbatch import Microbatch


def judge(
    work: Sequence[Microbatch], *, loss: float, norm: float, step: int, held: Collection[int], config: TrainConfig
) -> dict[str, float]:
    """Measure a batch after its backward pass. `loss` and `norm` are over all turns, as accumulated.

    `step` is the number of the step about to be taken, `held` the policy numbers whose weights the trainer holds.

    Raises BadWeights (not finite) and NoSignal (everything masked, ESS/n below `min_ess`, or no gradient at all).
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise BadWeights(
            f"step {step} refused: loss {loss}, gradient norm {norm}. Weights are unchanged. Look for a NaN in the "
            "batch's logprobs or advantages; if there is none, resume from an earlier checkpoint."
        )
    now_M = torch.cat([item.logprobs_M for item in work])
    behaviour_M = torch.cat([item.behaviour_M for item in work])
    keep_M = torch.cat([item.keep_M for item in work])
    turns, kept = sum(int(item.turns_M.max()) + 1 for item in work), sum(item.kept for item in work)
    if not kept:
        raise NoSignal(
            f"step {step} refused: all {turns} turns lie outside the sequence mask of {config.sequence_mask}: engine and "
            "trainer compute different policies. Compare their numerics contracts (`ostinato status`)."
        )
    ess = effective_share((now_M - behaviour_M)[keep_M].exp().clamp(max=config.importance_cap))
    if ess < config.min_ess:
        raise NoSignal(
            f"step {step} refused: ESS/n of the importance weights is {ess:.3f}, below {config.min_ess}: the "
            "policy has left these samples behind. Train on fresher turns (release more often, or lower the staleness limit)."
        )
    if norm == 0.0:
        raise NoSignal(f"step {step} refused: the gradient is exactly 0, as when every advantage is 0")
    share = turns / kept  # masked turns leave the normaliser
    metrics = {
        "loss": loss * share,
        "grad_norm": norm * share,
        "clip_scale": min(1.0, config.clip / (norm * share)),
        "mask_scale": share,
        "masked_turns": float(turns - kept),
        "masked_share": float((~keep_M).double().mean()),
        "ess": ess,
        "entropy_proxy": float(-now_M.mean()),  # mean surprise of the sampled tokens
    }
    metrics |= _groups(work, now_M, behaviour_M, held, config)
    reference = [item.reference_M for item in work if item.reference_M is not None]
    if reference:
        reference_M = torch.cat(reference)
        metrics["kl_k1"] = float(k1(now_M, reference_M).mean())
        metrics["kl_k3"] = float(k3(now_M, reference_M).mean())
    return metrics


def _groups(
    work: Sequence[Microbatch], now_M: Tensor, behaviour_M: Tensor, held: Collection[int], config: TrainConfig
) -> dict[str, float]:
    foreign_M = torch.cat([item.foreign_M for item in work])
    same_M = torch.cat([_same(item, held) for item in work])
    turns: list[Tensor] = []
    first = 0
    for item in work:
        turns.append(item.turns_M + first)
        first += int(item.turns_M.max()) + 1
    turns_M = torch.cat(turns)
    metrics = {"foreign_turns": float(len(torch.unique(turns_M[foreign_M])))}
    for prefix, group_M in (
        ("mismatch_", same_M & ~foreign_M),
        ("stale_", ~same_M & ~foreign_M),
        ("foreign_", foreign_M),
    ):
        metrics |= drift(
            now_M[group_M], behaviour_M[group_M], cap=config.importance_cap, prefix=prefix, turns_M=turns_M[group_M]
        )
    return metrics


def _same(item: Microbatch, held: Collection[int]) -> Tensor:
    """Tokens made by the weights that are held, as all of their turn before them: after a swap a stream may read older keys."""
    held_M = torch.tensor([version.number in held for version in item.versions_M])
    others_M = (~held_M).long().cumsum(0)
    first_M = torch.searchsorted(item.turns_M, item.turns_M)  # each token's turn's first token
    before_M = others_M[first_M] - (~held_M[first_M]).long()
    return others_M == before_M
