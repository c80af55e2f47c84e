"""One arm minus another over the same hours: a difference of means over turns, with a variance that is clustered by person.

Three things make it several times as informative as two pooled shares (`benchmarks.release.path` measures it):

- A person's expected outcome, from the week before the trial, is subtracted first; it varies far more than versions do.
- Arms are compared within each time slot, so neither the hour of the day nor a ramp that moves people between arms biases it.
- A person's turns beyond a daily limit do not count, so that one busy program does not make up an arm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-18
_EXACT = 1e-12
_LEAST = 1e-9  # turns, or units of a metric's denominator, below which a side counts as empty

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSlot:
    """The outcomes of two arms' people in one time slot; R rows, at most one per person and arm.

    `people_R` are small integers that stand for people; `turns_R` their numbers of turns with an outcome, `units_R` the metric's
    denominator summed over those (None: each turn is one), `good_R` the sum of the outcomes (at most 1 a unit), `expected_R` the outcome
    that was expected of one unit before the trial began, `treated_R` the arm. `day` is any number that changes at midnight.

    Example::

        TimeSlot(day=20780, people_R=np.array([0, 7]), turns_R=np.array([2.0, 1.0]), good_R=np.array([1.0, 1.0]),
             expected_R=np.array([0.6, 0.7]), treated_R=np.array([True, False]))
    """

    day: int
    people_R: Indices
    turns_R: Floats
    good_R: Floats
    expected_R: Floats
    treated_R: NDArray[np.bool_]
    units_R: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Treated minus comparator. `variance` is infinite until both sides have people; `people` is the smaller side's effective number of
    people, `freedom` the effective number behind the whole variance: a side that hardly adds to it need not have many people (Welch and
    Satterthwaite).

    Example: ``Effect(difference=-0.021, variance=1.1e-4, people=61.0, freedom=88.2, turns=1204)``
    """

    difference: float
    variance: float
    people: float
    freedom: float
    turns: float


NOTHING = Effect(difference=0.0, variance=float("inf"), people=0.0, freedom=0.0, turns=0.0)
"""The effect before there is any outcome."""


