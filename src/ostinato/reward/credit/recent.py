"""How much of what the last steps learned came from each person, and how much of the next batch may. Pure.

A cap on one batch does not bound what somebody teaches who stands just below it in batch after batch: of a thousand people, ten at fifty
times the others' traffic are a third of every batch. Over many batches a person may have an equal share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.records import Person
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit.caps import capped

_FORGOTTEN = 1e-6  # a share that is not remembered any more


class RecentShares:
    """Exponentially weighted shares of the last `memory` steps by person; plain means until there were so many. With a
    memory of 0 nothing is remembered and everything allowed.

    An equal share is 1 / n with n the effective number of people, ``(sum s)^2 / sum s^2``: names that somebody invents hold too little
    each to change it, while a mere count would let them shrink everybody else's.

    Example: ``recent.observe({("t", "ann"): 3.0, ("t", "bob"): 1.0})``
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._steps = 0
        self._shares: dict[Person, float] = {}
        self._level = math.inf

    @property
    def level(self) -> float:
        """The share that a person may have over many steps, an equal one; infinite before the first step."""
        return self._level

    def share(self, person: Person) -> float:
        """What a person had of the last steps."""
        return self._shares.get(person, 0.0)

    def observe(self, masses: Mapping[Person, float]) -> None:
        """Take in a step: how much of it was each person's after the cuts, in any unit."""
        total = math.fsum(masses.values())
        if total <= 0.0 or not self._memory:
            return
        self._steps = min(self._steps + 1, self._memory)
        part = 1.0 / self._steps
        kept = {person: (1.0 - part) * share for person, share in self._shares.items()}
        for person, mass in masses.items():
            kept[person] = kept.get(person, 0.0) + part * mass / total
        self._shares = {person: share for person, share in kept.items() if share >= _FORGOTTEN}
        self._weigh()

    def allowed(self, person: Person) -> float:
        """The share of the next batch that brings them to the level and no further; the level itself if they are beyond."""
        if not self._steps:
            return math.inf
        steps = min(self._steps + 1, self._memory)  # the weight that `observe` will give to the next one
        kept = (1.0 - 1.0 / steps) * self.share(person)
        return max(self._level, (self._level - kept) * steps)

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        return {"steps": self._steps, "shares": [[*person, share] for person, share in self._shares.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`."""
        self._steps = int(state["steps"])
        self._shares = {(str(tenant), str(user)): float(share) for tenant, user, share in state["shares"]}
        self._weigh()

    def _weigh(self) -> None:
        squares = math.fsum(share * share for share in self._shares.values())
        whole = math.fsum(self._shares.values())
        self._level = squares / whole**2 if whole else math.inf


def masses_of(turns: Sequence[tuple[Person, str]]) -> dict[Person, float]:
    """By person, the weight of what a batch has of them: 1 for an episode, which its turns share. Given are each turn's person and episode.

    Example: ``masses_of([(ann, "e1"), (ann, "e1"), (ann, "e2"), (bob, "e3")]) == {ann: 2.0, bob: 1.0}``
    """
    sizes = Counter((person[0], episode) for person, episode in turns)
    masses: dict[Person, float] = {}
    for person, episode in turns:
        masses[person] = masses.get(person, 0.0) + 1.0 / sizes[person[0], episode]
    return masses


def scales_of(masses: Mapping[Person, float], recent: RecentShares, config: RewardConfig) -> dict[Person, float]:
    """The factor in (0, 1] by which each person's part of a batch is cut: to what they may have after the last steps, then by the caps."""
    total = math.fsum(masses.values())
    kept = {person: min(mass, recent.allowed(person) * total) for person, mass in masses.items()}
    scales = capped(kept, user_cap=config.user_cap, tenant_cap=config.tenant_cap)
    return {person: scale * kept[person] / masses[person] for person, scale in scales.items()}
