"""One trial: a candidate on a growing share of users, then live beside a share of users who stay on the release before it.

It has no clock and no refs: slots of outcomes go in, decisions come out. The same slots give the same decisions, so a restarted worker that
reads the log again ends in the same state, and a repeated look costs nothing.

`RecentPeriod` looks at recent outcomes alone. A new version may please for a day and harm afterwards, which the first days would hide in
the figures of the whole trial. So every metric is also tallied in successive periods, and a release that was called better is tested again
on the period that follows.

`ArmBalance` tests for a sample ratio mismatch: whether people were assigned to the arms in the configured shares. If not, the arms differ
in who is in them, and outcomes mean nothing. The test is valid at any time: a Bayes factor whose probability of ever reaching B, if the
shares are right, is at most 1/B (Lindon and Malek, arXiv 2011.03567). It is also applied to users who come back on a later day: if fewer of
them are the candidate's than a tolerated loss of `returned` explains, its turns represent only those who stayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.release.metrics.config import DEFAULT_GOAL, MetricConfig
from ostinato.release.metrics.metric import Metric
from ostinato.release.trial import verdict
from ostinato.release.trial.config import HOUR, Require, TrialConfig
from ostinato.release.trial.contrast import Contrast, Effect, Indices, TimeSlot, contrast_of
from ostinato.release.trial.group_sequential import GroupSequentialTest, ShipPlan
from ostinato.release.trial.verdict import Decision, MetricReading, NextAction

# ---------------------------------------------------------------- balance


_CONCENTRATION = 1000.0
"""Dirichlet concentration of the alternatives. At 1,000, a 50% arm that gets 52% is detected in 20,000 people nine times in ten."""


class ArmBalance:
    """Tests the assignment to arms. It counts each person at their first turn of a trial, by arm, under the shares in force then.

    Each change of shares begins a new Bayes factor. The product of all factors is judged, so a ramp cannot hide a mismatch.
    """

    def __init__(self) -> None:
        self._earlier = 0.0
        self._shares: tuple[float, ...] = ()
        self._counts: list[float] = []

    def add(self, newcomers: Sequence[int], shares: Sequence[float]) -> None:
        """Add `newcomers` by arm, who came while `shares` were in force. Shares sum to 1; an arm of share 0 must get nobody.

        Raises:
            ValueError: `newcomers` and `shares` differ in length, or the shares do not sum to 1.
        """
        if len(newcomers) != len(shares) or abs(sum(shares) - 1.0) > 1e-9:
            raise ValueError(f"{len(newcomers)} arms with shares {tuple(shares)}: one share each, 1 in all")
        used = tuple(shares)
        if used != self._shares:
            self._earlier, self._shares, self._counts = self.log_factor(), used, [0.0] * len(used)
        self._counts = [count + new for count, new in zip(self._counts, newcomers, strict=True)]

    def log_factor(self) -> float:
        """Return the logarithm of the Bayes factor against the set shares. A trial is void from log 1000 on (`imbalance`)."""
        total = sum(self._counts)
        if not total:
            return self._earlier
        factor = math.lgamma(_CONCENTRATION) - math.lgamma(_CONCENTRATION + total)
        for count, share in zip(self._counts, self._shares, strict=True):
            if share > 0.0:
                prior = _CONCENTRATION * share
                factor += math.lgamma(prior + count) - math.lgamma(prior) - count * math.log(share)
            elif count:
                return math.inf
        return self._earlier + factor


# ---------------------------------------------------------------- the newest period


class RecentPeriod:
    """The effects of the newest period alone.

    Periods of `period_s` are counted from the start of the trial; a new one begins when the release is called better.
    """

    def __init__(self, metrics: Sequence[Metric], period_s: float, most_turns_a_day: float) -> None:
        self._period_s = period_s
        self._metrics, self._most = tuple(metrics), most_turns_a_day
        self._upto_s = 0.0
        self.since_s = 0.0
        self._contrasts = {metric.name: contrast_of(metric, most_turns_a_day) for metric in metrics}
        self.afterwards: Mapping[str, Effect] | None = None
        """The effects of the first whole period after the release was called better."""

    def add(self, outcomes: Mapping[str, Mapping[str, TimeSlot]], ended_s: float, better_s: float | None) -> None:
        """Add a slot that ended at `ended_s`. `better_s`: when the release was called better; None if it was not."""
        began_s, self._upto_s = self._upto_s, max(ended_s, self._upto_s)
        anew = -math.inf if better_s is None or began_s < better_s else better_s
        if self.since_s < anew or began_s - self.since_s >= self._period_s:
            self.since_s = began_s
            self._contrasts = {metric.name: contrast_of(metric, self._most) for metric in self._metrics}
        for name, slots in outcomes.items():
            for slot in slots.values():
                self._contrasts[name].add(slot)
        whole = self._upto_s - self.since_s >= self._period_s
        if whole and self.since_s >= anew > -math.inf and self.afterwards is None:
            self.afterwards = self.effects()

    def effects(self) -> dict[str, Effect]:
        """Return the effects of the current period so far."""
        return {name: contrast.effect() for name, contrast in self._contrasts.items()}


# ---------------------------------------------------------------- the trial


_MOST_TENANTS = 20
_NO_THRESHOLDS: Mapping[str, float | None] = MappingProxyType({})


def first_share(config: TrialConfig, active: float) -> float:
    """Return the share of users with which a trial begins: with `active` users on an ordinary day, it reaches `first_people` of them."""
    return min(max(config.shares[0], config.first_people / max(active, 1.0)), config.shares[-1])


class Trial:
    """A trial, from the first per cent of users until the next trial begins. Shares are of the users who take part, other arms left out.

    Before the candidate ships, its arm is compared with live; afterwards, live with the users who stay behind. It is one comparison of the
    same two versions throughout, with one error budget.

    Args:
        active: users of an ordinary day who take part (`first_share`).
        metrics: the metrics to compare, goals first (`metrics_of`). Without any, acceptance is the goal and nothing else is watched.
        plan: the plan of the looks that decide whether it goes live; without one, the confidence sequence decides at any look.
    """

    def __init__(
        self, config: TrialConfig, *, active: float, metrics: Sequence[Metric] = (), plan: ShipPlan | None = None
    ) -> None:
        self._config = config
        self._metrics = tuple(metrics) or (Metric.of(MetricConfig(name=DEFAULT_GOAL), config.margin),)
        self._goals = [metric for metric in self._metrics if metric.role == "goal"]
        self._contrasts = {metric.name: contrast_of(metric, config.most_turns_a_day) for metric in self._metrics}
        planned = {} if plan is None else plan.information
        self._tests = {
            goal.name: GroupSequentialTest(planned[goal.name], plan)
            for goal in self._goals
            if plan is not None and goal.name in planned
        }
        self._recent = RecentPeriod(self._metrics, config.retest_s, config.most_turns_a_day)
        self._by_tenant: dict[str, dict[str, Contrast]] = {goal.name: {} for goal in self._goals}
        self._balance = ArmBalance()
        self._back = ArmBalance()
        self._missing = 0.0  # expected minus actual returning users of the candidate, at the tolerated loss
        self._seen_U: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._back_U: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.share = first_share(config, active)
        self.require: Require = "no_loss"
        self.thresholds = _NO_THRESHOLDS
        self.shipped = False
        self.over = False
        self.better_s: float | None = None
        """When the candidate was called better, in seconds after the start."""
        self.retested: bool | None = None
        """Whether that held in the period after it; None until that period is over."""

    def add(self, came: TimeSlot, outcomes: Mapping[str, Mapping[str, TimeSlot]], ended_s: float) -> None:
        """Add a slot in which the candidate's share was `share`: the people who came, and each stratum's outcomes by metric.

        A stratum is a tenant, or `POOLED`. Arms are compared within each stratum, and a person belongs to exactly one. The slot ended
        `ended_s` seconds after the start.
        """
        for name, slots in outcomes.items():
            for stratum, slot in slots.items():
                self._contrasts[name].add(slot)
                self._add_tenant(name, stratum, slot)
        for goal in () if self.shipped else self._goals:
            if goal.name in self._tests:
                effect = verdict.in_goal_direction(self._contrasts[goal.name].effect(), goal)
                if verdict.enough(effect, goal, self._config):
                    self._tests[goal.name].add(effect, ended_s)
        self._recent.add(outcomes, ended_s, self.better_s)
        self._count_newcomers(came)

    def look(self, elapsed_s: float) -> Decision:
        """Return the decision `elapsed_s` after the start. From then on, the share that it names is in force."""
        effects = {name: contrast.effect() for name, contrast in self._contrasts.items()}
        # planned looks end when the candidate goes live; whether it stays is decided on all outcomes
        readings = verdict.read(effects, self._metrics, self._config, {} if self.shipped else self._tests)
        goals = [readings[goal.name] for goal in self._goals]
        decision = (
            self._void(goals[0])
            or self._worse_goal(goals)
            or self._worse_guardrail(readings)
            or (self._proving(goals, elapsed_s) if self.shipped else self._canary(goals, readings, elapsed_s))
        )
        self.share = decision.share
        return replace(decision, reading=replace(decision.reading, metrics=self._displayed(readings)))

    def _add_tenant(self, name: str, stratum: str, slot: TimeSlot) -> None:
        """Also tally goals by tenant, for the first `_MOST_TENANTS` tenants: for display, not for decisions."""
        by_tenant = self._by_tenant.get(name)
        if by_tenant is None or (stratum not in by_tenant and len(by_tenant) >= _MOST_TENANTS):
            return
        by_tenant.setdefault(stratum, Contrast(self._config.most_turns_a_day)).add(slot)

    def _displayed(self, readings: Mapping[str, MetricReading]) -> Mapping[str, Mapping[str, Any]]:
        """Return every metric's reading for display; for goals also each tenant's bounds, if there are several tenants."""
        every: dict[str, Mapping[str, Any]] = {}
        for metric in self._metrics:
            own = self._by_tenant.get(metric.name, {})
            tenants = {
                name: verdict.bounds_of(contrast.effect(), metric, self._config)
                for name, contrast in own.items()
                if len(own) > 1
            }
            found = verdict.display(readings[metric.name], metric, self.thresholds.get(metric.name))
            every[metric.name] = found | ({"tenants": tenants} if tenants else {})
        return every

    def _canary(
        self, goals: Sequence[MetricReading], readings: Mapping[str, MetricReading], elapsed_s: float
    ) -> Decision:
        weakest = min(goals, key=lambda goal: goal.lower)
        held = all(goal.not_worse for goal in goals)
        gained = self._gained(goals, elapsed_s)
        beyond = self._suspect_guardrail(readings)
        if held and not beyond and (self.require == "no_loss" or gained):
            self.shipped = True
            why = self._not_worse(goals) if self.require == "no_loss" else self._better(gained)
            why += self._without_data(readings)
            return Decision(next=NextAction.SHIP, share=1.0 - self._config.holdback, reason=why, reading=goals[0])
        if elapsed_s >= self._config.limit_s:
            if beyond:
                return self._end(NextAction.BLOCK, f"not enough evidence: {self._looks_worse(beyond)}", beyond)
            if held:
                return self._end(NextAction.BLOCK, f"not shown to be better: {self._intervals(goals)}", goals[0])
            return self._end(NextAction.BLOCK, f"not enough evidence: {self._undecided(goals)}", weakest)
        share = max([self.share, *(step for step in self._config.shares if self._within_risk(step, goals))])
        if share > self.share:
            why = f"a loss of more than {_points(-weakest.lower)} is ruled out"
            return Decision(next=NextAction.RAMP, share=share, reason=why, reading=weakest)
        why = f"undecided: {self._looks_worse(beyond) if held and beyond else self._undecided(goals)}"
        return Decision(next=NextAction.WAIT, share=self.share, reason=why, reading=weakest)

    def _proving(self, goals: Sequence[MetricReading], elapsed_s: float) -> Decision:
        if harm := self._harmed_lately():
            over = f"over the last {_hours(elapsed_s - self._recent.since_s)}"
            return self._end(NextAction.ROLL_BACK, f"{self._named(harm)}worse {over}: {self._change(harm)}", harm)
        if self.better_s is not None and self.retested is None and self._recent.afterwards is not None:
            return self._retest(goals)
        gained = self._gained(goals, elapsed_s)
        if gained and all(goal.not_worse for goal in goals) and self.better_s is None:
            self.better_s = elapsed_s
            return Decision(next=NextAction.BETTER, share=self.share, reason=self._better(gained), reading=gained[0])
        why = self._better(goals) if self.better_s is not None and self.retested is None else self._not_worse(goals)
        return Decision(next=NextAction.WAIT, share=self.share, reason=why, reading=goals[0])

    def _retest(self, goals: Sequence[MetricReading]) -> Decision:
        """Decide whether any goal is better in the period after the release was called better, from that period alone."""
        assert self._recent.afterwards is not None
        since = verdict.read(self._recent.afterwards, self._metrics, self._config)
        again = [since[goal.name] for goal in self._goals]
        held = [goal for goal in again if goal.enough and goal.lower > 0.0]
        self.retested = bool(held)
        over = f"over the {_hours(self._config.retest_s)} that followed"
        if held:
            why = f"better, and {over} too: {self._intervals(held)}"
            return Decision(next=NextAction.CONFIRMED, share=self.share, reason=why, reading=goals[0])
        why = f"better at first, but not {over}: {self._intervals(again)}"
        return Decision(next=NextAction.FADED, share=self.share, reason=why, reading=goals[0])

    def _harmed_lately(self) -> MetricReading | None:
        """Return a goal or guardrail that is worse in the newest period alone, unless that is the first, which `look` has judged."""
        if self._recent.since_s <= 0.0:
            return None
        readings = verdict.read(self._recent.effects(), self._metrics, self._config)
        watched = (metric.name for metric in self._metrics if metric.role != "diagnostic")
        return next((readings[name] for name in watched if readings[name].worse), None)

    def _gained(self, goals: Sequence[MetricReading], elapsed_s: float) -> list[MetricReading]:
        """Return the goals that are better, once `better_after_s` is over, as novelty may please users for a while."""
        return [goal for goal in goals if goal.better] if elapsed_s >= self._config.better_after_s else []

    def _worse_goal(self, goals: Sequence[MetricReading]) -> Decision | None:
        harm = next((goal for goal in goals if goal.worse), None)
        if harm is None:
            return None
        return self._end(self._stopping, f"{self._named(harm)}worse: {self._change(harm)}", harm)

    @property
    def _stopping(self) -> NextAction:
        return NextAction.ROLL_BACK if self.shipped else NextAction.BLOCK

    def _within_risk(self, share: float, goals: Sequence[MetricReading]) -> bool:
        return all(goal.enough and share * max(-goal.lower, 0.0) <= self._config.risk for goal in goals)

    def _suspect_guardrail(self, readings: Mapping[str, MetricReading]) -> MetricReading | None:
        """Return a guardrail that looks worse than tolerated though it is not proven; it keeps the candidate from going live.

        A metric of users' days is far less precise than one of turns. Its point estimate would often hold an equal version until the time
        limit by chance, so it must exceed its tolerance in a test of level `ship_alpha`. A metric of the worst-off users, who are few,
        never holds a candidate; it stops one only once the harm is proven.
        """
        errors = -NormalDist().inv_cdf(self._config.ship_alpha)
        for metric in (metric for metric in self._metrics if metric.role == "guardrail" and metric.tail is None):
            effect = readings[metric.name].effect
            doubt = errors * math.sqrt(effect.variance) if metric.daily else 0.0
            if effect.difference < -metric.allowed - doubt:
                return readings[metric.name]
        return None

    def _void(self, goal: MetricReading) -> Decision | None:
        if self._balance.log_factor() >= math.log(self._config.imbalance):
            why = "users were not assigned to the arms in the configured shares (sample ratio mismatch): the comparison is void"
            return self._end(self._stopping, why, goal)
        if self._missing > 0.0 and self._back.log_factor() >= math.log(self._config.imbalance):
            why = (
                "fewer of the candidate's users came back than of the others: its turns represent only those who stayed"
            )
            return self._end(self._stopping, why, goal)
        return None

    def _worse_guardrail(self, readings: Mapping[str, MetricReading]) -> Decision | None:
        for metric in self._metrics:
            reading = readings[metric.name]
            if metric.role == "guardrail" and reading.worse:
                why = f"{metric.name} worse: {self._change(reading)}, more than {self._tolerated(reading)}"
                return self._end(self._stopping, why, reading)
        return None

    def _end(self, what: NextAction, reason: str, reading: MetricReading) -> Decision:
        self.over = True
        return Decision(next=what, share=0.0, reason=reason, reading=reading)

    def _count_newcomers(self, came: TimeSlot) -> None:
        """Count newcomers by arm, under the share that was in force in the slot."""
        self._seen_U, treated, comparator = _newcomers(self._seen_U, came.people_R, came.treated_R)
        self._balance.add((treated, comparator), (self.share, 1.0 - self.share))

    def come_back(self, day: TimeSlot, share: float) -> None:
        """Count the users who came back on a day that is over, each once, by arm.

        `day` has one row for each user who had come before, with the outcome 1 if they came again. `share`: the candidate's share of users
        when the day began.
        """
        tolerated = next((metric.allowed for metric in self._metrics if metric.name == "returned"), 0.0)
        came_R, others_R = day.good_R > 0.0, ~day.treated_R
        rate = float(came_R[others_R].mean()) if others_R.any() else 0.0
        if rate <= tolerated:
            return
        share *= (1.0 - tolerated / rate) / (1.0 - share * tolerated / rate)
        self._back_U, treated, comparator = _newcomers(self._back_U, day.people_R[came_R], day.treated_R[came_R])
        self._back.add((treated, comparator), (share, 1.0 - share))
        self._missing += share * (treated + comparator) - treated

    # ------------------------------------------------------------------------------------------------- reasons as text

    def _named(self, reading: MetricReading) -> str:
        """Return the goal's name if there are several goals, else ""."""
        return f"{reading.metric} " if len(self._goals) > 1 else ""

    def _of(self, reading: MetricReading) -> Metric:
        return next(metric for metric in self._metrics if metric.name == reading.metric)

    def _tolerated(self, reading: MetricReading) -> str:
        metric = self._of(reading)
        return _amount(metric.tolerance, metric)

    def _change(self, reading: MetricReading) -> str:
        """Return treated minus comparator, in the metric's own direction."""
        metric = self._of(reading)
        return _amount(metric.sign * metric.most * reading.effect.difference, metric, sign=True)

    def _interval(self, reading: MetricReading) -> str:
        metric = self._of(reading)
        low, high = sorted(metric.sign * bound for bound in (reading.lower, reading.upper))
        if metric.most == 1.0:
            return f"{self._change(reading)} [{100 * low:+.1f}, {100 * high:+.1f}]"
        return f"{self._change(reading)} [{metric.most * low:+.3g}, {metric.most * high:+.3g}]"

    def _intervals(self, readings: Sequence[MetricReading]) -> str:
        return "; ".join(f"{self._named(reading)}{self._interval(reading)}" for reading in readings)

    def _better(self, goals: Sequence[MetricReading]) -> str:
        return f"better (provisional): {self._intervals(goals)}"

    def _not_worse(self, goals: Sequence[MetricReading]) -> str:
        each = (
            f"{self._named(goal)}not worse than {self._tolerated(goal)}: {self._interval(goal)}{self._rule(goal)}"
            for goal in goals
        )
        return "; ".join(each)

    def _rule(self, goal: MetricReading) -> str:
        """Return the rule that found the goal not worse."""
        test, metric = self._tests.get(goal.metric), self._of(goal)
        if test is None or goal.bound is None:
            return ", by the confidence sequence"
        least = _amount(metric.sign * metric.most * goal.bound, metric, sign=True)
        end = "at most" if metric.sign < 0 else "at least"
        return f", by look {test.looks} of the group-sequential plan ({test.fraction:.0%} of its information): {end} {least}"

    def _looks_worse(self, reading: MetricReading) -> str:
        return (
            f"{reading.metric} looks worse by more than the tolerated {self._tolerated(reading)} ({self._change(reading)}), "
            "though not proven"
        )

    def _without_data(self, readings: Mapping[str, MetricReading]) -> str:
        """Name the guardrails without data in the reason, since no data is not a pass."""
        names = [
            metric.name
            for metric in self._metrics
            if metric.role == "guardrail" and not readings[metric.name].effect.turns
        ]
        return f"; no data for {', '.join(names)}" if names else ""

    def _undecided(self, goals: Sequence[MetricReading]) -> str:
        """Explain the delay by the goal that causes it: one without data, else the one that is known least precisely."""
        least = max(goals, key=lambda goal: goal.sees)
        if not math.isfinite(least.sees):
            about = f" for {least.metric}" if len(self._goals) > 1 else ""
            return f"no feedback on it yet{about}"
        seen = _amount(self._of(least).most * least.sees, self._of(least))
        return f"with {least.effect.people:.0f} effective users this trial can see losses of {seen} or more"


def _amount(value: float, metric: Metric, *, sign: bool = False) -> str:
    """Format a value: in percentage points for a share, else in the metric's own units."""
    if metric.most == 1.0:
        return f"{100 * value:+.1f} pp" if sign else _points(value)
    return f"{value:+.3g}" if sign else f"{value:.3g}"


def _newcomers(
    seen_U: NDArray[np.bool_], people_R: Indices, treated_R: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], int, int]:
    """Return `seen_U` with these people added, and how many of them are new: treated, not treated."""
    more = int(people_R.max(initial=-1)) + 1 - len(seen_U)
    if more > 0:
        seen_U = np.concatenate([seen_U, np.zeros(more + len(seen_U), dtype=np.bool_)])
    new_R = ~seen_U[people_R]
    treated = int((new_R & treated_R).sum())
    seen_U[people_R] = True
    return seen_U, treated, int(new_R.sum()) - treated


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR:.0f} hours"


def _points(value: float) -> str:
    return f"{100 * value:.1f} pp"
