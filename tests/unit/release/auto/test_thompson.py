"""Probabilities of being the best against the closed form of two arms and against draws from the posteriors."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from ostinato.release.auto.posterior import (
    Belief,
    Worth,
    best_probabilities,
    drawn,
    probabilities,
    utility,
    with_failures,
)


def belief(mean, deviation, users=10.0):
    return Belief(mean=mean, deviation=deviation, users=users)


@pytest.mark.parametrize(
    ("a", "b"),
    [((0.6, 0.1), (0.5, 0.1)), ((0.6, 0.5), (0.5, 0.001)), ((0.0, 1e-4), (0.0002, 1.0)), ((0.9, 0.01), (0.1, 0.01))],
)
def test_two_arms_are_the_closed_form(a, b):
    expected = NormalDist().cdf((a[0] - b[0]) / math.hypot(a[1], b[1]))
    best_A = best_probabilities([belief(*a), belief(*b)])
    assert best_A[0] == pytest.approx(expected, abs=1e-6)
    assert best_A.sum() == pytest.approx(1.0, abs=1e-12)


def test_many_arms_are_what_draws_from_the_posteriors_say():
    means_A, deviations_A = np.array([0.5, 0.52, 0.4, 0.55, 0.1]), np.array([0.02, 0.05, 0.2, 0.03, 0.5])
    draws = np.random.default_rng(1).normal(means_A, deviations_A, (400_000, 5)).argmax(axis=1)
    expected_A = np.bincount(draws, minlength=5) / 400_000
    best_A = best_probabilities([belief(m, s) for m, s in zip(means_A, deviations_A, strict=True)])
    assert best_A == pytest.approx(expected_A, abs=0.004)


def test_equal_arms_share_alike_and_the_order_does_not_matter():
    assert best_probabilities([belief(0.3, 0.1)] * 4) == pytest.approx(0.25)
    arms = [belief(0.5, 0.1), belief(0.4, 0.3), belief(0.6, 0.05)]
    assert best_probabilities(arms)[::-1] == pytest.approx(best_probabilities(arms[::-1]))
    assert best_probabilities(arms[:1]) == [1.0]


def test_every_arm_keeps_its_floor():
    arms = {"good": belief(0.9, 0.001), "bad": belief(0.1, 0.001), "new": belief(0.0, 0.001)}
    odds = probabilities(arms, floor=0.02)
    assert odds == pytest.approx({"good": 0.96, "bad": 0.02, "new": 0.02})
    assert sum(odds.values()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("floor", [-0.1, 0.4])
def test_a_floor_that_cannot_be_is_refused(floor):
    with pytest.raises(ValueError, match="floor"):
        probabilities({"a": belief(0.5, 0.1), "b": belief(0.5, 0.1), "c": belief(0.5, 0.1)}, floor)


@pytest.mark.parametrize("arms", [[], [belief(math.nan, 0.1)], [belief(0.5, 0.0), belief(0.5, 0.1)]])
def test_arms_without_a_distribution_are_refused(arms):
    with pytest.raises(ValueError, match="arm"):
        best_probabilities(arms)


def test_utility_takes_metrics_by_their_worth_and_money_off():
    worth = Worth(weights={"reward": 1.0, "complaints": -0.5}, price=2.0)
    beliefs = {"reward": belief(0.6, 0.02, 40.0), "complaints": belief(0.2, 0.01, 30.0), "unused": belief(9.0, 9.0)}
    assert utility(beliefs, 0.05, worth) == Belief(
        mean=pytest.approx(0.6 - 0.1 - 0.1), deviation=pytest.approx(0.02 + 0.005), users=30.0
    )
    with pytest.raises(KeyError):
        utility({}, 0.0, worth)


def test_a_dearer_arm_must_be_better_by_its_price():
    equal = {"reward": belief(0.6, 0.02)}
    worth = Worth(price=2.0)
    odds = probabilities({"cheap": utility(equal, 0.0, worth), "dear": utility(equal, 0.05, worth)}, floor=0.0)
    assert odds["cheap"] > 0.99


def test_drawn_arms_come_as_often_as_they_should():
    odds = {"a": 0.5, "none": 0.0, "b": 0.3, "c": 0.2}
    counts = dict.fromkeys(odds, 0)
    for place in np.random.default_rng(2).random(20_000):
        counts[drawn(odds, place)] += 1
    assert {arm: count / 20_000 for arm, count in counts.items()} == pytest.approx(odds, abs=0.012)


def test_drawing_at_the_edges():
    assert drawn({"a": 0.5, "b": 0.5}, 0.5) == "b"
    assert drawn({"a": 0.9999999, "none": 0.0}, 0.99999999) == "a"
    with pytest.raises(ValueError, match="no arm"):
        drawn({"a": 0.0}, 0.5)


def test_what_fails_earns_the_least_and_the_rest_their_mean():
    found = with_failures(belief(0.6, 0.1, 80.0), belief(0.25, 0.02, 200.0), low=-1.0)
    assert found.mean == pytest.approx(0.25 * -1.0 + 0.75 * 0.6)
    assert found.deviation == pytest.approx(0.75 * 0.1 + 1.6 * 0.02)
    assert found.users == pytest.approx(0.25 * 200.0 + 0.75 * 80.0)


def test_the_deviation_with_failures_holds_however_the_two_hang_together():
    rng = np.random.default_rng(0)
    for correlation in (-1.0, 0.0, 1.0):
        means, rates = rng.multivariate_normal(
            [0.6, 0.1], [[0.05**2, correlation * 0.05 * 0.02], [correlation * 0.05 * 0.02, 0.02**2]], 20_000
        ).T
        spread = float((rates * -1.0 + (1.0 - rates) * means).std())
        assert spread <= 1.02 * with_failures(belief(0.6, 0.05, 9.0), belief(0.1, 0.02, 9.0), low=-1.0).deviation
