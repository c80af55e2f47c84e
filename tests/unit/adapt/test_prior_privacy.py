"""The accountant against dp-accounting's, the sensitivity of what is released, the year's budget, and the noise."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.adaptation.membership import membership
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.adapt.test_prior import DIALS, MEAN, people

from ostinato.adapt.learner import Evidence
from ostinato.adapt.prior import fit_prior, flat_prior
from ostinato.adapt.privacy import (
    GRID,
    PrivacyBudget,
    composed_sigma,
    contribution,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_sigma,
    noised,
    prior_of,
    release_prior,
    total_contribution,
)
from ostinato.core.errors import BadConfig, Unavailable

CLIP = 0.3
BUDGET = PrivacyBudget(epsilon=2.0, delta=1e-6, releases=4)

# (noise multipliers, delta, epsilon) by dp-accounting 0.6.0: PLDAccountant(value_discretization_interval=1e-4), GaussianDpEvent
REFERENCE = [
    ([0.5], 1e-5, 9.99726),
    ([1.0], 1e-5, 4.37718),
    ([2.0], 1e-5, 1.99309),
    ([4.0], 1e-5, 0.92634),
    ([1.0], 1e-7, 5.34935),
    ([8.0], 1e-6, 0.50386),
    ([20.0] * 100, 1e-5, 1.99309),
    ([13.3] * 52, 4e-5, 1.99548),
    ([5.0] * 12, 1e-6, 3.2332),
    ([30.0] * 365, 1e-8, 3.51752),
    ([3.0, 4.0, 6.0, 10.0], 1e-6, 2.05593),
]


@pytest.mark.parametrize(("sigmas", "delta", "epsilon"), REFERENCE)
def test_epsilon_is_that_of_dp_accounting(sigmas: list[float], delta: float, epsilon: float) -> None:
    assert gaussian_epsilon(composed_sigma(sigmas), delta) == pytest.approx(epsilon, rel=1e-4)


@given(epsilon=st.floats(1e-3, 200), log_delta=st.floats(-300, -0.01))
def test_sigma_is_the_inverse_of_epsilon_and_of_delta(epsilon: float, log_delta: float) -> None:
    delta = 10**log_delta
    sigma = gaussian_sigma(epsilon, delta)
    assert gaussian_delta(sigma, epsilon) <= delta  # never less noise than promised
    assert gaussian_epsilon(sigma, delta) == pytest.approx(epsilon, rel=1e-6)
    assert gaussian_delta(sigma * (1 - 1e-6), epsilon) > delta


@pytest.mark.parametrize(
    ("epsilon", "delta", "field"), [(0, 1e-5, "epsilon"), (math.nan, 1e-5, "epsilon"), (1, 0, "delta"), (1, 1, "delta")]
)
def test_an_impossible_budget_is_refused_by_its_field(epsilon: float, delta: float, field: str) -> None:
    with pytest.raises(BadConfig, match=f"adapt.privacy.{field}"):
        gaussian_sigma(epsilon, delta)


# ---------------------------------------------------------------- sensitivity

numbers = st.sampled_from([st.floats(-1000, 1000, width=32), st.floats(width=32)])  # moderate ones, and all there are


@given(told=numbers.flatmap(lambda each: st.lists(each, min_size=30, max_size=30)), clip=st.floats(1e-3, 10))
def test_nobody_moves_the_sum_by_more_than_its_sensitivity(told: list[float], clip: float) -> None:
    half_DD, shift_D = np.array(told[:25], np.float32).reshape(5, 5), np.array(told[25:], np.float32)
    with np.errstate(all="ignore"):
        vector = contribution(Evidence(half_DD @ half_DD.T, shift_D, ratings=10**6), clip)
    assert squared(vector) <= 2 * GRID**2


def test_a_person_with_huge_features_counts_as_one_at_the_clip() -> None:
    huge = Evidence.none(DIALS)
    huge = replace(huge, precision_DD=np.eye(5, dtype=np.float32), shift_D=np.full(5, 1e30, np.float32), ratings=1000)
    told = contribution(huge, CLIP)
    assert squared(told) <= 2 * GRID**2
    assert math.isqrt(squared(told[:DIALS])) == pytest.approx(GRID, rel=1e-5)  # it is clipped, not left out
    others = people(200, MEAN)
    before, after = (prior_of(total_contribution(group, DIALS, CLIP), CLIP)[0] for group in (others, [*others, huge]))
    moved = np.linalg.norm(after.mean_D - before.mean_D)
    assert 0 < moved < 2 * CLIP / 200


def test_who_has_rated_too_little_to_be_told_from_noise_contributes_nothing() -> None:
    few = people(1, MEAN, ratings=9)[0]
    assert not contribution(few, CLIP).any()
    assert contribution(people(1, MEAN, ratings=10)[0], CLIP).any()


def squared(vector: np.ndarray) -> int:
    return sum(int(number) ** 2 for number in vector)


# ---------------------------------------------------------------- release


def test_without_noise_the_release_is_near_what_em_fits() -> None:
    told = people(200, MEAN)
    prior, counted = prior_of(total_contribution(told, DIALS, CLIP), CLIP)
    em = fit_prior(told, flat_prior(DIALS))
    assert counted == 200
    np.testing.assert_allclose(prior.mean_D, em.mean_D, atol=0.01)
    ours, theirs = (np.diag(each.covariance_DD)[:DIALS] for each in (prior, em))
    np.testing.assert_allclose(ours, theirs, atol=1.5e-3)


def test_noise_has_the_deviation_that_the_accountant_was_told() -> None:
    """On the count, a quarter of the grid's unit, whose noise nothing clips."""
    total_P = total_contribution(people(3, MEAN), DIALS, CLIP) * 10_000
    gauss = random.Random(1).gauss
    counts = [prior_of(noised(total_P, 50.0, gauss), CLIP)[1] for _ in range(1000)]
    assert np.mean(counts) == pytest.approx(30_000, abs=100)
    assert np.std(counts) == pytest.approx(50 * math.sqrt(2) * 4, rel=0.1)


