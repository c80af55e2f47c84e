"""The pace of releases: recent trials, the cooldown after a rollback, the cadence that traffic allows, and the error budget.

Everything is computed from the times in the ledger, so a restarted worker decides the same.

A trial ends once it has enough evidence, so traffic sets the pace. With a single test, a candidate that is as good as live passes nine
times in ten once the variance V of the difference is so small that ``(z(1 - alpha) + z(0.9)) sqrt(V) = margin``, the sample-size rule of
equivalence tests (Julious, Statistics in Medicine 23, 2004). The plan of a trial's interim looks (`trial.group_sequential`) is made for
that information, or for what the traffic gives within the trial's time limit, if that is less.

The error budget gives upper bounds on the expected number of wrong decisions in the last weeks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.release.guard import GuardConfig
from ostinato.release.trial.config import DAY, TrialConfig
from ostinato.release.trial.group_sequential import ShipPlan
from ostinato.release.trial.incumbent_test import StandingConfig

MOST_ENTRIES = 50_000
"""The number of newest entries kept of each kind. It covers `WEEKS` weeks unless candidates come faster than one a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnd:
    """A trial that has ended. `passed`: it showed what was required; otherwise it was stopped, or had too little evidence.

    Example: ``TrialEnd(at=90_000.0, seconds=82_800.0, passed=True)``
    """

    at: float
    seconds: float
    passed: bool


