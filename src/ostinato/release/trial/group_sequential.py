"""The test that lets a candidate go live: group-sequential non-inferiority by alpha spending (Lan and DeMets, Biometrika 70, 1983).

Harm must be detectable at any time; the confidence sequence of `trial.contrast` does that. Going live has a natural end: the information at
which a candidate as good as live passes nine times in ten, and the trial's time limit. A test with a limited number of looks until then
needs about a quarter fewer users than the confidence sequence, and has spent all of alpha at its end.

Alpha, the probability of shipping a candidate that loses the whole margin, is spent by the information fraction t, which is 1 / variance
over the planned information. Nine tenths are spent by t = 1, with the function of Hwang, Shih and DeCani at gamma = -2 (Statistics in
Medicine 9, 1990), and the rest beyond, ``alpha (1 - 0.1 / t)``, so that neither a wrong plan nor a long trial exceeds alpha. The look at
the time limit spends what is left. Each boundary comes from recursive numerical integration over the looks really taken (Armitage,
McPherson and Rowe, JRSS A 132, 1969), and is converted from a normal quantile to Student's t quantile of the effective users. The bound at
a look is a repeated confidence bound (Jennison and Turnbull, JRSS B 51, 1989): with probability at most alpha, any of the bounds of all
looks exceeds the truth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.release.trial.contrast import Effect

LOOKS = 24
"""The number of looks until the planned information. Beyond it, each look waits for 1 / LOOKS more information than the one before."""
_SPENT_AS_PLANNED = 0.9
_LEAST_GROWTH = 0.01
"""Relative growth of the information below which the look at the time limit is left out, as it would add nothing."""
_GRID_POINTS = 401
_GRID_DEVIATIONS = 8.0  # the integration grid starts this many standard deviations below 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipPlan:
    """The plan of a trial's looks, fixed before the first one. `information` is 1 / variance by goal, `limit_s` in seconds after the start.

    Example: ``ShipPlan(information={"acceptance": 21_400.0}, alpha=0.05, limit_s=345_600.0, looks=24)``
    """

    information: Mapping[str, float]
    alpha: float
    limit_s: float
    looks: int = LOOKS

    @classmethod
    def read(cls, stored: object) -> ShipPlan | None:
        """Parse the plan in a line of the ledger; None if there is none, or it is not of this form."""
        try:
            found: Any = stored
            information = {str(goal): float(planned) for goal, planned in found["information"].items()}
            numbers = [float(found["alpha"]), float(found["limit_s"]), int(found["looks"]), *information.values()]
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
            return None
        if not all(math.isfinite(each) and each > 0.0 for each in numbers) or numbers[0] >= 0.5:
            return None
        return cls(information=information, alpha=numbers[0], limit_s=numbers[1], looks=int(numbers[2]))


def spent_alpha(fraction: float, alpha: float) -> float:
    """Return the alpha spent by this information fraction. Example: ``spent_alpha(1.0, 0.05)`` is 0.045."""
    if fraction <= 1.0:
        return _SPENT_AS_PLANNED * alpha * math.expm1(2.0 * fraction) / math.expm1(2.0)
    return alpha * (1.0 - (1.0 - _SPENT_AS_PLANNED) / fraction)


class Boundary:
    """Exact critical values of successive looks, by recursive integration of a Brownian motion that has not crossed an earlier one."""

    def __init__(self) -> None:
        self._fraction = 0.0
        self._scores_G, self._mass_G = np.zeros(1), np.ones(1)

    def next(self, fraction: float, alpha: float) -> float:
        """Return the z-value first crossed at this fraction with probability `alpha`. Fractions must rise by at least a hundredth."""
        from scipy import special  # a slow import (a quarter of a second), needed only by trials

        root, spread = math.sqrt(fraction), math.sqrt(fraction - self._fraction)
        low, high = -_GRID_DEVIATIONS, _GRID_DEVIATIONS
        for _ in range(60):
            middle = (low + high) / 2.0
            crossed = float(self._mass_G @ special.ndtr((self._scores_G - middle * root) / spread))
            low, high = (middle, high) if crossed > alpha else (low, middle)
        scores_G = np.linspace(-_GRID_DEVIATIONS * root, high * root, _GRID_POINTS)
        kernel_GG = np.exp(-0.5 * ((scores_G[:, None] - self._scores_G) / spread) ** 2)
        widths_G = np.full(_GRID_POINTS, (scores_G[1] - scores_G[0]) / (spread * math.sqrt(2.0 * math.pi)))
        widths_G[[0, -1]] /= 2.0
        self._scores_G, self._mass_G, self._fraction = scores_G, widths_G * (kernel_GG @ self._mass_G), fraction
        return high


class GroupSequentialTest:
    """The looks at one goal. Each has more information than the one before, so the same outcomes are never looked at twice.

    The state follows from the slots alone: a restarted worker that reads them again takes the same looks.

    Args:
        planned: the information that the plan expects of this goal.
    """

    def __init__(self, planned: float, plan: ShipPlan) -> None:
        self._planned, self._plan = planned, plan
        self._boundary = Boundary()
        self._spent, self._over = 0.0, False
        self.fraction = 0.0
        """The information fraction of the last look."""
        self.looks = 0
        """The number of looks taken."""
        self.lower = -math.inf
        """The repeated confidence bound of the last look, in the unit of the difference; -inf before the first."""

    def add(self, effect: Effect, elapsed_s: float) -> None:
        """Take a look at the outcomes of the first `elapsed_s` seconds, if one is due. In `effect`, more is better."""
        if self._over or not 0.0 < effect.variance < math.inf:
            return
        self._over = elapsed_s >= self._plan.limit_s
        fraction = 1.0 / (effect.variance * self._planned)
        step = _LEAST_GROWTH * self.fraction if self._over else max(1.0, self.fraction) / self._plan.looks
        if fraction <= self.fraction + step:
            return
        spent = self._plan.alpha if self._over else spent_alpha(fraction, self._plan.alpha)
        critical = self._boundary.next(fraction, spent - self._spent)
        self.fraction, self._spent = fraction, spent
        self.lower = effect.difference - _student(critical, effect.freedom) * math.sqrt(effect.variance)
        self.looks += 1


def _student(z: float, freedom: float) -> float:
    """Return Student's t quantile at the level of the normal quantile z (Jennison and Turnbull, 1999, section 4.4)."""
    from scipy import special

    return -float(special.stdtrit(freedom, special.ndtr(-z)))
