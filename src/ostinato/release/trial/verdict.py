"""The conclusions that a trial's evidence allows, and the action that follows.

How the error budgets are shared:

- *Stopping* a harmless release has one budget for the whole trial. Half of it is split equally among the goals, half among the guardrails;
  by the union bound, no more than all of it is ever spent.
- *Going live* requires every goal to be not worse than its tolerance, each at `ship_alpha`. A candidate that loses on one goal passes with
  at most that probability, so nothing is divided. The test is a plan of looks if there is one (`trial.group_sequential`).
- *Better* are the goals that Holm's procedure (Holm 1979) selects on e-values, as 1/e is a p-value that is valid at every look. A fixed
  sequence would let the order of a list in a settings file decide what is tested first, and a gain on any goal is a gain.

A trial that goes on for longer than `retest_s` is also stopped by the outcomes of the newest such period. Each period gets the budget of a
trial anew, so `false_stops` holds for a week as long as trials and later periods together number no more than `trials_a_week`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from ostinato.release.metrics.metric import Metric
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.contrast import Effect, log_evidence, lower_bound, upper_bound
from ostinato.release.trial.group_sequential import GroupSequentialTest


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricReading:
    """One metric of a trial at a look, in shares, with the sign turned so that more is better.

    Attributes:
        enough: there is enough data; no conclusion is allowed without it.
        lower, upper: one-sided bounds of the confidence sequence, which hold at all looks together.
        sees: the smallest loss that this many people could have shown by now.
        bound: the lower bound of the last planned look, which alone decides whether a goal is `not_worse`; None if no look was planned or
            taken.
        metrics: the readings of every metric in their own units (`display`), as JSON types.

    Coverage with few people: the bounds treat the estimate as normal with a known variance. In simulations with users who differ and come
    back (`benchmarks.release.coverage`), the normal 95% interval of one look covers the truth in 88, 93 and 94% of the runs with 20, 50 and
    200 users in both arms together; Student's t with the effective users covers it in 95% or more. The bounds here are wider than either:
    looked at after every slot, a confidence-sequence bound of level 5% misses the truth in 2, 1 and 1% of the runs, and one of planned
    looks in 1, 4 and 4%. Below `min_people` nothing is decided.

    Example: ``MetricReading(metric="acceptance", effect=Effect(...), enough=True, lower=-0.014, upper=0.031, worse=False, not_worse=True,
    better=False, sees=0.02)``
    """

    metric: str
    effect: Effect
    enough: bool
    lower: float
    upper: float
    worse: bool
    not_worse: bool
    better: bool
    sees: float
    bound: float | None = None
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


def read(
    effects: Mapping[str, Effect],
    metrics: Sequence[Metric],
    config: TrialConfig,
    tests: Mapping[str, GroupSequentialTest] = MappingProxyType({}),
) -> dict[str, MetricReading]:
    """Judge the effects of all metrics, by name: goals and guardrails together, as the module's docstring describes.

    A goal that has one of the `tests` is not worse by that test's last look; the others by the confidence sequence.
    """
    harm_alphas = _harm_alphas(metrics, config)
    better = _better(effects, metrics, config)
    found = {
        metric.name: _read(effects[metric.name], metric, config, harm_alphas[metric.role], better=metric.name in better)
        for metric in metrics
    }
    for metric in metrics:
        if test := tests.get(metric.name):
            reading, bound = found[metric.name], test.lower if test.looks else None
            held = bound is not None and bound > -metric.allowed
            found[metric.name] = replace(reading, bound=bound, not_worse=reading.enough and held)
    return found


def _read(effect: Effect, metric: Metric, config: TrialConfig, harm_alpha: float, *, better: bool) -> MetricReading:
    effect = in_goal_direction(effect, metric)
    ready = enough(effect, metric, config)
    lower = lower_bound(effect.difference, effect.variance, config.ship_alpha)
    upper = upper_bound(effect.difference, effect.variance, config.ship_alpha)
    allowed = 0.0 if metric.role == "goal" else metric.allowed
    worse = log_evidence(effect.difference + allowed, effect.variance, -1) >= -math.log(harm_alpha)
    return MetricReading(
        metric=metric.name,
        effect=effect,
        enough=ready,
        lower=lower,
        upper=upper,
        worse=ready and worse,
        not_worse=ready and lower > -metric.allowed,
        better=ready and better,
        sees=upper_bound(0.0, effect.variance, harm_alpha),
    )


def in_goal_direction(effect: Effect, metric: Metric) -> Effect:
    """Return the effect with the sign turned so that more is better."""
    return replace(effect, difference=metric.sign * effect.difference)


def enough(effect: Effect, metric: Metric, config: TrialConfig) -> bool:
    """Return true if there are enough people and turns for a conclusion.

    For a guardrail, the degrees of freedom count instead of the smaller side's people: it is often a rare event that the comparator hardly
    has.
    """
    people = effect.people if metric.role == "goal" else effect.freedom
    return people >= config.min_people and effect.turns >= config.min_turns


def _harm_alphas(metrics: Sequence[Metric], config: TrialConfig) -> dict[str, float]:
    """Return by role the false-stop probability that one metric may spend. A diagnostic stops nothing; it is read at a goal's level."""
    total = min(0.05, config.false_stops / config.trials_a_week)
    goals, guardrails = (sum(metric.role == role for metric in metrics) for role in ("goal", "guardrail"))
    half = total / 2.0 if guardrails else total
    goal = half / max(goals, 1)
    return {"goal": goal, "guardrail": total / 2.0 / max(guardrails, 1), "diagnostic": goal}


