"""Response propensity: the probability that an answer gets a reward at all, used as an inverse weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ostinato.core.records import Quarantine, Reward

MEMORY = 2000.0  # time constant of a tenant's counts, in turns
SHRINKAGE = 20.0  # pseudo-count of turns at the tenant's mean share, added to each length

_Counts = dict[int, tuple[float, float]]


class ResponsePropensity:
    """The share of a tenant's turns that were rewarded rather than silent (`no_reward:silence`), by the length of the answer. Turns that
    may not be learned from (side calls, the control arm, without consent, gold) are excluded.

    A turn without a reward teaches nothing. If one kind of answer is always rewarded and another with probability h, the remaining gradient
    is sum pi h (r - b) grad log pi: the baseline no longer cancels, and where it is above the rewards the policy is pushed towards the
    answers without rewards. So rewarded turns are weighted by 1 / h (Horvitz and Thompson, 1952). Silent ones count as if their reward were
    the baseline, so the sum is the augmented estimator (AIPW; Robins, Rotnitzky and Zhao, 1994) with the baseline as its outcome model.
    It is unbiased if, among answers of one length to one tenant, silence does not depend on the reward that it hides. Otherwise it is
    biased: nothing is known about those who keep silent because they are displeased.

    The length stands for the action, in powers of two, so that an answer that suggests nothing differs from one that suggests something.
    Weights are relative to the tenant's mean share, so a tenant's turns keep their mean weight, and nobody gains weight by keeping
    silent. Each is at most `most` times, and at least 1 / `most` of, the tenant's mean weight, which biases towards the unweighted sum.

    Args:
        most: bound on weights; 1: all are 1.

    Example: suggestions are rewarded in 7 of 10, refusals always: ``propensity.weight("acme", 40) / propensity.weight("acme", 1)`` is 1.43.
    """

    def __init__(self, most: float) -> None:
        self._max_weight = most
        self._tenants: dict[str, _Counts] = {}  # by tenant and length: turns, and rewarded turns

    def see(self, tenant: str, tokens: int, row: Reward | Quarantine) -> None:
        """Count a trainable turn of that many sampled tokens, by the row that decided it. Failures of the reward function do not count."""
        if isinstance(row, Quarantine) and not row.reason.startswith("no_reward:"):
            return
        kept = 1.0 - 1.0 / MEMORY
        counts = {each: (kept * turns, kept * heard) for each, (turns, heard) in self._tenants.get(tenant, {}).items()}
        turns, heard = counts.get(tokens.bit_length(), (0.0, 0.0))
        counts[tokens.bit_length()] = (turns + 1.0, heard + isinstance(row, Reward))
        self._tenants[tenant] = counts

    def weight(self, tenant: str, tokens: int) -> float:
        """Return the weight of a rewarded turn; 1 for an unknown tenant."""
        counts = self._tenants.get(tenant, {})
        usual = sum(heard for _, heard in counts.values()) / (sum(turns for turns, _ in counts.values()) or 1.0)
        turns, heard = counts.get(tokens.bit_length(), (0.0, 0.0))
        if not usual or math.isclose(heard, turns * usual):
            return 1.0
        here = (heard + SHRINKAGE * usual) / (turns + SHRINKAGE)
        return min(self._max_weight, max(1.0 / self._max_weight, usual / here))

    def snapshot(self) -> dict[str, list[list[float]]]:
        """Return by tenant the rows [length, turns, rewarded]."""
        return {tenant: [[each, *pair] for each, pair in counts.items()] for tenant, counts in self._tenants.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a `snapshot`."""
        self._tenants = {
            str(tenant): {int(each): (float(turns), float(heard)) for each, turns, heard in rows}
            for tenant, rows in state.items()
        }