class Spans:
    """Consecutive time intervals, of which the last may still be open."""

    def __init__(self) -> None:
        self.over: deque[tuple[float, float]] = deque(maxlen=MOST_ENTRIES)
        self.open: float | None = None

    def begin(self, at: float) -> None:
        """End the open interval, if any, and begin another."""
        self.end(at)
        self.open = at

    def end(self, at: float) -> None:
        """End the open interval, if any."""
        if self.open is not None:
            # max: the clock may have been set back since the interval began
            self.over.append((self.open, max(at, self.open)))
        self.open = None

    def periods(self, seconds: float, since: float, now: float) -> int:
        """Return how many periods of `seconds` were under way after `since`, counted from each interval's start, begun ones included."""
        spans = [*self.over, *([] if self.open is None else [(self.open, max(now, self.open))])]
        return sum(
            int((end - began) // seconds) - int((max(began, since) - began) // seconds) + 1
            for began, end in spans
            if end >= since
        )


class PaceHistory:
    """Recent trials, verdicts and releases, built from the ledger's lines in order."""

    def __init__(self) -> None:
        self.trials: deque[TrialEnd] = deque(maxlen=MOST_ENTRIES)
        self.verdicts: deque[float] = deque(maxlen=MOST_ENTRIES)
        """Times of the gate's verdicts."""
        self._judged: tuple[str, float] | None = None
        self._judged_before: float | None = None
        self.moved: deque[float] = deque(maxlen=MOST_ENTRIES)
        """Times at which live moved, the starting model's own release left out."""
        self.trying = Spans()
        """Intervals in which a candidate was compared with live, or live with the version it replaced."""
        self.standing = Spans()
        """Intervals in which live was compared with the verified release, if that has an arm."""
        self._begun: tuple[str, float] | None = None
        self._tried: str | None = None

    def apply(self, event: ReleaseEvent) -> None:
        """Fold in one more line."""
        self._compared(event)
        if event.action == "evaluated":
            self._evaluated(event)
        if event.action == "canary":
            self._begun = (event.policy.hash, event.at)
        elif self._begun is not None and event.action in _TRIAL_ENDS and event.policy.hash == self._begun[0]:
            began, self._begun = self._begun[1], None
            # the duration of a trial that a person ended says nothing about how long trials take
            if "actor" not in event.detail:
                passed = event.action != "blocked"
                self.trials.append(TrialEnd(at=event.at, seconds=max(event.at - began, 0.0), passed=passed))
        elif event.action in ("shipped", "rolled_back"):
            self._begun = None

    def since_another(self, candidate: PolicyVersion, now: float) -> float | None:
        """Return the seconds since the gate last looked at another candidate or gave an earlier verdict on this one; None if never."""
        at = None if self._judged is None else self._judged[1]
        if self._judged is not None and candidate.hash == self._judged[0]:
            at = self._judged_before
        return None if at is None else now - at

    def _evaluated(self, event: ReleaseEvent) -> None:
        ends = event.detail.get("report", {}).get("verdict") in ("SHIP", "BLOCK")
        if self._judged is None or event.policy.hash != self._judged[0]:
            self._judged_before = None if self._judged is None else self._judged[1]
        if ends:
            self.verdicts.append(event.at)
        # after a verdict, even the same version counts as another candidate
        self._judged = "" if ends else event.policy.hash, event.at

    def _compared(self, event: ReleaseEvent) -> None:
        moves = event.action in ("shipped", "rolled_back")
        if moves and event.previous is not None:
            self.moved.append(event.at)
        if event.action in ("rolled_back", "verified") or (moves and self.standing.open is None):
            self.standing.begin(event.at)
        own = event.policy.hash == self._tried
        goes_on = event.action == "shipped" and own and "share" in event.detail
        if event.action == "canary" or (event.action == "shipped" and not goes_on and "salt" in event.detail):
            self.trying.begin(event.at)
            self._tried = event.policy.hash
        elif (moves and not goes_on) or (own and event.action in ("blocked", "awaits_approval")):
            self.trying.end(event.at)
            self._tried = None


_TRIAL_ENDS = ("shipped", "awaits_approval", "blocked")


# ---------------------------------------------------------------- cooldown


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """One rollback in the ledger. `by_itself`: automatic, not requested by a person.

    Example: ``RolledBack(at=60.0, by_itself=True)``
    """

    at: float
    by_itself: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Brake:
    """The reason why nothing ships automatically. `until`: when it ends; None if only a person's ship or approval ends it.

    Example: ``Brake(until=21_660.0, reason="v9 was rolled back: ...")``
    """

    until: float | None
    reason: str


def brake(rollbacks: Sequence[RolledBack], *, cooldown_s: float, a_day: int, now: float) -> Brake | None:
    """Return the brake in force now; None if there is none. `rollbacks`: those since a person last shipped or approved, oldest first.

    After more than `a_day` automatic rollbacks within 24 hours, only a person ends the brake, however long ago they were.
    """
    own = [each.at for each in rollbacks if each.by_itself]
    for first, last in zip(own, own[a_day:], strict=False):
        if last - first < DAY:
            return Brake(
                until=None,
                reason=f"more automatic rollbacks within a day than release.rollbacks_a_day = {a_day} allows: nothing ships by "
                "itself until somebody ships or approves a version (`ostinato ship`, `ostinato approve`)",
            )
    # abs: a rollback far in the future was written by a wrong clock, and must not hold until then
    if rollbacks and abs(now - rollbacks[-1].at) < cooldown_s:
        return Brake(
            until=rollbacks[-1].at + cooldown_s,
            reason="after a rollback nothing ships by itself for a while (release.cooldown_s)",
        )
    return None


# ---------------------------------------------------------------- cadence


WEEK = 7 * DAY
POWER = 0.9
"""The probability that a candidate as good as live has shipped by the computed end."""
INTRACLASS_CORRELATION = 0.15
"""The assumed intraclass correlation of one person's outcomes, where no trial has measured a variance yet."""
LEAST_MEASURED = 3
"""The number of passed trials at which their measured durations replace the computed one."""
_BISECTIONS = 60
_INFLATION = 1.1
"""The factor by which several looks need more information than a single test of the same power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A day of use: the number of `turns` with an outcome, the number of `people` who made them, and the share of turns that was `good`.

    Example: ``Traffic(people=1040, turns=10_300, good=0.61)``
    """

    people: int
    turns: int
    good: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How long a trial takes, and how many fit into a week. `trial_s` is None if no trial can end before `release.trial.limit_s`.

    Both are computed from `measured` trials, or from the traffic if that is 0. `sees`: the smallest margin that a trial within the time
    limit can test.

    Example: ``Cadence(a_week=7.3, trial_s=82_800.0, measured=5, sees=0.018, margin=0.02)``
    """

    a_week: float
    trial_s: float | None
    measured: int
    sees: float
    margin: float


def needed_variance(margin: float, alpha: float) -> float:
    """Return the variance of the difference at which an equally good candidate has shipped with probability `POWER`."""
    return (margin / _quantiles(alpha)) ** 2 / _INFLATION


def ship_plan(traffic: Traffic | None, allowed: Mapping[str, float], config: TrialConfig) -> ShipPlan | None:
    """Return the plan of a trial's looks; None if the traffic is not known, in which case the confidence sequence decides.

    `allowed`: the loss that each goal may show, as a share. The share of good turns in `traffic` is that of the first goal; a plan that
    does not suit another goal costs time but adds no errors.
    """
    if traffic is None or not traffic.people or not traffic.turns:
        return None
    within = 1.0 / variance_of(traffic, config.limit_s / DAY, config.most_turns_a_day)
    alpha = config.ship_alpha
    planned = {goal: min((_quantiles(alpha) / loss) ** 2, within) if loss else within for goal, loss in allowed.items()}
    return ShipPlan(information=planned, alpha=alpha, limit_s=config.limit_s)


def variance_of(traffic: Traffic, days: float, most_turns_a_day: float) -> float:
    """Return the variance of the difference between two halves of the users after `days` days in which the same people come back.

    One person's turns are correlated, so n of them are worth n / (1 + (n - 1) rho) turns of different people, with rho =
    `INTRACLASS_CORRELATION` (the design effect of Kish, Survey Sampling, 1965). The adjustment for people's past in `trial.contrast` is
    left out: trials are shorter than this says, rarely longer.
    """
    each = min(traffic.turns / traffic.people, most_turns_a_day) * days
    effective = traffic.people * each / (1.0 + (max(each, 1.0) - 1.0) * INTRACLASS_CORRELATION)
    good = min(max(traffic.good, 0.05), 0.95)
    return 4.0 * good * (1.0 - good) / effective


def cadence(traffic: Traffic, ended: Sequence[TrialEnd], config: TrialConfig) -> Cadence:
    """Return the releases a week that can be verified, from the median of the last passed trials, or from the traffic if they are few."""
    sees = _testable_margin(traffic, config)
    passed = [each.seconds for each in ended if each.passed][-10:]
    if len(passed) >= LEAST_MEASURED:
        trial_s: float | None = median(passed)
    else:
        passed, trial_s = [], _trial_s(traffic, config, sees)
    a_week = WEEK / trial_s if trial_s else 0.0
    return Cadence(a_week=a_week, trial_s=trial_s, measured=len(passed), sees=sees, margin=config.margin)


def _testable_margin(traffic: Traffic, config: TrialConfig) -> float:
    """Return the margin at which an equally good candidate passes with probability `POWER`, at the variance reached by the time limit."""
    if not traffic.people or not traffic.turns:
        return 1.0
    variance = variance_of(traffic, config.limit_s / DAY, config.most_turns_a_day)
    return min(_quantiles(config.ship_alpha) * math.sqrt(variance * _INFLATION), 1.0)


def _trial_s(traffic: Traffic, config: TrialConfig, sees: float) -> float | None:
    if sees > config.margin:
        return None
    wanted = needed_variance(config.margin, config.ship_alpha)
    low, high = 0.0, config.limit_s
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        there = variance_of(traffic, middle / DAY, config.most_turns_a_day) <= wanted
        low, high = (low, middle) if there else (middle, high)
    return max(high, config.slot_s)


def _quantiles(alpha: float) -> float:
    """Return the number of standard errors from no loss to the margin that a single test of this level and power needs."""
    normal = NormalDist()
    return normal.inv_cdf(1.0 - alpha) + normal.inv_cdf(POWER)


# ---------------------------------------------------------------- budget


WEEKS = 4
"""The number of past weeks whose decisions count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Upper bounds on the expected number of errors in the last `WEEKS` weeks.

    Attributes:
        trials: trials that ended, except those that a person ended.
        verdicts: the gate's verdicts.
        false_ships: candidates that shipped although they lose the margin, if all candidates lose it. By linearity of expectation it is the
            sum of the levels of the trials, or of the gate's verdicts where candidates are not tried.
        false_stops: comparisons on users that ended as harmful, if none is: trials, releases against the version they replaced, and their
            later periods.
        stops_allowed: the number of them that `release.trial.false_stops` allows over that time, at `trials_a_week`.
        false_rollbacks: releases rolled back by the guard or against the verified release, if none is worse.

    Example: ``Spent(trials=12, verdicts=40, false_ships=0.6, false_stops=0.3, stops_allowed=2.0, false_rollbacks=0.24)``
    """

    trials: int
    verdicts: int
    false_ships: float
    false_stops: float
    stops_allowed: float
    false_rollbacks: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast releases may follow each other, and the recent risk. `tried`: candidates are tried on users.

    Example: ``Pace(traffic=Traffic(...), cadence=Cadence(...), spent=Spent(...), tried=True)``
    """

    traffic: Traffic | None
    cadence: Cadence | None
    spent: Spent
    tried: bool


def spent(
    history: PaceHistory,
    config: TrialConfig,
    *,
    tried: bool,
    gate_alpha: float,
    now: float,
    guard: GuardConfig | None = None,
    standing: StandingConfig | None = None,
) -> Spent:
    """Return the error budget spent: the sum of the levels of the recent decisions.

    `tried`: candidates are tried on users. `gate_alpha`: the gate's level for one candidate. `guard`, `standing`: None where they do not
    run. The guard's alpha is per release, including the one live at the start of `WEEKS`.
    """
    since = now - WEEKS * WEEK
    trials = sum(each.at >= since for each in history.trials)
    verdicts = sum(at >= since for at in history.verdicts)
    live = sum(at >= since for at in history.moved) + any(at < since for at in history.moved)
    stop_alpha = min(0.05, config.false_stops / config.trials_a_week)
    return Spent(
        trials=trials,
        verdicts=verdicts,
        false_ships=trials * config.ship_alpha if tried else verdicts * gate_alpha,
        false_stops=history.trying.periods(config.retest_s, since, now) * stop_alpha if tried else 0.0,
        stops_allowed=WEEKS * config.false_stops,
        false_rollbacks=(0.0 if guard is None else live * guard.alpha)
        + (0.0 if standing is None else history.standing.periods(standing.period_s, since, now) * standing.alpha),
    )
