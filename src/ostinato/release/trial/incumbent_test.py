"""Live against the best release that users ever proved: a test that detects losses too small for any single trial, as they add up.

Each release is compared with the one before it, so a series of losses, each too small for one comparison, would pass. A share of users
therefore stays on the best release, and live, whatever version it is, is compared with them all the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import BaseModel, Field

from ostinato.release.trial.config import DAY
from ostinato.release.trial.contrast import Contrast, Effect, TimeSlot, log_evidence


class StandingConfig(BaseModel, frozen=True, extra="forbid"):
    """The comparison of live with the best release."""

    share: float = Field(default=0.05, gt=0.0, lt=1.0, description="Share of users who stay on the best release.")
    alpha: float = Field(
        default=0.02,
        gt=0.0,
        lt=0.5,
        description="Probability of a false alarm in one period, however often it is checked.",
    )
    period_s: float = Field(default=3 * DAY, gt=0.0, description="Seconds after which the comparison starts over.")
    min_people: float = Field(
        default=20.0, ge=2.0, description="Least number of effective users on each side before anything is decided."
    )
    better_evidence: float = Field(
        default=50.0, gt=1.0, description="Odds against 'no difference' at which live becomes the best release."
    )
    better_after_s: float = Field(
        default=DAY, ge=0.0, description="Seconds of comparison before live may become the best release."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BestComparison:
    """How live compares with the best: `effect` over all versions live since the period began, `gain` of the current live version alone.

    Example: ``BestComparison(effect=Effect(...), gain=Effect(...), worse=False, better=True)``
    """

    effect: Effect
    gain: Effect
    worse: bool
    better: bool


class IncumbentTest:
    """Compares live with the best release; restarts every `period_s`, and whenever the best release changes.

    The losses of successive live versions add up. The current live version becomes the best release on the evidence of its own users only:
    it does not inherit the gains of the version before it.
    """

    def __init__(self, config: StandingConfig, *, most_turns_a_day: float = 20.0) -> None:
        self._config = config
        self._most = most_turns_a_day
        self.restart(-math.inf)

    def restart(self, now: float) -> None:
        """Forget all outcomes: a new period begins, or another version is the best release."""
        self._all, self._since = Contrast(self._most), now
        self.shipped(now)

    def shipped(self, now: float) -> None:
        """Note that another version is live from now on."""
        self._own, self._own_since = Contrast(self._most), now

    def over(self, now: float) -> bool:
        """Return true if a slot that ends at `now` is the first of another period, in which no person is known yet."""
        return now - self._since >= self._config.period_s

    def add(self, slot: TimeSlot, now: float, own: TimeSlot | None = None) -> BestComparison:
        """Add a slot that ended at `now`; its treated side is live. `own`: the slot with only the current live version (default `slot`)."""
        if self.over(now):
            self.restart(now)
        self._all.add(slot)
        self._own.add(slot if own is None else own)
        effect, gain = self._all.effect(), self._own.effect()
        loss = log_evidence(effect.difference, effect.variance, -1)
        won = log_evidence(gain.difference, gain.variance, 1)
        aged = now - self._own_since >= self._config.better_after_s
        return BestComparison(
            effect=effect,
            gain=gain,
            worse=effect.people >= self._config.min_people and loss >= -math.log(self._config.alpha),
            better=gain.people >= self._config.min_people and aged and won >= math.log(self._config.better_evidence),
        )
