"""The metrics of one step's batch, and the checks that may refuse it.

Tokens fall into groups that are measured separately, because they call for different remedies:

- `mismatch_`: made under the trainer's own contract by the weights that it has. In exact mode d is 0, to the bit.
- `stale_`: the same contract, other weights: training has moved on since.
- `foreign_`: another contract, whatever the weights; `foreign_same_`: those of them that the trainer's own weights made, so that only
  the arithmetic differs.

`on_policy` is the share of tokens made by the weights that the trainer has, `whole_turns` that of turns weighted as a whole.

Episodes count by weight: a masked turn's share of its episode is removed from the normaliser.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ostinato.core.errors import BadWeights, NoSignal
from ostinato.train.config import TrainConfig
from ostinato.train.losses import Trust, drift, k1, k3, trust, turn_ess
from ostinato.train.microbatch import Microbatch
from ostinato.train.references import distance


def judge(
    work: Sequence[Microbatch], *, loss: float, norm: float, step: int, held: Collection[int], config: TrainConfig
) -> dict[str, float]:
    """Check a batch after its backward pass, and return its metrics. `loss` and `norm` are over all turns, as accumulated.

    `step` is the number of the step about to be taken, `held` the policy numbers whose weights the trainer has.

    Raises BadWeights (not finite) and NoSignal: everything is masked, the policy has moved too far from its samples or its anchor, or the
    gradient is 0.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise BadWeights(
            f"step {step} refused: loss {loss}, gradient norm {norm}. Weights are unchanged. Look for a NaN in the "
            "batch's logprobs or advantages; if there is none, resume from an earlier checkpoint."
        )
    whole = sum(float(item.weights_S.double().sum()) for item in work)
    kept = sum(float(item.weights_S.double()[item.kept_S].sum()) for item in work)
    turns = sum(len(item.weights_S) for item in work)
    if not kept:
        raise NoSignal(
            f"step {step} refused: all {turns} turns lie outside the sequence mask of {config.sequence_mask}: engine and "
            "trainer compute different policies. Compare their numerics contracts (`ostinato status`)."
        )
    turns_M = _numbered(work)
    found = _trusted(work, turns_M, step, config)
    metrics = _anchored(work, step, config)
    if norm == 0.0:
        raise NoSignal(f"step {step} refused: the gradient is exactly 0, as when every advantage is 0")
    share = whole / kept
    metrics |= {
        "loss": loss * share,
        "grad_norm": norm * share,
        "clip_scale": min(1.0, config.clip / (norm * share)),
        "mask_scale": share,
        "masked_turns": float(turns - sum(int(item.kept_S.sum()) for item in work)),
        "masked_share": 1 - kept / whole,
        "ess": found.ess,
        "ess_turns": found.ess_turns,
        "mean_weight": found.mean_weight,
        "drift_k3": found.k3,
        "trust": found.scale,
        # mean surprise of the sampled tokens
        "entropy_proxy": -float(torch.cat([item.logprobs_M for item in work]).mean()),
    }
    return metrics | _groups(work, turns_M, held, config) | _release(work)


def _numbered(work: Sequence[Microbatch]) -> Tensor:
    """Return each token's turn, numbered over the whole batch."""
    numbered: list[Tensor] = []
    first = 0
    for item in work:
        numbered.append(item.turns_M + first)
        first += len(item.weights_S)
    return torch.cat(numbered)


def _trusted(work: Sequence[Microbatch], turns_M: Tensor, step: int, config: TrainConfig) -> Trust:
    keep_M = torch.cat([item.keep_M for item in work])
    d_M = torch.cat([item.logprobs_M - item.behaviour_M for item in work])
    shares_M = torch.cat([item.shares_M for item in work])
    found = trust(
        d_M[keep_M],
        turns_M[keep_M],
        shares_M[keep_M],
        cap=config.importance_cap,
        turn_cap=None if config.turn_ess is None else config.turn_cap,
        horizon=config.ess_horizon,
    )
    bound = config.mean_weight
    reasons = {
        f"ESS/n of the token weights is {found.ess:.3f}, below {config.min_ess}": found.ess < config.min_ess,
        f"ESS/n of the turns is {found.ess_turns:.3f}, below {config.min_ess}": found.ess_turns < config.min_ess,
        f"the mean weight is {found.mean_weight:.3g}, outside [{1 / bound:.3g}, {bound:.3g}]": not (
            1 / bound <= found.mean_weight <= bound
        ),
        f"k3 is {found.k3:.3g} nats per token, above {config.max_k3}": found.k3 > config.max_k3,
    }
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        raise NoSignal(
            f"step {step} refused: the policy has left these samples behind: {'; '.join(wrong)}. Train on fresher turns (release "
            "more often, or lower the staleness limit); if they are fresh, their log-probabilities are not this model's."
        )
    return found


def _anchored(work: Sequence[Microbatch], step: int, config: TrainConfig) -> dict[str, float]:
    tokens = sum(len(item.turns_M) for item in work if item.anchor_M is not None)
    if config.anchor_kl is None or not tokens:
        return {}
    found = distance(work, cap=config.importance_cap)
    if found > config.anchor_limit:
        raise NoSignal(
            f"step {step} refused: the policy is {found:.3g} nats per token from its anchor, beyond train.anchor_limit = "
            f"{config.anchor_limit}. Go back to an earlier release (`ostinato rollback`), or raise the limit if that is wanted."
        )
    return {"anchor_kl": found, "anchor_tokens": float(tokens), "alarm_anchor": float(found > config.anchor_kl)}


def _groups(
    work: Sequence[Microbatch], turns_M: Tensor, held: Collection[int], config: TrainConfig
) -> dict[str, float]:
    now_M = torch.cat([item.logprobs_M for item in work])
    behaviour_M = torch.cat([item.behaviour_M for item in work])
    foreign_M = torch.cat([item.foreign_M for item in work])
    same_M = torch.cat([item.made_by(lambda version: version.number in held) for item in work])
    metrics = {
        "foreign_turns": float(len(torch.unique(turns_M[foreign_M]))),
        "on_policy": float(same_M.double().mean()),
        "whole_turns": float((turn_ess(now_M - behaviour_M, turns_M) >= (config.turn_ess or math.inf)).double().mean()),
    }
    for prefix, group_M in (
        ("mismatch_", same_M & ~foreign_M),
        ("stale_", ~same_M & ~foreign_M),
        ("foreign_", foreign_M),
        ("foreign_same_", foreign_M & same_M),
    ):
        metrics |= drift(
            now_M[group_M], behaviour_M[group_M], cap=config.importance_cap, prefix=prefix, turns_M=turns_M[group_M]
        )
    return metrics


def _release(work: Sequence[Microbatch]) -> dict[str, float]:
    measured = [(item.logprobs_M, item.release_M) for item in work if item.release_M is not None]
    if not measured:
        return {}
    now_M, release_M = (torch.cat(each) for each in zip(*measured, strict=True))
    return {"kl_k1": float(k1(now_M, release_M).mean()), "kl_k3": float(k3(now_M, release_M).mean())}
