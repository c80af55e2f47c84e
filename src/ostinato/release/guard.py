"""The guard: a test whether the live version harms people, compared with the control arm, slot by slot, since its release. Pure arithmetic.

Both arms are compared as in a trial (`trial.contrast`): within time slots, clustered by person, adjusted for how much better each person
did than everybody else in the week before (CUPED), and with evidence that is valid at every look, so that harm is found as soon as there
is enough evidence. A version is harmful once the evidence that it loses more than the tolerance reaches 1 / level. The comparison restarts
every `period_s`, as harmless first days would otherwise hide harm that begins late. Period k = 0, 1, ... has the level
``alpha / ((k+1) (k+2))``, which adds up to alpha. The measures share that level equally.

A person's past depends on the arm: if live was better than control before, the difference is measured from there, so a release that gives
the gain back counts as harmful too. A harmful version is thus worse than control, or than the previous release relative to control.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from pydantic import BaseModel, Field

from ostinato.release.trial.config import DAY
from ostinato.release.trial.contrast import Contrast, Effect, TimeSlot, log_evidence, upper_bound


class GuardConfig(BaseModel, frozen=True, extra="forbid"):
    """When a version that serves users is rolled back automatically."""

    enabled: bool = Field(
        default=True,
        description="Compare live with control, and roll back automatically. False: this comparison rolls nothing back; trials and "
        "the best arm, where they are on, still do.",
    )
    alpha: float = Field(
        default=0.02,
        gt=0.0,
        lt=0.5,
        description="Probability, per release, of rolling back an equally good version, over all looks. It is shared equally by what is "
        "compared: acceptance, success and return.",
    )
    tolerance: float = Field(
        default=0.02,
        ge=0.0,
        lt=1.0,
        description="Tolerated loss in the share of accepted turns, in that of answers without an engine error, and in that of users who "
        "come back the next day.",
    )
    min_outcomes: int = Field(
        default=60, ge=2, description="Least number of outcomes of the watched version before anything is decided."
    )
    min_users: int = Field(
        default=5, ge=2, description="Least number of effective users on each side before anything is decided."
    )
    period_s: float = Field(default=3 * DAY, gt=0.0, description="Seconds after which the comparison starts over.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """A significant loss. Example: ``Harm(measure="acceptance", loss=0.21, at_least=0.08, period=0)``"""

    measure: str
    loss: float
    at_least: float
    period: int

    def __str__(self) -> str:
        return f"{self.measure} worse by {100 * self.loss:.1f} pp, at least {100 * self.at_least:.1f} pp, at any look"


class GuardTest:
    """The sequential test of one release. Outcomes of each measure are shares of good turns.

    Args:
        began: when the release went live, in seconds.
    """

    def __init__(self, config: GuardConfig, began: float, *, most_turns_a_day: float = 20.0) -> None:
        self._config, self._began, self._most = config, began, most_turns_a_day
        self.period = 0
        self._contrasts: dict[str, Contrast] = {}
        self._outcomes: dict[str, float] = {}

    def over(self, at: float) -> bool:
        """Return true if a slot that begins at `at` belongs to another period, in which no person is known yet."""
        return self._period(at) != self.period

    def add(self, measures: Mapping[str, TimeSlot], at: float) -> None:
        """Add a slot that begins at `at`, by measure. Its treated side is live."""
        if self.over(at):
            self.period, self._contrasts, self._outcomes = self._period(at), {}, {}
        for name, slot in measures.items():
            self._contrasts.setdefault(name, Contrast(self._most)).add(slot)
            live = float(slot.turns_R[slot.treated_R].sum())
            self._outcomes[name] = self._outcomes.get(name, 0.0) + live

    def effects(self) -> dict[str, Effect]:
        """Return the effects of the current period so far, by measure."""
        return {name: contrast.effect() for name, contrast in self._contrasts.items()}

    def harm(self) -> Harm | None:
        """Return the harm in the first measure that is worse by more than the tolerance; None if there is none."""
        level = self._config.alpha / len(self._contrasts) if self._contrasts else 0.0
        level /= (self.period + 1) * (self.period + 2)
        for name, effect in self.effects().items():
            if self._outcomes[name] < self._config.min_outcomes or effect.people < self._config.min_users:
                continue
            variance = _widened(effect, level)
            if log_evidence(effect.difference + self._config.tolerance, variance, -1) >= -math.log(level):
                at_least = -upper_bound(effect.difference, variance, level)
                return Harm(measure=name, loss=-effect.difference, at_least=at_least, period=self.period)
        return None

    def _period(self, at: float) -> int:
        return max(0, math.floor((at - self._began) / self._config.period_s))


def _widened(effect: Effect, level: float) -> float:
    """Scale the variance so that its normal quantile at this level is Student's t quantile, as few people give a poor variance estimate."""
    from scipy import special  # a slow import (a quarter of a second), needed only by runs with control users

    student = -float(special.stdtrit(max(effect.freedom - 1.0, 1.0), level))
    return effect.variance * (student / NormalDist().inv_cdf(1.0 - level)) ** 2