def test_a_prior_is_positive_definite_and_bounded_however_large_the_noise_is() -> None:
    total_P = total_contribution(people(3, MEAN), DIALS, CLIP)
    gauss = random.Random(2).gauss
    for _ in range(200):
        prior = prior_of(noised(total_P, 1000.0, gauss), CLIP)[0]  # `Prior` refuses other covariances
        assert np.linalg.norm(prior.mean_D[:DIALS]) <= CLIP * 1.001


def test_noise_is_the_operating_systems_and_no_seed_repeats_it() -> None:
    told, found = people(3, MEAN), list[bytes]()
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        one = release_prior(told, DIALS, clip=CLIP, budget=BUDGET, earlier=[])
        found.append(one.prior.mean_D.tobytes())
        assert one.sigma == gaussian_sigma(2.0, 1e-6) * 2
    assert found[0] != found[1]


def test_the_order_of_people_changes_no_bit_of_the_sum() -> None:
    told = people(50, MEAN)
    assert total_contribution(told, DIALS, CLIP).tobytes() == total_contribution(told[::-1], DIALS, CLIP).tobytes()


def test_a_published_prior_tells_who_was_in_it_without_noise_and_hardly_with_it() -> None:
    pool_NP = np.stack([contribution(each, CLIP) for each in people(200, MEAN, ratings=10)])
    open_, planted_open = membership(pool_NP, 100, 0.0, trials=50)
    private, planted = membership(pool_NP, 100, gaussian_sigma(2.0, 1e-6), trials=50)
    assert open_ > 0.6
    assert planted_open > 0.75
    assert private < 0.58
    assert planted < 0.7


# ---------------------------------------------------------------- budget


def test_the_releases_of_a_year_spend_the_budget_exactly_and_one_more_is_refused() -> None:
    told, earlier, spent = people(2, MEAN), list[float](), list[float]()
    for _ in range(4):
        earlier.append(release_prior(told, DIALS, clip=CLIP, budget=BUDGET, earlier=earlier).sigma)
        spent.append(BUDGET.spent(earlier))
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(2.0, rel=1e-6)
    with pytest.raises(Unavailable, match=r"adapt\.privacy\.epsilon = 2\.0"):
        release_prior(told, DIALS, clip=CLIP, budget=BUDGET, earlier=earlier)
    assert release_prior(told, DIALS, clip=CLIP, budget=BUDGET, earlier=earlier[1:]).sigma == earlier[0]


def test_fewer_releases_have_less_noise_and_those_of_before_still_count() -> None:
    one = replace(BUDGET, releases=1)
    assert one.next_sigma([]) == pytest.approx(BUDGET.next_sigma([]) / 2)
    with pytest.raises(Unavailable):
        one.next_sigma([BUDGET.next_sigma([])])


def test_delta_must_be_below_one_in_the_number_of_people() -> None:
    told = people(2, MEAN)
    with pytest.raises(BadConfig, match=r"adapt\.privacy\.delta = 0\.5 is not below 1 in 2"):
        release_prior(told, DIALS, clip=CLIP, budget=replace(BUDGET, delta=0.5), earlier=[])
    release_prior(told, DIALS, clip=CLIP, budget=replace(BUDGET, delta=0.49), earlier=[])
