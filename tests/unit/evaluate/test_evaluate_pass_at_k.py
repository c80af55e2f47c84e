"""pass@1 and best-of-k: the estimator against enumeration, and what is told where the one rises while the other falls."""

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.records import PolicyVersion
from ostinato.core.report import Incumbent, ItemScore
from ostinato.evaluate.evaluation import SHARPENING_CONFIDENCE
from ostinato.evaluate.pass_at_k import answer_diversity, best_of, pass_rates, sharpening

V1 = PolicyVersion(number=1, hash="01" * 16)


def scores(rng, chances, draws=8):
    return [
        ItemScore(item=f"i{item}", draw=draw, score=float(rng.random() < chance))
        for item, chance in enumerate(chances)
        for draw in range(draws)
    ]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.data())
def test_best_of_k_is_the_mean_of_the_best_over_all_choices_of_k(drawn, data):
    k = data.draw(st.integers(1, len(drawn)))
    assert best_of(drawn, k) == pytest.approx(fmean(max(chosen) for chosen in combinations(drawn, k)))


def test_too_few_draws_are_refused():
    for k in (0, 3):
        with pytest.raises(ValueError, match="draw at least"):
            best_of([1.0, 0.0], k)
    with pytest.raises(ValueError, match="no items"):
        pass_rates([], 1)


def test_intervals_of_pass_rates_hold_the_truth():
    rng, held = np.random.default_rng(0), 0
    for _ in range(100):
        chance_I = rng.beta(0.5, 1.5, 60)
        found = pass_rates(scores(rng, chance_I), 8)
        held += found.best.lower <= float(np.mean(1 - (1 - chance_I) ** 8)) <= found.best.upper
        assert found.first.mean <= found.best.mean
    assert held >= 90


def sharper(before, after, k=8, confidence=0.95):
    return sharpening(after, before, k, confidence, against=Incumbent.LIVE, policy=V1)


def test_narrowing_is_told_where_pass_at_1_rises_and_best_of_k_falls():
    rng = np.random.default_rng(1)
    wide, narrow = np.full(200, 0.3), np.where(np.arange(200) < 110, 0.95, 0.0)
    found = sharper(scores(rng, wide), scores(rng, narrow), confidence=SHARPENING_CONFIDENCE)
    assert found is not None
    assert found.narrowed
    assert found.first.mean == pytest.approx(0.22, abs=0.05)
    assert found.best.mean == pytest.approx(-0.39, abs=0.05)
    assert (found.against, found.policy, found.k) == (Incumbent.LIVE, V1, 8)


@pytest.mark.parametrize("after", [0.3, 0.4, 0.2])
def test_a_candidate_that_is_equal_better_or_worse_everywhere_is_not_narrower(after):
    rng = np.random.default_rng(2)
    told = 0
    for _ in range(40):
        found = sharper(scores(rng, np.full(80, 0.3), 4), scores(rng, np.full(80, after), 4), 4)
        told += found is not None and found.narrowed
    assert told == 0


def test_a_first_try_that_rises_with_nothing_lost_is_seldom_called_narrower():
    """The best of k stays as it is, on items that are always solved in some try: the chance is that of one bound."""
    rng = np.random.default_rng(4)
    before, after = np.r_[np.full(60, 0.6), np.zeros(40)], np.r_[np.full(60, 0.9), np.zeros(40)]
    told = 0
    for _ in range(60):
        found = sharper(scores(rng, before), scores(rng, after), confidence=SHARPENING_CONFIDENCE)
        assert found is not None
        assert found.first.lower > 0
        told += found.narrowed
    assert told == 0


def test_items_that_only_one_side_answered_are_left_out_and_ten_are_needed():
    rng = np.random.default_rng(3)
    assert sharper(scores(rng, np.full(9, 0.5)), scores(rng, np.full(30, 0.5)), 4) is None
    enough = sharper(scores(rng, np.full(12, 0.5)), scores(rng, np.full(30, 0.5)), 4)
    assert enough is not None
    assert enough.best.items == 12
    assert not enough.narrowed
    assert sharper(scores(rng, np.full(12, 0.5), 2), scores(rng, np.full(12, 0.5), 8), 4) is None


def answers(rng, ways, items=100, draws=8):
    """Each item is answered in one of so many ways, all equally likely."""
    return [
        ItemScore(item=f"i{item}", draw=draw, score=0.0, answer=str(rng.integers(ways)))
        for item in range(items)
        for draw in range(draws)
    ]


def test_how_often_answers_differ_is_estimated_without_bias_from_any_number_of_draws():
    rng = np.random.default_rng(0)
    for draws in (2, 3, 8):
        found = answer_diversity(answers(rng, 4, 2_000, draws), answers(rng, 10, 2_000, draws), SHARPENING_CONFIDENCE)
        assert found.draws == draws
        assert found.candidate == pytest.approx(0.75, abs=0.03)
        assert found.anchor == pytest.approx(0.9, abs=0.03)


def test_a_fall_of_more_than_a_third_is_told_and_a_smaller_one_is_not():
    rng = np.random.default_rng(1)
    collapsed, narrower, alike = (
        answer_diversity(answers(rng, ways), answers(rng, 10), SHARPENING_CONFIDENCE) for ways in (2, 4, 10)
    )
    assert collapsed.excess.upper < 0, "from 0.9 to 0.5"
    assert narrower.excess.upper >= 0, "from 0.9 to 0.75"
    assert alike.excess.upper >= 0
    equal = [
        answer_diversity(answers(rng, 5, 40, 4), answers(rng, 5, 40, 4), SHARPENING_CONFIDENCE) for _ in range(200)
    ]
    assert all(each.excess.upper >= 0 for each in equal)


def test_answers_that_are_not_known_or_never_differ_tell_nothing():
    rng = np.random.default_rng(2)
    unknown = scores(rng, [0.5] * 100)
    assert answer_diversity(unknown, unknown, SHARPENING_CONFIDENCE) is None
    assert answer_diversity(answers(rng, 3, items=9), answers(rng, 3, items=9), SHARPENING_CONFIDENCE) is None
    greedy = answers(rng, 1)
    assert answer_diversity(greedy, greedy, SHARPENING_CONFIDENCE).excess.upper >= 0
    once = answers(rng, 3, draws=1)
    assert answer_diversity(once, once, SHARPENING_CONFIDENCE) is None
