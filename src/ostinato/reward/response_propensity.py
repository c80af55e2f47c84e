"""Response propensity: how likely an answer is to get a reward at all, and the inverse as a weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ostinato.core.records import Quarantine, Reward

MEMORY = 2000.0  # turns of a tenant
SHRINKAGE = 20.0  # turns at the tenant's own share that each length is mixed with

_Counts = dict[int, tuple[float, float]]


class ResponsePropensity:
    """The share of a tenant's turns that were rewarded and not silent (`no_reward:silence`), by the length of the answer. Turns that
    may not be learned from (side calls, the control arm, without consent, gold) are not among them.

    A turn without a reward teaches nothing. If one kind of answer is rewarded always and another in a share h, the gradient that is left is
    sum pi h (r - b) grad log pi: the baseline no longer cancels, and where it is above the rewards the policy is pushed towards what is
    missing. Rewarded turns are therefore weighted by 1 / h (Horvitz and Thompson, 1952). Silent ones count as if their reward were the
    baseline, so that the sum is the augmented estimate (AIPW; Robins, Rotnitzky and Zhao, 1994) with the baseline as its model of outcomes:
    unbiased if among answers of one length, to one tenant, silence does not depend on the reward that it hides. It is biased otherwise: of
    those who keep silent because they are displeased nothing is known.

    The length is what is seen of the action: by powers of two, so that an answer that suggests nothing differs from one that suggests.
    Weights are relative to the tenant's own share, so a tenant's turns weigh on average what they did, and nobody gains weight by keeping
    silent; each is at most `most` times another's mean, or 1 / `most` of it, which biases towards the unweighted sum.

    Args:
        most: bound on weights; 1: all are 1.

    Example: suggestions are rewarded in 7 of 10, refusals always: ``propensity.weight("acme", 40) / propensity.weight("acme", 1)`` is 1.43.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._tenants: dict[str, _Counts] = {}  # by length: turns, and of these the rewarded ones

    def see(self, tenant: str, tokens: int, row: Reward | Quarantine) -> None:
        """Count a turn that may be learned from, of that many sampled tokens, by the row that decided it. Rewards that failed say nothing
        of it.
        """
        if isinstance(row, Quarantine) and not row.reason.startswith("no_reward:"):
            return
        kept = 1.0 - 1.0 / MEMORY
        counts = {each: (kept * turns, kept * heard) for each, (turns, heard) in self._tenants.get(tenant, {}).items()}
        turns, heard = counts.get(tokens.bit_length(), (0.0, 0.0))
        counts[tokens.bit_length()] = (turns + 1.0, heard + isinstance(row, Reward))
        self._tenants[tenant] = counts

    def weight(self, tenant: str, tokens: int) -> float:
        """The weight of a rewarded turn; 1 for a tenant of which nothing is known."""
        counts = self._tenants.get(tenant, {})
        usual = sum(heard for _, heard in counts.values()) / (sum(turns for turns, _ in counts.values()) or 1.0)
        turns, heard = counts.get(tokens.bit_length(), (0.0, 0.0))
        if not usual or math.isclose(heard, turns * usual):
            return 1.0
        here = (heard + SHRINKAGE * usual) / (turns + SHRINKAGE)
        return min(self._most, max(1.0 / self._most, usual / here))

    def snapshot(self) -> dict[str, list[list[float]]]:
        """By tenant the rows [length, turns, rewarded]."""
        return {tenant: [[each, *pair] for each, pair in counts.items()] for tenant, counts in self._tenants.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`."""
        self._tenants = {
            str(tenant): {int(each): (float(turns), float(heard)) for each, turns, heard in rows}
            for tenant, rows in state.items()
        }
