"""The examination's rank correlation: right orders are found, and what tasks and seeds leave open is open."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from tests.examinations.midtraining.ranks import rank_correlations, ranked, resampled

LOSSES = np.array([1.9, 1.8, 1.7])


def test_it_is_spearmans():
    chance = np.random.default_rng(0)
    rewards = chance.integers(0, 4, (50, 5)).astype(float)
    losses = chance.random(5)
    for row, found in zip(rewards, rank_correlations(losses, rewards), strict=True):
        assert found == pytest.approx(spearmanr(-losses, row).statistic)
    assert rank_correlations(LOSSES, np.ones((1, 3))) == 0


def test_a_clear_order_is_found_and_its_opposite():
    clear = np.array([0.2, 0.4, 0.6])[:, None, None] + np.random.default_rng(1).normal(0, 0.01, (3, 2, 12))
    found = ranked(LOSSES, clear)
    assert (found["rank_correlation"], found["lower"], found["upper"], found["in_order"]) == pytest.approx((1, 1, 1, 1))
    assert ranked(LOSSES[::-1], clear)["upper"] == pytest.approx(-1)


def test_equal_models_leave_the_order_open():
    found = ranked(LOSSES, np.random.default_rng(2).random((3, 3, 40)))
    assert found["lower"] < 0 < found["upper"]
    assert found["in_order"] < 0.9


def test_models_are_compared_on_the_same_tasks():
    tasks = np.random.default_rng(3).random((1, 1, 30))
    drawn = resampled(np.concatenate([tasks, tasks + 0.01]))
    assert (drawn[:, 1] - drawn[:, 0]) == pytest.approx(0.01)
    assert drawn[:, 0].std() > 0.03
