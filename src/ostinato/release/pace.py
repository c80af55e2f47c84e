"""The pace of releases: recent trials, the cooldown after a rollback, the cadence that traffic allows, the error budget.

The ledger's times alone decide, so a restarted worker decides alike.

A trial ends once its evidence is large enough, so traffic sets the pace: a single test of a candidate that is as good as live passes, nine
times in ten, once the variance V of the difference is so small that ``(z(1 - alpha) + z(0.9)) sqrt(V) = margin``, as sample sizes of
equivalence tests are found (Julious, Statistics in Medicine 23, 2004). The plan of a trial's looks (`trial.group_sequential`) is made for
that information, or for what the traffic gives within the trial's time limit, if that is less.

The budget gives upper bounds on the expected number of wrong decisions in the last weeks.
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

KEPT = 50_000
"""The number of newest entries kept of each kind: of `WEEKS` weeks all, unless candidates come faster than one a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnd:
    """A trial that has ended. `passed`: its users showed what was required; otherwise it was stopped, or had too little evidence.

    Example: ``TrialEnd(at=90_000.0, seconds=82_800.0, passed=True)``
    """

    at: float
    seconds: float
    passed: bool


class Spans:
    """Stretches of time, one after the other; the last may still be open."""

    def __init__(self) -> None:
        self.over: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self.open: float | None = None

    def begin(self, at: float) -> None:
        """End the open stretch, if any, and begin another."""
        self.end(at)
        self.open = at

    def end(self, at: float) -> None:
        """End the open stretch, if any."""
        if self.open is not None:
            # a clock that was set back ends no stretch before it began
            self.over.append((self.open, max(at, self.open)))
        self.open = None

    def periods(self, seconds: float, since: float, now: float) -> int:
        """How many periods of length `seconds`, counted from each stretch's beginning, were under way after `since`; begun ones count."""
        spans = [*self.over, *([] if self.open is None else [(self.open, max(now, self.open))])]
        return sum(
            int((end - began) // seconds) - int((max(began, since) - began) // seconds) + 1
            for began, end in spans
            if end >= since
        )


class PaceHistory:
    """Recent trials, verdicts and releases, from the ledger's lines in their order."""

    def __init__(self) -> None:
        self.trials: deque[TrialEnd] = deque(maxlen=KEPT)
        self.verdicts: deque[float] = deque(maxlen=KEPT)
        """When the gate came to a verdict."""
        self._judged: tuple[str, float] | None = None
        self._judged_before: float | None = None
        self.moved: deque[float] = deque(maxlen=KEPT)
        """When a version other than the starting model was put live for the first time, or a version was put live again."""
        self.trying = Spans()
        """Comparisons of a candidate with live, and of live with the version it replaced."""
        self.standing = Spans()
        """Comparisons of live with the verified release, if there is an arm of it."""
        self._begun: tuple[str, float] | None = None
        self._tried: str | None = None

    def apply(self, event: ReleaseEvent) -> None:
        """Take in one more line."""
        self._compared(event)
        if event.action == "evaluated":
            self._evaluated(event)
        if event.action == "canary":
            self._begun = (event.policy.hash, event.at)
        elif self._begun is not None and event.action in _ENDS and event.policy.hash == self._begun[0]:
            began, self._begun = self._begun[1], None
            # a trial that a person ended does not tell how long trials take
            if "actor" not in event.detail:
                passed = event.action != "blocked"
                self.trials.append(TrialEnd(at=event.at, seconds=max(event.at - began, 0.0), passed=passed))
        elif event.action in ("shipped", "rolled_back"):
            self._begun = None

    def since_another(self, candidate: PolicyVersion, now: float) -> float | None:
        """How many seconds ago the gate last looked at another candidate, or came to an earlier verdict on this one; None: it never did."""
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
        # after a verdict even the same version is another candidate
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


_ENDS = ("shipped", "awaits_approval", "blocked")


# ---------------------------------------------------------------- cooldown


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """One rollback, as the ledger has it. `by_itself`: no person asked for it.

    Example: ``RolledBack(at=60.0, by_itself=True)``
    """

    at: float
    by_itself: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Brake:
    """Why nothing ships by itself. `until`: when that ends by itself; None where only a person's ship or approval ends it.

    Example: ``Brake(until=21_660.0, reason="v9 was rolled back: ...")``
    """

    until: float | None
    reason: str


def brake(rollbacks: Sequence[RolledBack], *, cooldown_s: float, a_day: int, now: float) -> Brake | None:
    """The brake that holds now, given the rollbacks since a person last shipped or approved a version, oldest first; None if none does.

    Once there were more than `a_day` rollbacks without a person within 24 hours, only a person ends the brake, however long ago that was.
    """
    own = [each.at for each in rollbacks if each.by_itself]
    for first, last in zip(own, own[a_day:], strict=False):
        if last - first < DAY:
            return Brake(
                until=None,
                reason=f"more rollbacks without a person within a day than release.rollbacks_a_day = {a_day} allows: nothing ships by "
                "itself until somebody ships or approves a version (`ostinato ship`, `ostinato approve`)",
            )
    # a rollback that lies further ahead was written by a wrong clock, and would hold for as long as that was ahead
    if rollbacks and abs(now - rollbacks[-1].at) < cooldown_s:
        return Brake(
            until=rollbacks[-1].at + cooldown_s,
            reason="after a rollback nothing ships by itself for a while (release.cooldown_s)",
        )
    return None


# ---------------------------------------------------------------- cadence


WEEK = 7 * DAY
POWER = 0.9
"""The probability with which a candidate that is as good as live must have shipped by the computed end."""
ALIKE = 0.15
"""The assumed intraclass correlation of one person's outcomes, where no trial has measured a variance yet."""
ENOUGH = 3
"""The number of passed trials from which on their measured durations replace the computed one."""
_BISECTIONS = 60
_INFLATION = 1.1
"""How much more information several looks need than a single test, for the same power."""


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
    """The variance of the difference by which an equally good candidate has shipped with probability `POWER`."""
    return (margin / _quantiles(alpha)) ** 2 / _INFLATION


def ship_plan(traffic: Traffic | None, allowed: Mapping[str, float], config: TrialConfig) -> ShipPlan | None:
    """The plan of a trial's looks; None if the traffic is not known: then the confidence sequence decides.

    `allowed` is the loss that each goal may show, as a share. The share of good turns is the first goal's; a plan that is wrong for another
    costs time, and no errors.
    """
    if traffic is None or not traffic.people or not traffic.turns:
        return None
    within = 1.0 / variance_of(traffic, config.limit_s / DAY, config.most_turns_a_day)
    alpha = config.ship_alpha
    planned = {goal: min((_quantiles(alpha) / loss) ** 2, within) if loss else within for goal, loss in allowed.items()}
    return ShipPlan(information=planned, alpha=alpha, limit_s=config.limit_s)


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
    """The margin that an equally good candidate passes with probability `POWER` at the variance of the time limit."""
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
    """The standard errors between no loss and the margin that a single test of this level and power needs."""
    normal = NormalDist()
    return normal.inv_cdf(1.0 - alpha) + normal.inv_cdf(POWER)


# ---------------------------------------------------------------- budget


WEEKS = 4
"""How far back decisions are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Upper bounds on the expected errors of the last `WEEKS` weeks.

    `false_ships`: candidates that shipped although they lose the margin, if all candidates lose it; by linearity of expectation the sum
    of the levels at which `trials`, or the gate's `verdicts` where candidates are not tried, were decided. `false_stops`: comparisons on
    users that ended as harmful, if none is: trials, releases beside the version they replaced, and their later periods; `stops_allowed` is
    what `release.trial.false_stops` allows for as long, at `trials_a_week`. `false_rollbacks`: releases that were taken back by the
    guard or beside the verified release, if none is worse.

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
    """Add up the levels. `tried`: candidates are tried on users; `gate_alpha`: the gate's level for one candidate.

    `guard` and `standing`: None where they do not run. The guard's alpha is per release, including the one live at the start of `WEEKS`.
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
