"""Verdicts, bounds and refusals of the gate; its error rates are simulated among the property tests."""

import numpy as np
import pytest

from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemScore, Verdict
from ostinato.evaluate.gate import GateConfig, Match, decide

LIVE, CANDIDATE = PolicyVersion(number=7, hash="aa"), PolicyVersion(number=9, hash="bb")
MATCH = Match(suite="held-out", suite_hash="9f", candidate=CANDIDATE, live=LIVE)


def scores(matrix_ID, items=None):
    return [
        ItemScore(item=f"i{i}", draw=d, score=float(s))
        for i, row in enumerate(matrix_ID[:items])
        for d, s in enumerate(row)
    ]


def sample(rng, items, draws, effect, base=0.5, noise=0.25):
    """Items of uneven difficulty; `effect` shifts every item's pass rate on average by that much."""
    rates_I = rng.beta(base / noise, (1 - base) / noise, items)
    shift_I = rng.normal(effect, 0.05, items)
    live_ID = rng.random((items, draws)) < rates_I[:, None]
    candidate_ID = rng.random((items, draws)) < np.clip(rates_I + shift_I, 0, 1)[:, None]
    return candidate_ID, live_ID


def test_better_model_ships_at_the_first_look():
    candidate_ID, live_ID = sample(np.random.default_rng(2), 400, 8, 0.15)
    report = decide(scores(candidate_ID[:, :2]), scores(live_ID[:, :2]), GateConfig(), MATCH)
    assert (report.verdict, report.draws) == (Verdict.SHIP, 2)
    assert report.candidate_mean - report.live_mean == pytest.approx(report.difference)
    assert report.lower < report.difference < report.upper


def test_few_items_say_that_their_power_is_low():
    candidate_ID, live_ID = sample(np.random.default_rng(3), 20, 1, 0.0)
    report = decide(scores(candidate_ID), scores(live_ID), GateConfig(margin=0.02, first_draws=1, max_draws=1), MATCH)
    assert report.verdict == Verdict.BLOCK
    assert report.power < 0.3
    assert "low power" in report.reason
    assert "margin 2.0 pp" in report.reason


def test_significant_loss_is_blocked_though_it_lies_within_the_margin():
    live_ID = np.ones((2000, 1))
    candidate_ID = live_ID.copy()
    candidate_ID[:40] = 0
    report = decide(scores(candidate_ID), scores(live_ID), GateConfig(first_draws=1, max_draws=1), MATCH)
    assert report.verdict == Verdict.BLOCK
    assert report.lower > -report.margin
    assert "significantly worse" in report.reason


def test_different_items_are_an_error_and_no_verdict():
    matrix_ID = np.ones((10, 2))
    with pytest.raises(ValueError, match="unpaired"):
        decide(scores(matrix_ID), scores(matrix_ID, items=9), GateConfig(), MATCH)
    with pytest.raises(ValueError, match="no items"):
        decide([], [], GateConfig(), MATCH)


def test_schedule_doubles_and_alpha_adds_up():
    for config in (GateConfig(), GateConfig(first_draws=3, max_draws=20), GateConfig(first_draws=4, max_draws=4)):
        looks = config.schedule()
        assert looks[0] == config.first_draws
        assert looks[-1] == config.max_draws
        assert sum(config.alpha_at(draws) for draws in looks) == pytest.approx(config.alpha)
    assert GateConfig(first_draws=2, max_draws=6).schedule() == (2, 4, 6)
    with pytest.raises(ValueError, match="raise it"):
        GateConfig(first_draws=4, max_draws=2)
