"""The difference between two arms over the same hours: a difference of means over turns, with a variance clustered by person.

Three things make it several times as informative as the difference of two pooled shares (measured by `benchmarks.release.path`):

- A person's expected outcome, from the week before the trial, is subtracted first; it varies far more than versions do.
- Arms are compared within each time slot, so neither the hour of the day nor a ramp that moves people between arms biases it.
- A person's turns beyond a daily limit do not count, so one busy program cannot dominate an arm.

The evidence that one version is better or worse than another is valid at any time, however often it was looked at before. It is an
e-process: under "no difference" its mean never exceeds 1, so the probability that it *ever* reaches 1/alpha is at most alpha (Ville's
inequality). It mixes half-normal priors of several scales, and treats the estimate as normal with a known variance. That holds
asymptotically, so the callers first require a number of effective users (Waudby-Smith et al., arXiv 2103.06476).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ostinato.release.metrics.metric import Measured, Metric

_ROUNDING = 1e-18
_EXACT = 1e-12
_PSEUDO_TURNS = 6.0
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # its multiples modulo 1 fill [0, 1) evenly
_LEAST_IN_TAIL = 5.0  # least number of the comparator's users beyond a quantile for estimating it
# least mean number of turns per user: with one turn the true variance is up to twice the formula's, from three on the formula holds
_LEAST_TURNS_EACH = 3.0
_MOST_MOVED = 2  # users of a small stratum who may change sides without being taken for a change of shares
# fraction of a slot's treated users who were the comparator's before, above which a share must have grown
_MOVED_SHARE = 0.1
_LEAST = 1e-9  # turns, or units of a metric's denominator, below which a side counts as empty
_LEAST_PEOPLE = 5  # least number of people on each side for comparing a slot, or a tenant in it, by itself

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_Rows = tuple[Indices, NDArray[np.bool_], Floats, Floats]
"""One row per person and side: the person, whether treated, the units, and the residual outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSlot:
    """The outcomes of two arms' people in one time slot; R rows, at most one per person and arm.

    Attributes:
        day: any number that changes at midnight.
        people_R: small integers that stand for people.
        turns_R: numbers of turns with an outcome.
        good_R: sums of the outcomes (at most 1 per unit).
        expected_R: the outcome expected of one unit, from what was known before the trial began.
        treated_R: whether the person is on the treated arm.
        units_R: the metric's denominator, summed over the turns; None if each turn is one unit.
        share: the treated arm's share when these people were assigned; None if it is not known.

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
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The estimated effect: treated minus comparator. `variance` is infinite until both sides have people.

    `people` is the smaller side's effective number of people. `freedom` is the effective number behind the whole variance (degrees of
    freedom after Welch and Satterthwaite): a side that hardly adds to the variance need not have many people.

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
    """The estimator of the difference between two arms over the slots added so far.

    With n the units, residuals r = good - n x expected and slot weights w_j = n_T n_C / (n_T + n_C), the difference D and the influence
    psi of person u are

        D = sum_j w_j (mean r_Tj - mean r_Cj) / sum_j w_j
        psi_u = sum_j +-w_j (r_uj - n_uj mean r_j) / n_arm,j

    The variance of D is the sum of squared influences over people (over the squared sum of weights): all turns of a person who comes back
    are one cluster (the delta method for a ratio of sums, clustered by person; Deng et al., arXiv 1803.06336). Each side is corrected by k
    / (k - 1) for its k = (sum psi^2)^2 / sum psi^4 effective people. A side whose outcomes are all equal has no spread. It gets the
    variance of Agresti and Caffo (The American Statistician 54, 2000), with one more good and one more bad person, or that of the expected
    outcomes, which are part of the difference, if that is larger.

    A person who is alone on a side of a slot equals its mean, and m people show only (m - 1) / m of the variance. So slots with fewer than
    `_LEAST_PEOPLE` people on either side are pooled until together they have enough: without pooling, half-hours in which one of sixty
    control users came made the variance too small by a factor of four. Slots with people of only one arm are pooled as well: if they were
    left out, busy hours, in which somebody of the rare arm is more likely to come, would weigh more on the frequent arm. Slots of different
    shares are never pooled.

    Args:
        most_turns_a_day: number of turns of one person and day that count; a slot that exceeds it is scaled down in proportion.
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
        self._sparse: _Rows | None = None
        self._share: float | None = None

    def add(self, slot: TimeSlot) -> None:
        """Add a slot of any length. A slot with people in only one arm waits for slots of the same share with people in the other."""
        if not len(slot.people_R):
            return
        self._grow(int(slot.people_R.max()) + 1)
        turns_R, units_R, good_R = self._capped(slot)
        residual_R = good_R - units_R * slot.expected_R
        for index, side in enumerate((slot.treated_R, ~slot.treated_R)):
            self._turns[index] += float(turns_R[side].sum())
            self._units[index] += float(units_R[side].sum())
            self._good[index] += float(good_R[side].sum())
        if slot.share != self._share:
            self._share, self._sparse = slot.share, None
        rows = slot.people_R, slot.treated_R, units_R, residual_R
        if _too_few(rows):
            if self._sparse is not None:
                self._compare(self._sparse, -1.0)
                rows = _pooled(self._sparse, rows)
            self._sparse = rows if _too_few(rows) else None
        self._compare(rows, 1.0)

    def _compare(self, rows: _Rows, sign: float) -> None:
        """Add the comparison of the sides in these rows, or remove it with a sign of -1. Do nothing if a side is empty."""
        people_R, treated_R, units_R, residual_R = rows
        sides = [treated_R, ~treated_R]
        counts = [float(units_R[side].sum()) for side in sides]
        if min(counts) <= _LEAST:
            return
        self._came_U[people_R] = True
        self._treated_U[people_R[treated_R]] = True
        weight = sign * counts[0] * counts[1] / (counts[0] + counts[1])
        means = [float(residual_R[side].sum()) / count for side, count in zip(sides, counts, strict=True)]
        self._weighted += weight * (means[0] - means[1])
        self._weight += weight
        for side, count, mean, way in zip(sides, counts, means, (1.0, -1.0), strict=True):
            self._influence_U[people_R[side]] += way * weight * (residual_R[side] - units_R[side] * mean) / count

    def effect(self) -> Effect:
        """Return the effect over the slots so far."""
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
        """Return the variance that one side (0: treated) adds, and its effective people. A person on both sides counts as treated."""
        side_U = self._came_U & (self._treated_U if index == 0 else ~self._treated_U)
        influence_U = self._influence_U[side_U]
        largest = float(np.abs(influence_U).max(initial=0.0))
        # scale by the largest, as fourth powers of tiny numbers would underflow
        square_U = (influence_U / largest) ** 2 if largest else influence_U
        total, fourth = float(square_U.sum()) * largest**2, float((square_U**2).sum())
        units, good = self._units[index], self._good[index]
        alike = good <= 0.0 or good >= units * (1.0 - _EXACT)
        people, spread = float(side_U.sum()), 0.0
        if total > _ROUNDING * self._weight**2:
            effective, spread = float(square_U.sum()) ** 2 / fourth, total / self._weight**2
            if not alike:
                return (spread * effective / (effective - 1.0) if effective > 1.0 else float("inf")), effective
        # all outcomes are equal: rounding errors and different expected outcomes alone give no usable variance
        share = (good / units * people + 1.0) / (people + 2.0)
        return max(spread, share * (1.0 - share) / (people + 2.0)), people

    def _capped(self, slot: TimeSlot) -> tuple[Floats, Floats, Floats]:
        """Return turns, units and outcomes, scaled down for people who are past their daily limit of turns."""
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
            more += len(self._influence_U)  # double the size, so that adding people one by one takes linear time
            self._influence_U = np.concatenate([self._influence_U, np.zeros(more)])
            self._today_U = np.concatenate([self._today_U, np.zeros(more)])
            none_U = np.zeros(more, dtype=np.bool_)
            self._treated_U = np.concatenate([self._treated_U, none_U])
            self._came_U = np.concatenate([self._came_U, none_U])


