"""The evidence of a trial: what its formula says, and that looking often buys nothing."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from ostinato.release.trial.contrast import SCALES, log_evidence, lower_bound, upper_bound


def by_integration(difference, variance, side):
    """The likelihood ratio averaged over half-normal priors, numerically."""

    def ratio(theta, scale):
        prior = 2 * stats.norm.pdf(theta, 0, scale)
        return prior * math.exp((side * theta * difference - theta**2 / 2) / variance)

    return np.mean([integrate.quad(ratio, 0, 8 * scale, args=(scale,), limit=200)[0] for scale in SCALES])


@pytest.mark.parametrize("difference", [-0.05, -0.01, 0.0, 0.02])
@pytest.mark.parametrize("error", [0.005, 0.02, 0.1])
@pytest.mark.parametrize("side", [-1, 1])
def test_it_is_the_likelihood_ratio_averaged_over_half_normal_priors(difference, error, side):
    expected = by_integration(difference, error**2, side)
    assert log_evidence(difference, error**2, side) == pytest.approx(math.log(expected), abs=1e-6)


def test_far_on_the_other_side_it_is_finite_and_tiny():
    assert -1e5 < log_evidence(0.9, 1e-4, -1) < -1.0


@pytest.mark.parametrize("variance", [0.0, float("inf"), float("nan")])
def test_nothing_known_is_no_evidence_and_no_bound(variance):
    assert log_evidence(-0.3, variance, -1) == 0.0
    assert lower_bound(0.3, variance, 0.05) == -math.inf
    assert upper_bound(-0.3, variance, 0.05) == math.inf


@pytest.mark.parametrize("error", [0.0005, 0.01, 0.2])
@pytest.mark.parametrize("alpha", [0.05, 0.001])
def test_a_bound_is_where_the_evidence_reaches_one_over_alpha(error, alpha):
    bound = lower_bound(0.01, error**2, alpha)
    assert log_evidence(0.01 - bound, error**2, 1) == pytest.approx(-math.log(alpha), abs=1e-6)
    assert upper_bound(-0.01, error**2, alpha) == pytest.approx(-bound)


def test_however_often_one_looks_no_difference_is_refuted_at_most_as_often_as_said():
    """Brownian paths of 60 looks; a plain z test at the same level errs several times as often."""
    rng = np.random.default_rng(7)
    looks, paths = 60, 500
    information = np.arange(1, looks + 1) * 150.0
    walks = np.cumsum(rng.normal(0.0, math.sqrt(150.0), (paths, looks)), axis=1)
    most = np.array([max(map(log_evidence, w / information, 1.0 / information, [-1] * looks)) for w in walks])
    lowest = (walks / np.sqrt(information)).min(axis=1)
    for alpha in (0.05, 0.01):
        assert (most >= -math.log(alpha)).mean() <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / paths)
        assert (lowest < stats.norm.ppf(alpha)).mean() > 3 * alpha


def test_small_differences_are_found_in_the_end_and_large_ones_at_once():
    assert log_evidence(-0.10, 0.025**2, -1) > math.log(20)
    assert log_evidence(-0.01, 0.0025**2, -1) > math.log(20)
    assert log_evidence(-0.01, 0.025**2, -1) < math.log(2)
