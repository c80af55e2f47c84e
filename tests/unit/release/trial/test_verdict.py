"""What the evidence on several metrics allows to say together."""

import math

import pytest

from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.metric import metrics_of
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.contrast import NOTHING, Effect, log_evidence
from ostinato.release.trial.group_sequential import GroupSequentialTest, ShipPlan
from ostinato.release.trial.verdict import display, read

CONFIG = TrialConfig()


def effect(difference, error=0.01, *, people=100.0, freedom=100.0):
    return Effect(difference=difference, variance=error**2, people=people, freedom=freedom, turns=5000.0)


def goals(*names, **fields):
    return metrics_of([MetricConfig(name=name, role="goal", numerator=("x",), **fields) for name in names], 0.02)


def with_evidence(odds):
    """An effect of an error of one point whose evidence for 'better' is so many to one."""
    low, high = 0.0, 0.2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if log_evidence(middle, 1e-4, 1) >= math.log(odds) else (middle, high)
    return effect(high)


@pytest.mark.parametrize(
    ("odds", "better"),
    [
        ((49, 1, 1), set()),
        ((51, 1, 1), set()),
        ((151, 1, 1), {"a"}),
        ((151, 99, 1), {"a"}),
        ((151, 101, 1), {"a", "b"}),
        ((151, 101, 49), {"a", "b"}),
        ((51, 101, 151), {"a", "b", "c"}),
        ((140, 140, 140), set()),
    ],
)
def test_better_is_said_of_the_goals_that_holm_leaves(odds, better):
    effects = {name: with_evidence(each) for name, each in zip("abc", odds, strict=True)}
    found = read(effects, goals("a", "b", "c"), CONFIG)
    assert {name for name, reading in found.items() if reading.better} == better


def test_a_lone_goal_is_better_at_the_odds_that_are_set():
    for odds, better in ((49, False), (51, True)):
        assert read({"a": with_evidence(odds)}, goals("a"), CONFIG)["a"].better is better


def test_lower_is_better_where_it_is_said_and_people_read_what_was_measured():
    metrics = metrics_of(
        [
            MetricConfig(name="a", role="goal", numerator=("x",)),
            MetricConfig(name="tokens", direction="lower", numerator=("turn.tokens",), most=2000.0, tolerance=40.0),
        ],
        0.02,
    )
    found = read({"a": effect(0.0), "tokens": effect(0.08)}, metrics, CONFIG)
    assert found["tokens"].worse
    shown = display(found["tokens"], metrics[1], None)
    assert shown["estimate"] == pytest.approx(160.0)
    assert shown["lower"] < 160.0 < shown["upper"]
    assert (shown["direction"], shown["tolerance"], shown["worse"]) == ("lower", 40.0, True)
    assert not read({"a": effect(0.0), "tokens": effect(-0.08)}, metrics, CONFIG)["tokens"].worse


def test_a_guardrail_is_not_held_up_by_a_comparator_that_hardly_has_the_event():
    metrics = metrics_of([MetricConfig(name="acceptance"), MetricConfig(name="failed")], 0.02)
    rare = effect(0.3, people=3.0, freedom=40.0)
    found = read({"acceptance": rare, "failed": rare}, metrics, CONFIG)
    assert (found["acceptance"].enough, found["failed"].enough) == (False, True)
    assert found["failed"].worse
    assert not read({"acceptance": rare, "failed": effect(0.3, freedom=19.0)}, metrics, CONFIG)["failed"].worse


def test_of_what_nobody_said_nothing_is_told():
    (metric,) = goals("a")
    reading = read({"a": NOTHING}, [metric], CONFIG)["a"]
    assert (reading.enough, reading.worse, reading.not_worse, reading.better) == (False, False, False, False)
    shown = display(reading, metric, None)
    assert [shown[key] for key in ("estimate", "lower", "upper")] == [None, None, None]


def test_a_goal_with_planned_looks_is_not_worse_by_the_last_of_them_alone():
    """At an error of 0.85 points and a margin of two, the plan's whole information rules the margin out, and the sequence does not."""
    plan = ShipPlan(information={"a": 1 / 0.0085**2}, alpha=0.05, limit_s=9.0)

    def reading(*looks, now):
        test = GroupSequentialTest(plan.information["a"], plan)
        for seconds, found in enumerate(looks):
            test.add(found, float(seconds))
        return read({"a": now}, goals("a"), CONFIG, {"a": test})["a"]

    equal, sure = effect(0.0, 0.0085), effect(0.0, 0.004)
    assert not read({"a": equal}, goals("a"), CONFIG)["a"].not_worse
    planned = reading(equal, now=equal)
    assert planned.not_worse
    assert -0.02 < planned.bound < -0.014
    assert read({"a": sure}, goals("a"), CONFIG)["a"].not_worse
    early = reading(now=sure)
    assert (early.not_worse, early.bound) == (False, None), (
        "the sequence does not ship beside the plan: that would spend alpha twice"
    )
    assert not reading(equal, effect(-0.01, 0.005), now=equal).not_worse, "the last look, not the best one"
    assert not reading(equal, now=effect(0.0, 0.0085, people=3.0)).not_worse, "too few people"