class TailContrast:
    """Harm to a minority: the share of treated users who are among the worst off, compared with the comparator's share, which is `tail`.

    An average hides a loss of twenty points by one user in twenty. Each user's score is their mean residual outcome, after subtracting the
    expected outcome, the slot's mean and the mean of their own side (which other metrics judge). It is shrunk towards 0 by
    `_PSEUDO_TURNS` turns, so that a user with few turns is not extreme.

    The users below the comparator's `tail` quantile count. If the versions are equal, both sides' scores have the same distribution, so the
    treated share is `tail` and its variance is ``tail (1 - tail) (1 / n_T + 1 / n_C)`` whatever the scores: nothing has to be estimated.
    A fixed offset per user of up to half a turn breaks ties, as users of equal scores would all fall on the same side of the quantile.
    Users whose score equals the quantile count in part, so that the comparator's share is exactly `tail`.

    Both sides must have been observed for the same time: once a share grew, which moves users to the treated side, scores restart.

    Args:
        sign: 1 if a higher outcome is better, -1 if a lower one is.
    """

    def __init__(self, tail: float, sign: Literal[-1, 1]) -> None:
        self._tail, self._sign = tail, sign
        self._clear()

    def add(self, slot: TimeSlot) -> None:
        """Add a slot of any length."""
        if not len(slot.people_R):
            return
        more = int(slot.people_R.max()) + 1 - len(self._turns_U)
        if more > 0:
            grown = (0, more + len(self._turns_U))
            self._residual_U, self._units_U = np.pad(self._residual_U, grown), np.pad(self._units_U, grown)
            self._turns_U, self._side_U = np.pad(self._turns_U, grown), np.pad(self._side_U, grown)
        moved = int((self._side_U[slot.people_R[slot.treated_R]] < 0).sum())
        if moved > max(_MOVED_SHARE * slot.treated_R.sum(), _MOST_MOVED):
            self._clear()
            self.add(slot)
            return
        units_R = slot.turns_R if slot.units_R is None else slot.units_R
        residual_R = slot.good_R - units_R * slot.expected_R
        residual_R = residual_R - units_R * residual_R.sum() / max(units_R.sum(), _LEAST)
        np.add.at(self._residual_U, slot.people_R, residual_R)
        np.add.at(self._units_U, slot.people_R, units_R)
        np.add.at(self._turns_U, slot.people_R, slot.turns_R)
        self._side_U[slot.people_R[~slot.treated_R]] = -1
        self._side_U[slot.people_R[slot.treated_R]] = 1

    def effect(self) -> Effect:
        """Return the treated users' share among the worst off minus `tail`.

        The result is `NOTHING` while the comparator has too few users to estimate the quantile, or users have so few turns that single
        turns decide who is badly off.
        """
        sides = [self._side_U > 0, self._side_U < 0]
        people = [int(side_U.sum()) for side_U in sides]
        turns = [float(self._turns_U[side_U].sum()) for side_U in sides]
        few = any(count < _LEAST_TURNS_EACH * users for count, users in zip(turns, people, strict=True))
        if few or not people[0] or people[1] * self._tail < _LEAST_IN_TAIL:
            return NOTHING
        turn = self._units_U.sum() / self._turns_U.sum()
        residual_U = self._residual_U + turn * (np.arange(len(self._residual_U)) * _GOLDEN % 1.0 - 0.5)
        means = [residual_U[side_U].sum() / max(self._units_U[side_U].sum(), _LEAST) for side_U in sides]
        treated, others = (
            self._sign
            * (residual_U[side_U] - self._units_U[side_U] * mean)
            / (self._units_U[side_U] + _PSEUDO_TURNS * turn)
            for side_U, mean in zip(sides, means, strict=True)
        )
        bound = np.partition(others, int(people[1] * self._tail))[int(people[1] * self._tail)]
        below, equal = float((others < bound).mean()), float((others == bound).mean())
        share = float((treated < bound).mean() + (self._tail - below) / equal * (treated == bound).mean())
        harmed = max(share, self._tail)
        return Effect(
            difference=share - self._tail,
            variance=harmed * (1.0 - harmed) / people[0] + self._tail * (1.0 - self._tail) / people[1],
            people=float(min(people)),
            freedom=float(min(people)),
            turns=min(turns),
        )

    def _clear(self) -> None:
        self._residual_U, self._units_U, self._turns_U = np.zeros(0), np.zeros(0), np.zeros(0)
        self._side_U: NDArray[np.int8] = np.zeros(0, dtype=np.int8)  # 1: treated, -1: comparator, 0: did not come


