"""The test of propensities: quiet while they are right, at every look; loud when they are not."""

import json

import numpy as np
import pytest

from ostinato.release.auto.offpolicy import PropensityTest
from ostinato.release.auto.posterior import drawn


def heard(rng, draws, logged, true=None):
    """So many draws from `true`, of which the log says `logged`."""
    test, chances = PropensityTest(), list((true or logged).values())
    for arm in rng.choice(list(logged), draws, p=chances):
        test.add(str(arm), logged)
    return test


def test_the_mean_of_the_inverse_is_one_while_propensities_are_right():
    test = heard(np.random.default_rng(1), 4000, {"a": 0.9, "b": 0.07, "c": 0.03})
    assert [balance.ratio for balance in test.balances()] == pytest.approx([1.0, 1.0, 1.0], abs=0.2)
    assert not test.wrong(alpha=0.05)


@pytest.mark.parametrize(
    ("logged", "true"),
    [
        ({"a": 0.5, "b": 0.5}, {"a": 0.56, "b": 0.44}),
        ({"a": 0.9, "b": 0.1}, {"a": 0.95, "b": 0.05}),
        ({"a": 0.8, "b": 0.15, "c": 0.05}, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}),
    ],
)
def test_a_wrong_propensity_is_caught(logged, true):
    caught = [bool(heard(np.random.default_rng(seed), 3000, logged, true).wrong(0.001)) for seed in range(5)]
    assert sum(caught) == 5


def test_an_arm_that_was_forgotten_in_the_draw_is_caught():
    test = PropensityTest()
    for _ in range(400):
        test.add("a", {"a": 0.95, "b": 0.05})
    assert test.wrong(0.001)


def test_looking_after_every_draw_raises_no_alarm_too_often():
    """Propensities that change all the time, 100 runs of 200 draws, each looked at 200 times: at most 5% may ever alarm."""
    rng, alarms = np.random.default_rng(2), 0
    for _ in range(100):
        test = PropensityTest()
        for _ in range(200):
            chances = 0.05 + 0.85 * rng.dirichlet([1.0, 1.0, 1.0])
            odds = dict(zip("abc", (chances / chances.sum()).tolist(), strict=True))
            test.add(drawn(odds, float(rng.random())), odds)
        alarms += bool(test.wrong(0.05))  # a p-value keeps the worst of all looks
    assert alarms <= 5


def test_an_arm_that_could_not_be_drawn_for_a_while_is_no_alarm():
    rng, test = np.random.default_rng(3), PropensityTest()
    for i in range(3000):
        odds = {"a": 0.5, "b": 0.5} if i % 3 else {"a": 1.0}
        test.add(drawn(odds, float(rng.random())), odds)
    assert not test.wrong(0.05)
    assert [balance.draws for balance in test.balances()] == [2000, 2000]


def test_the_stakes_are_the_likelihood_ratios():
    """Two draws by hand: against p = 0.5, odds r times as large are a probability of r / (1 + r)."""
    test = PropensityTest()
    test.add("a", {"a": 0.5, "b": 0.5})
    test.add("a", {"a": 0.5, "b": 0.5})
    ratios = [(r / (1 + r) / 0.5) ** 2 for r in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)]
    assert test.balances()[0].p_value == pytest.approx(min(1.0, 6 / sum(ratios)))


def test_the_state_goes_through_json_and_on():
    test, again = heard(np.random.default_rng(4), 200, {"a": 0.6, "b": 0.4}), PropensityTest()
    again.restore(json.loads(json.dumps(test.state())))
    for each in (test, again):
        each.add("b", {"a": 0.6, "b": 0.4})
    assert again.balances() == test.balances()
    with pytest.raises(ValueError, match="numbers"):
        again.restore({"a": [1.0]})


@pytest.mark.parametrize("odds", [{}, {"b": 1.0}, {"a": 0.5, "b": 0.4}])
def test_odds_that_do_not_allow_for_the_draw_are_refuted_at_once(odds):
    test = PropensityTest()
    test.add("b", {"a": 0.5, "b": 0.5})
    assert not test.wrong(0.001)
    test.add("a", odds)
    assert test.wrong(1e-9) == ["a"]


def test_the_first_arm_may_spend_half_of_alpha_and_the_second_a_sixth():
    test = heard(np.random.default_rng(3), 400, {"a": 0.5, "b": 0.5}, {"a": 0.6, "b": 0.4})
    p_values = {balance.arm: balance.p_value for balance in test.balances()}
    first, second = test.state()
    for arm, part in ((first, 2.0), (second, 6.0)):
        assert arm in test.wrong(alpha=part * p_values[arm] * 1.001)
        assert arm not in test.wrong(alpha=part * p_values[arm] * 0.999)
