"""Is this version harming people? Live beside the control arm, slot by slot, since live was released: pure arithmetic.

Both arms are compared as in a trial (`trial.contrast`): within time slots, clustered by person, less what each person did better than
everybody else in the week before, and by evidence that is valid at every look, so that harm is found as soon as there is enough of it. A
version is harmful if the evidence that it loses more than the tolerance reaches one over its level. The comparison begins anew every
`period_s`, or the first days would hide harm that begins late; period k = 0, 1, ... has ``alpha / ((k+1) (k+2))``, which adds up to alpha.
The measures share that equally.

People's past is not untouched by the arms: where live was better than control before, the difference is measured from there, and a release
that gives the gain back is harmful too. What is found is worse than control, or than the release before it was beside control.
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
    """Follows one release. The measures' outcomes are shares of good turns.

    Args:
        began: when the release went live, in seconds.
    """

    def __init__(self, config: GuardConfig, began: float, *, most_turns_a_day: float = 20.0) -> None:
        self._config, self._began, self._most = config, began, most_turns_a_day
        self.period = 0
        self._contrasts: dict[str, Contrast] = {}
        self._outcomes: dict[str, float] = {}

    def over(self, at: float) -> bool:
        """True if a slot that begins at `at` belongs to another period, in which no person is known yet."""
        return self._period(at) != self.period

    def add(self, measures: Mapping[str, TimeSlot], at: float) -> None:
        """Add a slot that begins at `at`, by measure; its treated side is live."""
        if self.over(at):
            self.period, self._contrasts, self._outcomes = self._period(at), {}, {}
        for name, slot in measures.items():
            self._contrasts.setdefault(name, Contrast(self._most)).add(slot)
            live = float(slot.turns_R[slot.treated_R].sum())
            self._outcomes[name] = self._outcomes.get(name, 0.0) + live

    def effects(self) -> dict[str, Effect]:
        """The effects of the present period so far, by measure."""
        return {name: contrast.effect() for name, contrast in self._contrasts.items()}

    def harm(self) -> Harm | None:
        """The first measure that is worse by more than the tolerance; None if none is."""
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
    """The variance at which a normal quantile of this level is Student's of the effective people: few people's spread is poorly known."""
    from scipy import special  # takes a quarter of a second to import, which runs without control users are spared

    student = -float(special.stdtrit(max(effect.freedom - 1.0, 1.0), level))
    return effect.variance * (student / NormalDist().inv_cdf(1.0 - level)) ** 2