def _too_few(rows: _Rows) -> bool:
    _, treated_R, units_R, _ = rows
    return any(side.sum() < _LEAST_PEOPLE or units_R[side].sum() <= _LEAST for side in (treated_R, ~treated_R))


def _pooled(one: _Rows, other: _Rows) -> _Rows:
    people_R, treated_R = np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])
    keys_K, place_R = np.unique(2 * people_R + treated_R, return_inverse=True)
    units_K, left_K = np.zeros(len(keys_K)), np.zeros(len(keys_K))
    np.add.at(units_K, place_R, np.concatenate([one[2], other[2]]))
    np.add.at(left_K, place_R, np.concatenate([one[3], other[3]]))
    return keys_K // 2, keys_K % 2 == 1, units_K, left_K


def contrast_of(metric: Metric, most_turns_a_day: float) -> Contrast | TailContrast:
    """Return an empty contrast for a metric."""
    return Contrast(most_turns_a_day) if metric.tail is None else TailContrast(metric.tail, metric.better)


def _freedom(variances: Sequence[float], people: Sequence[float]) -> float:
    """Return the degrees of freedom of the two sides' summed variance (Welch 1938, Satterthwaite 1946)."""
    total = sum(variances)
    if not math.isfinite(total) or min(people) <= 0.0:
        return 0.0
    return total**2 / sum(variance**2 / each for variance, each in zip(variances, people, strict=True))