class Contrast:
    """Adds up slots. With n the units, residuals r = good - n x expected and slot weights w_j = n_T n_C / (n_T + n_C):

    ``D = sum_j w_j (mean r_Tj - mean r_Cj) / sum_j w_j``, and its variance is the sum over people of their own influence squared,
    ``psi_u = sum_j +-w_j (r_uj - n_uj mean r_j) / n_arm,j``: a person who comes back is one person (the delta method for a ratio of
    sums, clustered by person; Deng et al., arXiv 1803.06336). Each side is corrected by k / (k - 1) for its k effective people,
    ``k = (sum psi^2)^2 / sum psi^4``. A side whose people all said the same has no spread of its own: it gets that of Agresti and Caffo
    (The American Statistician 54, 2000), with one more good and one more bad person.

    Args:
        most_turns_a_day: turns of one person and day that count; a slot that goes beyond is scaled down in proportion.
    """

    def __init__(self, most_turns_a_day: float = 20.0) -> None:
        self._most = most_turns_a_day
        self._influence_U: Floats = np.zeros(0)
        self._today_U: Floats = np.zeros(0)
        self._treated_U: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._came_U: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._day: int | None = None
        self._weighted = self._weight = 0.0
        self._turns = [0.0, 0.0]
        self._units = [0.0, 0.0]
        self._good = [0.0, 0.0]

    def add(self, slot: TimeSlot) -> None:
        """Add a slot, of any length. A slot with people in only one arm tells nothing about a difference and is not used for it."""
        if not len(slot.people_R):
            return
        self._grow(int(slot.people_R.max()) + 1)
        turns_R, units_R, good_R = self._capped(slot)
        left_R = good_R - units_R * slot.expected_R
        sides = [slot.treated_R, ~slot.treated_R]
        counts = [float(units_R[side].sum()) for side in sides]
        for index, side in enumerate(sides):
            self._turns[index] += float(turns_R[side].sum())
            self._units[index] += counts[index]
            self._good[index] += float(good_R[side].sum())
        if min(counts) <= _LEAST:
            return
        self._came_U[slot.people_R] = True
        weight = counts[0] * counts[1] / (counts[0] + counts[1])
        means = [float(left_R[side].sum()) / count for side, count in zip(sides, counts, strict=True)]
        self._weighted += weight * (means[0] - means[1])
        self._weight += weight
        for side, count, mean, sign in zip(sides, counts, means, (1.0, -1.0), strict=True):
            who = slot.people_R[side]
            self._influence_U[who] += sign * weight * (left_R[side] - units_R[side] * mean) / count
        self._treated_U[slot.people_R[slot.treated_R]] = True

    def effect(self) -> Effect:
        """The effect over the slots so far."""
        if self._weight <= 0.0:
            return NOTHING
        variances, people = zip(*(self._spread(index) for index in (0, 1)), strict=True)
        return Effect(
            difference=self._weighted / self._weight,
            variance=sum(variances),
            people=min(people),
            freedom=_freedom(variances, people),
            turns=min(self._turns),
        )

    def _spread(self, index: int) -> tuple[float, float]:
        """The variance that one side (0: treated) adds, and its effective people. A person on both sides counts as treated."""
        side_U = self._came_U & (self._treated_U if index == 0 else ~self._treated_U)
        influence_U = self._influence_U[side_U]
        largest = float(np.abs(influence_U).max(initial=0.0))
        # in units of the largest: fourth powers of tiny numbers would underflow
        square_U = (influence_U / largest) ** 2 if largest else influence_U
        total, fourth = float(square_U.sum()) * largest**2, float((square_U**2).sum())
        units, good = self._units[index], self._good[index]
        alike = good <= 0.0 or good >= units * (1.0 - _EXACT)
        # where all said the same, neither rounding errors nor differences of the expected outcomes are a spread
        if total > _ROUNDING * self._weight**2 and not alike:
            people = float(square_U.sum()) ** 2 / fourth
            spread = total / self._weight**2
            return (spread * people / (people - 1.0) if people > 1.0 else float("inf")), people
        people = float(side_U.sum())
        share = (good / units * people + 1.0) / (people + 2.0)
        return share * (1.0 - share) / (people + 2.0), people

    def _capped(self, slot: TimeSlot) -> tuple[Floats, Floats, Floats]:
        """Turns, units and outcomes, scaled down for people who are past their daily limit of turns."""
        if slot.day != self._day:
            self._today_U[:] = 0.0
            self._day = slot.day
        before_R = self._today_U[slot.people_R]
        counted_R = np.minimum(slot.turns_R, np.maximum(self._most - before_R, 0.0))
        np.add.at(self._today_U, slot.people_R, slot.turns_R)
        share_R = np.divide(counted_R, slot.turns_R, out=np.zeros_like(counted_R), where=slot.turns_R > 0.0)
        units_R = slot.turns_R if slot.units_R is None else slot.units_R
        return counted_R, units_R * share_R, slot.good_R * share_R

    def _grow(self, people: int) -> None:
        more = people - len(self._influence_U)
        if more > 0:
            more += len(self._influence_U)  # doubled, so that adding people one by one takes linear time
            self._influence_U = np.concatenate([self._influence_U, np.zeros(more)])
            self._today_U = np.concatenate([self._today_U, np.zeros(more)])
            none_U = np.zeros(more, dtype=np.bool_)
            self._treated_U = np.concatenate([self._treated_U, none_U])
            self._came_U = np.concatenate([self._came_U, none_U])


def _freedom(variances: Sequence[float], people: Sequence[float]) -> float:
    """The two sides' effective people combined, by what each side adds to the variance (Welch 1938, Satterthwaite 1946)."""
    total = sum(variances)
    if not math.isfinite(total) or min(people) <= 0.0:
        return 0.0
    return total**2 / sum(variance**2 / each for variance, each in zip(variances, people, strict=True))
