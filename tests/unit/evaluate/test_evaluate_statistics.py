"""Every estimate against scipy, a brute-force count, or the coverage that it promises."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from ostinato.core.report import ItemScore
from ostinato.evaluate.statistics import (
    clustered_difference,
    draw_spread,
    items_needed,
    mcnemar,
    mean_difference,
    paired_items,
    power,
    spread_of,
    suite_mean,
    wilson,
)


def scores(matrix_ID):
    return [
        ItemScore(item=f"i{i:05d}", draw=d, score=float(s))
        for i, row in enumerate(matrix_ID)
        for d, s in enumerate(row)
    ]


def test_paired_difference_equals_scipy_on_item_means():
    rng = np.random.default_rng(0)
    left_ID, right_ID = rng.integers(0, 2, (80, 3)), rng.integers(0, 2, (80, 3))
    _, differences_I, draws = paired_items(scores(left_ID), scores(right_ID))
    estimate = mean_difference(differences_I, lower_alpha=0.05, upper_alpha=0.025)
    reference = stats.ttest_rel(left_ID.mean(axis=1), right_ID.mean(axis=1))
    assert draws == 3
    assert estimate.mean == pytest.approx(left_ID.mean() - right_ID.mean())
    assert estimate.lower == pytest.approx(reference.confidence_interval(0.90).low)
    assert estimate.upper == pytest.approx(reference.confidence_interval(0.95).high)


def test_few_changed_items_widen_the_interval_as_bonett_and_price_do():
    differences_I = np.array([1.0, 1.0, -1.0] + [0.0] * 47)
    estimate = mean_difference(differences_I, lower_alpha=0.025, upper_alpha=0.025)
    gained, lost, n = 3 / 52, 2 / 52, 52
    error = math.sqrt((gained + lost - (gained - lost) ** 2) / n) * math.sqrt(n / (n - 1))
    half = stats.t.ppf(0.975, n - 1) * error
    assert estimate.lower == pytest.approx(gained - lost - half)
    assert estimate.upper == pytest.approx(gained - lost + half)


def test_all_equal_items_give_the_exact_bound_and_not_zero_width():
    estimate = mean_difference(np.zeros(100), lower_alpha=0.05, upper_alpha=0.05)
    exact = stats.binomtest(0, 100).proportion_ci(0.90, method="exact").high
    assert estimate.lower == pytest.approx(-exact)
    assert estimate.upper == pytest.approx(exact)
    one = mean_difference(np.ones(3), lower_alpha=0.05, upper_alpha=0.05)
    assert (one.mean, one.upper) == (1.0, 1.0)
    assert one.lower < 0.3  # three items prove little


@pytest.mark.parametrize(
    ("n", "lose", "gain"), [(100, 0.02, 0.0), (100, 0.05, 0.02), (300, 0.02, 0.01), (60, 0.1, 0.1)]
)
def test_lower_bound_covers_the_truth_even_with_rare_changes(n, lose, gain):
    rng = np.random.default_rng(1)
    covered, runs = 0, 600
    for _ in range(runs):
        differences_I = rng.choice([-1.0, 0.0, 1.0], size=n, p=[lose, 1 - lose - gain, gain])
        covered += mean_difference(differences_I, lower_alpha=0.05, upper_alpha=0.05).lower <= gain - lose
    assert covered / runs >= 0.923  # 0.95 less three standard errors


def test_suite_mean_equals_scipy_and_never_has_zero_width():
    rng = np.random.default_rng(2)
    means_ID = rng.random((40, 2))
    estimate = suite_mean(scores(means_ID))
    reference = stats.ttest_1samp(means_ID.mean(axis=1), 0.5).confidence_interval(0.95)
    assert (estimate.lower, estimate.upper) == (pytest.approx(reference.low), pytest.approx(reference.high))
    nothing = suite_mean(scores(np.zeros((40, 2))))
    assert nothing.mean == nothing.lower == 0.0
    assert nothing.upper == pytest.approx(stats.binomtest(0, 40).proportion_ci(0.95).high)


def test_mcnemar_is_the_binomial_tail():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(10, 0) == pytest.approx(2 * 0.5**10)
    tail = sum(math.comb(14, k) for k in range(5)) / 2**14
    assert mcnemar(10, 4) == mcnemar(4, 10) == pytest.approx(2 * tail)


def test_wilson_equals_scipy():
    for successes, n in ((0, 10), (3, 10), (10, 10), (123, 400)):
        reference = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
        assert wilson(successes, n) == (pytest.approx(reference.low, abs=1e-12), pytest.approx(reference.high))
    assert wilson(0, 0) == (0.0, 1.0)


def test_clustered_difference_of_single_turn_users_is_the_two_sample_difference():
    rng = np.random.default_rng(3)
    left, right = rng.integers(0, 2, 200), rng.integers(0, 2, 150)
    estimate = clustered_difference(
        {f"a{i}": (float(v), 1) for i, v in enumerate(left)}, {f"b{i}": (float(v), 1) for i, v in enumerate(right)}
    )
    error = math.sqrt(left.var(ddof=1) / 200 + right.var(ddof=1) / 150)
    assert estimate.mean == pytest.approx(left.mean() - right.mean())
    assert estimate.error == pytest.approx(error)
    assert estimate.df == 149


def people(rng, prefix, users, turns, rate, spread=0.15):
    rates = np.clip(rng.normal(rate, spread, users), 0, 1)
    counts = rng.poisson(turns, users) + 1
    return {
        f"{prefix}{i}": (float(rng.binomial(c, r)), int(c)) for i, (c, r) in enumerate(zip(counts, rates, strict=True))
    }


def test_clustered_interval_covers_where_a_naive_one_does_not():
    rng = np.random.default_rng(4)
    covered, naive, runs = 0, 0, 400
    for _ in range(runs):
        left, right = people(rng, "a", 40, 60, 0.4), people(rng, "b", 12, 60, 0.4)
        estimate = clustered_difference(left, right)
        covered += estimate.lower <= 0.0 <= estimate.upper
        (s1, n1), (s2, n2) = ([sum(x) for x in zip(*side.values(), strict=True)] for side in (left, right))
        error = math.sqrt(sum(p * (1 - p) / n for p, n in ((s1 / n1, n1), (s2 / n2, n2))))
        naive += abs(s1 / n1 - s2 / n2) <= 1.96 * error
    assert 0.92 <= covered / runs <= 0.99  # a little conservative: the degrees of freedom are the smaller side's
    assert naive / runs < 0.70


def test_the_same_people_before_and_after_are_compared_within_themselves():
    rng = np.random.default_rng(5)
    rates = np.linspace(0.1, 0.9, 30)
    before = {f"u{i}": (float(rng.binomial(50, r)), 50) for i, r in enumerate(rates)}
    after = {f"u{i}": (float(rng.binomial(50, r)), 50) for i, r in enumerate(rates)}
    strangers = {f"x{user}": value for user, value in before.items()}
    assert clustered_difference(after, before).error < 0.5 * clustered_difference(after, strangers).error


def test_an_arm_where_nobody_accepts_has_no_zero_width():
    nobody = {f"a{i}": (0.0, 30) for i in range(10)}
    estimate = clustered_difference(nobody, {f"b{i}": (0.0, 30) for i in range(40)})
    assert estimate.lower < -0.05 < 0.05 < estimate.upper
    with pytest.raises(ValueError, match="at least 2 users"):
        clustered_difference({"a": (1.0, 9)}, nobody)


def test_power_equals_simulation():
    rng = np.random.default_rng(6)
    n, discordance, margin = 500, 0.15, 0.04
    draws = rng.choice([-1.0, 0.0, 1.0], size=(600, n), p=[discordance / 2, 1 - discordance, discordance / 2])
    passed = np.mean([mean_difference(row, lower_alpha=0.05, upper_alpha=0.05).lower > -margin for row in draws])
    assert power(n, discordance, margin) == pytest.approx(passed, abs=0.06)
    assert power(1000, 0.15, 0.02) == pytest.approx(0.495, abs=0.01)
    assert all(a <= b for a, b in pairwise(power(k, 0.1, 0.05) for k in range(10, 500, 10)))


def test_the_items_that_a_margin_needs_give_equals_the_wanted_power():
    differences = np.repeat([1.0, -1.0, 0.0], [50, 50, 4900])
    for alpha in (0.05, 0.05 / 40):
        needed = items_needed(spread_of(differences), 0.01, alpha=alpha)
        assert power(needed, 0.02, 0.01, alpha=alpha) == pytest.approx(0.8, abs=0.001)
    alike = spread_of(np.zeros(10))
    needed = items_needed(alike, 0.01, alpha=0.05)
    assert mean_difference(np.zeros(needed), lower_alpha=0.05, upper_alpha=0.05).upper <= 0.01
    assert mean_difference(np.zeros(needed - 1), lower_alpha=0.05, upper_alpha=0.05).upper > 0.01


def test_wrong_pairing_is_an_error_that_names_the_pair():
    full = scores(np.ones((4, 2)))
    with pytest.raises(ValueError, match=r"1 \(item, draw\) pairs.*i00003"):
        paired_items(full, full[:-1])
    with pytest.raises(ValueError, match="same number"):
        paired_items(full[:-1], full[:-1])
    with pytest.raises(ValueError, match="two different scores"):
        paired_items([*full, ItemScore(item="i00000", draw=0, score=0.0)], full)
    with pytest.raises(ValueError, match=r"answers in \[0, 1\]"):
        paired_items([ItemScore(item="a", draw=0, score=1.5)], [ItemScore(item="a", draw=0, score=1.0)])


def test_one_draw_of_a_binary_item_varies_as_the_rates_say():
    """A mean of 0.25 whose rates spread by 0.25: sqrt(0.25 - 0.25^2 - 0.25^2) = 0.354, where 0.245 is assumed."""
    rng = np.random.default_rng(3)
    rates_I = rng.beta(0.5, 1.5, 4_000)
    scores = [
        ItemScore(item=str(item), draw=draw, score=float(rng.random() < rate))
        for item, rate in enumerate(rates_I)
        for draw in range(2)
    ]
    assert (rates_I.mean(), rates_I.std()) == (pytest.approx(0.25, abs=0.01), pytest.approx(0.25, abs=0.01))
    assert draw_spread(scores) == pytest.approx(0.354, abs=0.01)
    assert draw_spread([score for score in scores if score.draw == 0]) is None
    assert draw_spread([]) is None
    uneven = [
        ItemScore(item=item, draw=draw, score=score)
        for item, draw, score in (("a", 0, 0.0), ("a", 1, 1.0), ("b", 0, 1.0))
    ]
    assert draw_spread(uneven) == pytest.approx(0.5**0.5), "an item with one draw tells nothing"
