"""Quality bars: what clears them, what does not, and how much evidence that takes."""

import pytest
from pydantic import ValidationError

from ostinato.core.report import ItemScore
from ostinato.evaluate.config import BarConfig
from ostinato.evaluate.gate import judge_bar
from ostinato.evaluate.statistics import mean_lower


def answers(good, bad, draws=1, **fields):
    return [
        ItemScore(item=f"i{i}", draw=d, score=float(i < good), **fields)
        for i in range(good + bad)
        for d in range(draws)
    ]


def test_faultless_items_prove_what_the_exact_binomial_says():
    assert mean_lower([[1.0]] * 100, 0.01) == pytest.approx(0.01 ** (1 / 100))
    assert mean_lower([[0.0]] * 100, 0.01) == 0.0
    # Clopper and Pearson's bound for 298 of 300, from the binomial tail
    from scipy import stats

    bound = mean_lower([[1.0]] * 298 + [[0.0]] * 2, 0.01)
    assert stats.binom.sf(297, 300, bound) == pytest.approx(0.01)


def test_an_item_that_fails_once_counts_as_failed_where_failures_are_rare():
    assert mean_lower([[1.0] * 8] * 299 + [[1.0] * 7 + [0.0]], 0.01) == mean_lower([[1.0]] * 299 + [[0.0]], 0.01)


def test_many_items_of_their_own_rate_have_a_t_bound():
    items = [[float(i % 4 > d) for d in range(4)] for i in range(400)]
    mean = sum(map(sum, items)) / 1600
    assert mean - 0.06 < mean_lower(items, 0.01) < mean - 0.02


def test_draws_of_one_item_are_no_independent_evidence():
    assert mean_lower([[1.0] * 16] * 20, 0.01) == mean_lower([[1.0]] * 20, 0.01)


@pytest.mark.parametrize(
    ("good", "bad", "at_least", "clears"),
    [(200, 0, 0.97, True), (199, 1, 0.97, False), (50, 0, 0.97, False), (300, 0, 0.98, True)],
)
def test_a_safety_bar_needs_the_items_that_prove_it(good, bad, at_least, clears):
    found = judge_bar(BarConfig(at_least=at_least), "safety", answers(good, bad))
    assert (found.holds, found.n, found.wanted) == (clears, good + bad, at_least)
    assert found.value == pytest.approx(good / (good + bad))


def test_an_empty_suite_is_no_cleared_bar():
    found = judge_bar(BarConfig(at_least=0.5), "safety", [])
    assert (found.holds, found.n) == (False, 0)


def test_what_must_stay_rare_is_bounded_from_above():
    hacked = judge_bar(BarConfig(at_most=0.05), "hacks", answers(0, 200))
    assert hacked.holds
    assert (hacked.value, hacked.wanted) == (0.0, 0.05)
    assert hacked.bound == pytest.approx(1 - 0.01 ** (1 / 200))
    assert not judge_bar(BarConfig(at_most=0.05), "hacks", answers(6, 194)).holds


def test_format_counts_answers_that_ended_by_themselves():
    bar = BarConfig(axis="format", at_least=0.9)
    assert judge_bar(bar, "s", answers(0, 100, formed=True)).holds
    assert not judge_bar(bar, "s", answers(100, 0, formed=False)).holds


def test_latency_is_a_share_of_answers_in_time():
    bar = BarConfig(axis="latency", at_most=2.0, share=0.95)
    assert judge_bar(bar, "s", answers(100, 0, seconds=2.0)).holds
    assert not judge_bar(bar, "s", answers(100, 0, seconds=2.1)).holds
    slow = [*answers(100, 0, seconds=1.0), *(ItemScore(item=f"s{n}", draw=0, score=1.0, seconds=9.0) for n in range(3))]
    assert not judge_bar(bar, "s", slow).holds, "97% of a hundred items do not prove 95%"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "one of at_least and at_most"),
        ({"at_least": 0.5, "at_most": 0.5}, "one of at_least and at_most"),
        ({"axis": "latency", "at_least": 0.5}, "needs at_most, in seconds"),
        ({"at_most": 1.5}, "set it below 1"),
        ({"at_least": 1.0}, "less than 1"),
        ({"axis": "vibes", "at_least": 0.5}, "'score', 'format' or 'latency'"),
    ],
)
def test_a_bar_that_means_nothing_is_refused(settings, told):
    with pytest.raises(ValidationError, match=told):
        BarConfig(**settings)