# ---------------------------------------------------------------- evidence


Side = Literal[-1, 1]
"""-1: evidence that the difference is below 0; +1: that it is above."""

SCALES = (0.01, 0.03, 0.10)
"""Scales of the mixed half-normal priors: differences of about one, three and ten points are detected soonest."""

_NEWTON_STEPS = 60
_PRECISE = 1e-13


def log_evidence(difference: float, variance: float, side: Side) -> float:
    """Return the logarithm of the e-value of an estimate with this variance: 0 is no evidence, log 20 rejects "no difference" at 0.05.

    For one scale tau the e-value is ``2 (1 + tau^2 / V)^-1/2 exp(D^2 tau^2 / (2 V (V + tau^2))) Phi(side D tau / sqrt(V (V + tau^2)))``:
    the likelihood ratio of N(theta, V) to N(0, V), averaged over a half-normal prior of theta with scale tau. The result is the mean over
    `SCALES`.

    Example: ``log_evidence(-0.05, 0.0001, -1)`` is 9.9: five points at a standard error of one.
    """
    if variance <= 0.0 or not math.isfinite(variance):
        return 0.0
    logs = [_one_scale(difference, variance, scale, side) for scale in SCALES]
    top = max(logs)
    return top + math.log(sum(math.exp(each - top) for each in logs) / len(logs))


def lower_bound(difference: float, variance: float, alpha: float) -> float:
    """Return the lower end of the one-sided confidence sequence: it exceeds the truth at *any* look with probability at most `alpha`."""
    return difference - _half_width(variance, alpha)


def upper_bound(difference: float, variance: float, alpha: float) -> float:
    """Return the upper end of the one-sided confidence sequence: it is below the truth at *any* look with probability at most `alpha`."""
    return difference + _half_width(variance, alpha)


@lru_cache(maxsize=64)
def _half_width(variance: float, alpha: float) -> float:
    """Return the difference at which the evidence is exactly 1/alpha.

    Newton's method converges: the log evidence rises with the difference and is convex (its second derivative is that of z^2 / 2 + log
    Phi(z), which is positive, and the logarithm of a sum of exponentials of convex functions is convex). From the second step on, the
    iterates therefore approach the root from above.
    """
    if variance <= 0.0 or not math.isfinite(variance):
        return math.inf
    wanted = -math.log(alpha)
    reach = math.sqrt(2.0 * variance * (wanted + 1.0))
    for _ in range(_NEWTON_STEPS):
        value, slope = _evidence_and_slope(reach, variance)
        step = (value - wanted) / slope
        reach -= step
        if abs(step) <= _PRECISE * reach:
            break
    return reach


