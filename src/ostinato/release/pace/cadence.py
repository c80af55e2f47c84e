"""How many releases a week this traffic can verify. Pure.

A trial ends once its evidence is large enough, so traffic sets the pace: a candidate that is as good as live ships, nine times in ten,
once the variance V of the difference is so small that ``reach(V) + z(0.9) sqrt(V) = margin``, where ``reach`` is the half-width of the
one-sided confidence sequence (`trial.evidence`), as sample sizes of equivalence tests are found (Julious, Statistics in Medicine 23, 2004).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from ostinato.release.pace.history import TrialEnd
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.evidence import lower_bound

WEEK = 7 * 86_400.0
POWER = 0.9
"""The probability with which a candidate that is as good as live must have shipped by the computed end."""
ALIKE = 0.15
"""The assumed intraclass correlation of one person's outcomes, where no trial has measured a variance yet."""
ENOUGH = 3
"""The number of passed trials from which on their measured durations replace the computed one."""
_BISECTIONS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A day of use: the number of `turns` that have an outcome, of `people` who made them, and the share of turns that was `good`.

    Example: ``Traffic(people=1040, turns=10_300, good=0.61)``
    """

    people: int
    turns: int
    good: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How long a trial takes, and how many fit into a week. `trial_s` is None where no trial can end before `release.trial.limit_s`.

    It is from `measured` trials, or, where that is 0, from the traffic. `sees` is the smallest margin that a trial within that limit
    could hold.

    Example: ``Cadence(a_week=7.3, trial_s=82_800.0, measured=5, sees=0.018, margin=0.02)``
    """

    a_week: float
    trial_s: float | None
    measured: int
    sees: float
    margin: float


def needed_variance(margin: float, alpha: float) -> float:
    """The variance of the difference at which an equally good candidate passes the margin with probability `POWER`."""
    low, high = 0.0, margin
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _wants(middle**2, alpha) <= margin else (low, middle)
    return low**2


def variance_of(traffic: Traffic, days: float, most_turns_a_day: float) -> float:
    """The variance of the difference of two halves of the users after `days` days, in which the same people come back.

    A person's turns are alike, so n of them tell as much as n / (1 + (n - 1) ALIKE) of different people (Kish, Survey Sampling, 1965).
    The gain of `trial.contrast` from people's past is left out: trials are shorter than this says, rarely longer.
    """
    each = min(traffic.turns / traffic.people, most_turns_a_day) * days
    effective = traffic.people * each / (1.0 + (max(each, 1.0) - 1.0) * ALIKE)
    good = min(max(traffic.good, 0.05), 0.95)
    return 4.0 * good * (1.0 - good) / effective


def cadence(traffic: Traffic, ended: Sequence[TrialEnd], config: TrialConfig) -> Cadence:
    """How many releases a week can be verified, from the median of the last trials that passed, or from the traffic if they are too few."""
    sees = _sees(traffic, config)
    passed = [each.seconds for each in ended if each.passed][-10:]
    if len(passed) >= ENOUGH:
        trial_s: float | None = median(passed)
    else:
        passed, trial_s = [], _trial_s(traffic, config, sees)
    a_week = WEEK / trial_s if trial_s else 0.0
    return Cadence(a_week=a_week, trial_s=trial_s, measured=len(passed), sees=sees, margin=config.margin)


def _sees(traffic: Traffic, config: TrialConfig) -> float:
    if not traffic.people or not traffic.turns:
        return 1.0
    variance = variance_of(traffic, config.limit_s / 86_400.0, config.most_turns_a_day)
    return min(_wants(variance, config.ship_alpha), 1.0)


def _trial_s(traffic: Traffic, config: TrialConfig, sees: float) -> float | None:
    if sees > config.margin:
        return None
    wanted = needed_variance(config.margin, config.ship_alpha)
    low, high = 0.0, config.limit_s
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        there = variance_of(traffic, middle / 86_400.0, config.most_turns_a_day) <= wanted
        low, high = (low, middle) if there else (middle, high)
    return max(high, config.slot_s)


def _wants(variance: float, alpha: float) -> float:
    """The margin that an equally good candidate passes with probability `POWER` at this variance."""
    return -lower_bound(0.0, variance, alpha) + NormalDist().inv_cdf(POWER) * math.sqrt(variance)