def _better(effects: Mapping[str, Effect], metrics: Sequence[Metric], config: TrialConfig) -> frozenset[str]:
    """Return the metrics that are better: goals by Holm's procedure, largest evidence first; diagnostics each by itself."""
    evidence = {
        metric.name: log_evidence(metric.sign * effects[metric.name].difference, effects[metric.name].variance, 1)
        for metric in metrics
    }
    wanted = math.log(config.better_evidence)
    found = {metric.name for metric in metrics if metric.role != "goal" and evidence[metric.name] >= wanted}
    goals = sorted((metric.name for metric in metrics if metric.role == "goal"), key=lambda name: -evidence[name])
    for place, name in enumerate(goals):
        if evidence[name] < wanted + math.log(len(goals) - place):
            break
        found.add(name)
    return frozenset(found)


def display(reading: MetricReading, metric: Metric, threshold: float | None) -> dict[str, Any]:
    """Return a reading for display, in the metric's own units and direction: treated minus comparator, with None for what is not known yet.

    `threshold` is the value above which a quantile metric counts turns; `people` is the effective number.

    Example: ``{"role": "guardrail", "direction": "lower", "estimate": 0.012, "lower": 0.001, "upper": 0.023, "people": 61.0,
    "turns": 1204.0, "tolerance": 0.01, "enough": True, "worse": False, "not_worse": False, "better": False,
    "bound": None, "threshold": 4.1}``
    """
    return {
        "role": metric.role,
        "direction": "higher" if metric.sign > 0 else "lower",
        **_bounds(reading, metric),
        "turns": reading.effect.turns,
        "tolerance": metric.tolerance,
        "enough": reading.enough,
        "worse": reading.worse,
        "not_worse": reading.not_worse,
        "better": reading.better,
        "bound": None if reading.bound is None else metric.sign * metric.most * reading.bound,
        "threshold": threshold,
    }


def bounds_of(effect: Effect, metric: Metric, config: TrialConfig) -> dict[str, float | None]:
    """Return the bounds of an effect that decides nothing, in the form of `display`: estimate, lower, upper, people."""
    return _bounds(_read(effect, metric, config, config.ship_alpha, better=False), metric)


def _bounds(reading: MetricReading, metric: Metric) -> dict[str, float | None]:
    effect, scale = reading.effect, metric.sign * metric.most
    known = math.isfinite(effect.variance)
    low, high = sorted(scale * bound for bound in (reading.lower, reading.upper))
    return {
        "estimate": scale * effect.difference if known else None,
        "lower": low if known else None,
        "upper": high if known else None,
        "people": effect.people if metric.role == "goal" else effect.freedom,
    }


class NextAction(StrEnum):
    """The action that a look leads to."""

    WAIT = "wait"
    RAMP = "ramp"
    SHIP = "ship"
    BETTER = "better"
    CONFIRMED = "confirmed"
    FADED = "faded"
    BLOCK = "block"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The action to take, and the reason as a sentence for people. `share`: the candidate's share of users from now on.

    Example: ``Decision(next=NextAction.RAMP, share=0.25, reason="a loss of more than 4.1 pp is ruled out", reading=MetricReading(...))``
    """

    next: NextAction
    share: float
    reason: str
    reading: MetricReading