def _evidence_and_slope(difference: float, variance: float) -> tuple[float, float]:
    """Return the log evidence for a rise, and its derivative with respect to the difference."""
    logs = [_one_scale(difference, variance, scale, 1) for scale in SCALES]
    top = max(logs)
    weights = [math.exp(each - top) for each in logs]
    slope = 0.0
    for scale, weight in zip(SCALES, weights, strict=True):
        steepness = math.sqrt(scale**2 / (scale**2 + variance) / variance)
        z = difference * steepness
        hazard = math.exp(-0.5 * z * z - _log_normal_cdf(z)) / math.sqrt(2.0 * math.pi)
        slope += weight * steepness * (z + hazard)
    total = sum(weights)
    return top + math.log(total / len(logs)), slope / total


def _one_scale(difference: float, variance: float, scale: float, side: Side) -> float:
    shrink = scale**2 / (scale**2 + variance)
    return (
        math.log(2.0)
        - 0.5 * math.log1p(scale**2 / variance)
        + 0.5 * shrink * difference**2 / variance
        + _log_normal_cdf(side * difference * math.sqrt(shrink / variance))
    )


def _log_normal_cdf(z: float) -> float:
    """Return log Phi(z). For very negative z, where erfc underflows, it uses the first terms of the asymptotic series."""
    if z > -30.0:
        return math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
    return -0.5 * z * z - math.log(-z * math.sqrt(2.0 * math.pi)) + math.log1p(-1.0 / (z * z))


# ---------------------------------------------------------------- tally of a slot


POOLED = ""
"""The stratum of all tenants that have too few people to be compared by themselves."""


class SlotTally:
    """Sums one metric over the turns of a slot, by stratum. A stratum is a tenant, or `POOLED`."""

    def __init__(self) -> None:
        self._strata: dict[str, dict[tuple[int, bool], list[float]]] = {}

    def add(self, stratum: str, person: int, treated: bool, measured: Measured, expected: float) -> None:
        """Add a person's turn. `expected` is the outcome expected of one unit of the denominator."""
        rows = self._strata.get(stratum)
        if rows is None:
            rows = self._strata[stratum] = {}
        row = rows.get((person, treated))
        if row is None:
            row = rows[person, treated] = [0.0, 0.0, 0.0, 0.0]
        row[0] += 1.0
        row[1] += measured[1]
        row[2] += measured[0]
        row[3] += measured[1] * expected

    def slots(self, day: int, share: float | None = None) -> Mapping[str, TimeSlot]:
        """Return one slot per stratum; arms are compared within each. `share`: see `TimeSlot`.

        A person who is alone on a side equals its mean, and m people show only (m - 1) / m of the variance. So strata with fewer than
        `_LEAST_PEOPLE` people on either side are pooled. Without pooling, the variance of 40 tenants of 60 people was too small by a factor
        of 2.4.
        """
        made: dict[str, dict[tuple[int, bool], list[float]]] = {}
        for stratum, rows in self._strata.items():
            treated = sum(side for _, side in rows)
            apart = min(treated, len(rows) - treated) >= _LEAST_PEOPLE
            made.setdefault(stratum if apart else POOLED, {}).update(rows)
        return {stratum: _slot(rows, day, share) for stratum, rows in made.items()}

    def slot(self, day: int) -> TimeSlot:
        """Return one slot of all strata together."""
        return _slot({key: row for rows in self._strata.values() for key, row in rows.items()}, day)


def _slot(rows: Mapping[tuple[int, bool], list[float]], day: int, share: float | None = None) -> TimeSlot:
    numbers = np.array(list(rows.values()), dtype=np.float64).reshape(-1, 4)
    return TimeSlot(
        day=day,
        people_R=np.array([person for person, _ in rows], dtype=np.int64),
        turns_R=numbers[:, 0],
        units_R=numbers[:, 1],
        good_R=numbers[:, 2],
        expected_R=numbers[:, 3] / np.maximum(numbers[:, 1], _LEAST),
        treated_R=np.array([treated for _, treated in rows], dtype=np.bool_),
        share=share,
    )
