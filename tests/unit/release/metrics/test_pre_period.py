"""What is known of people before a trial."""

import pytest

from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.metric import Metric, Past

GOAL = Metric.of(MetricConfig(name="acceptance"), 0.02)
SLOW = Metric.of(MetricConfig(name="latency_p99"), 0.02)
ANN, BOB, EVE = ("acme", "ann"), ("acme", "bob"), ("bolt", "eve")


def test_a_persons_own_past_is_mixed_with_everybodys():
    past = Past((GOAL,))
    assert past.expected().of(ANN) == (0.5,), "nobody is known"
    for _ in range(6):
        past.remember(ANN, 1.0, {"accepted": 1.0})
        past.remember(BOB, 1.0, {"rejected": 1.0})
    past.remember(EVE, 1.0, {})
    expected = past.expected()
    assert expected.usual_M == (0.5,)
    assert [expected.of(who)[0] for who in (ANN, BOB, EVE, ("acme", "new"))] == pytest.approx([0.75, 0.25, 0.5, 0.5])
    past.remember(ANN, 2.0, {"rejected": 1.0})
    assert expected.of(ANN) == (0.75,), "what happens later does not change what was expected"


def test_it_is_mixed_by_turns_whatever_a_turns_denominator_is():
    words = MetricConfig(name="edited", role="goal", numerator=("edited",), denominator=("words",), most=1.0)
    ratios = []
    for size in (0.01, 1.0, 1000.0):
        past = Past((Metric.of(words, 0.02),))
        for _ in range(6):
            past.remember(ANN, 1.0, {"edited": size, "words": size})
            past.remember(BOB, 1.0, {"edited": 0.0, "words": size})
        ratios.append(past.expected().of(ANN)[0])
    assert ratios == pytest.approx([0.75] * 3)


def test_who_was_not_seen_lately_is_forgotten():
    past = Past((GOAL,))
    past.remember(ANN, 1.0, {})
    past.remember(BOB, 5.0, {})
    assert past.active(2.0) == {BOB}
    past.forget(1.0)
    assert past.active(0.0) == {BOB}


def test_tenants_with_enough_people_the_largest_first():
    past = Past((GOAL,))
    for tenant, people in (("acme", 3), ("bolt", 5), ("cone", 2)):
        for n in range(people):
            past.remember((tenant, f"u{n}"), 1.0, {})
    assert past.tenants(3) == ("bolt", "acme")


def test_a_quantile_is_known_from_five_values_beyond_it():
    past = Past((GOAL, SLOW))
    for n in range(499):
        past.remember(ANN, 1.0, {"turn.latency": float(n)})
    assert past.threshold(SLOW) is None
    past.remember(ANN, 1.0, {"turn.latency": 499.0})
    past.remember(ANN, 1.0, {})
    assert past.threshold(SLOW) == 494.0
    assert past.threshold(GOAL) is None
