"""Looks at people's outcomes when the guard says that a look is due: canary against live, live against before and control."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ostinato.core.records import Arm, PolicyVersion
from ostinato.release.guard import Compare, GuardConfig, Harm, Tally, judge, look_at, total
from ostinato.release.ledger import State
from ostinato.release.outcomes import Outcomes

Pair = tuple[Tally, Callable[[], Tally]]
"""What is watched, and what it is compared with: counted only when a look is due, which is seldom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a canary stands: outcomes so far, and harm if a look found it. Example: ``Trial(outcomes=120, harm=None)``"""

    outcomes: int
    harm: Harm | None


class Watch:
    """Makes each look once per release; a restarted process may repeat its last one."""

    def __init__(self, outcomes: Outcomes, config: GuardConfig, compare: Compare) -> None:
        self._outcomes = outcomes
        self._config = config
        self._compare = compare
        self._looked: dict[tuple[str, float, str], int] = {}

    async def canary(self, candidate: PolicyVersion, live: PolicyVersion, since: float, now: float) -> Trial:
        """Canary arm against live arm over the same time: acceptance and engine errors, half of alpha each."""
        await self._outcomes.refresh()
        accepted = self._outcomes.acceptance(Arm.CANARY, candidate, since, now)
        pairs: dict[str, Pair] = {
            "canary acceptance": (accepted, lambda: self._outcomes.acceptance(Arm.LIVE, live, since, now)),
            "canary success rate": (
                self._outcomes.success(Arm.CANARY, candidate, since, now),
                lambda: self._outcomes.success(Arm.LIVE, live, since, now),
            ),
        }
        return Trial(outcomes=total(accepted), harm=self._look(candidate, since, pairs))

    async def live(self, state: State, control: PolicyVersion | None, now: float) -> Harm | None:
        """Live since it shipped, against the previous release before that and against the control arm since then."""
        live, previous = state.live, state.previous
        if not self._config.enabled or live is None or previous is None:
            return None
        await self._outcomes.refresh()
        since = state.shipped_at
        accepted = self._outcomes.acceptance(Arm.LIVE, live, since, now)
        pairs: dict[str, Pair] = {
            "acceptance against the previous release": (
                accepted,
                lambda: self._outcomes.acceptance(Arm.LIVE, previous, -math.inf, since),
            ),
            "success rate against the previous release": (
                self._outcomes.success(Arm.LIVE, live, since, now),
                lambda: self._outcomes.success(Arm.LIVE, previous, -math.inf, since),
            ),
        }
        if control is not None and control.hash != live.hash:
            pairs["acceptance against the control arm"] = (
                accepted,
                lambda: self._outcomes.acceptance(Arm.CONTROL, control, since, now),
            )
        return self._look(live, since, pairs)

    def _look(self, policy: PolicyVersion, since: float, pairs: Mapping[str, Pair]) -> Harm | None:
        """The measures share alpha equally."""
        config = self._config.model_copy(update={"alpha": self._config.alpha / len(pairs)})
        for measure, (watched, baseline) in pairs.items():
            look, key = look_at(total(watched), config), (policy.hash, since, measure)
            if look is None or look <= self._looked.get(key, -1):
                continue
            self._looked[key] = look
            if harm := judge(measure, watched, baseline(), look, config, self._compare):
                return harm
        return None
