"""The population's and an organisation's prior, fitted to planted populations."""

import numpy as np
import pytest

from ostinato.adapt.learner import Evidence, PersonState, Prior, Regression
from ostinato.adapt.prior import fit_prior, flat_prior, organisation_prior

DIALS = 4
MEAN = np.array([0.12, -0.08, 0.0, 0.05])


def people(count: int, mean: np.ndarray, ratings: int = 40, deviation: float = 0.05) -> list[Evidence]:
    """People whose slopes are drawn around `mean`, after so many ratings of linear probability."""
    rng, flat, regression = np.random.default_rng(1), flat_prior(DIALS), Regression(decay=1.0, limit=np.inf)
    slopes = mean + deviation * rng.normal(size=(count, DIALS))
    found = list[Evidence]()
    for own in slopes:
        state = PersonState.new("00" * 16, DIALS)
        for place in range(1, ratings + 1):
            row = rng.normal(size=DIALS)
            reward = float(np.clip(0.5 + own @ row + 0.3 * rng.normal(), 0, 1))
            state = state.rate(place, row.tolist(), 1, reward, flat, regression)
        found.append(state.evidence(flat, regression))
    return found


def test_em_finds_the_planted_mean_and_spread() -> None:
    prior = fit_prior(people(150, MEAN), flat_prior(DIALS))
    np.testing.assert_allclose(prior.mean_D[:DIALS], MEAN, atol=0.03)
    assert prior.mean_D[DIALS] == pytest.approx(0.5, abs=0.03)
    spread = np.sqrt(np.diag(prior.covariance_DD)[:DIALS])
    assert spread.min() > 0.02
    assert spread.max() < 0.1


def test_people_without_ratings_tell_nothing() -> None:
    start = flat_prior(DIALS)
    assert fit_prior([Evidence.none(DIALS)] * 5, start) is start
    assert organisation_prior([Evidence.none(DIALS)], start) is start
    told = people(10, MEAN)
    with_silent = fit_prior([*told, *[Evidence.none(DIALS)] * 50], start)
    assert with_silent.mean_D.tobytes() == fit_prior(told, start).mean_D.tobytes()


def test_one_person_who_rates_alike_for_ever_breaks_no_prior() -> None:
    """Rewards that never vary, of one person: the covariance stays positive definite, so that `Prior` takes it."""
    flat, regression, state = flat_prior(DIALS), Regression(), PersonState.new("00" * 16, DIALS)
    for place in range(1, 400):
        state = state.rate(place, [5.0, 0.0, 0.0, 0.0], 1, 1.0, flat, regression)
    prior = fit_prior([state.evidence(flat, regression)], flat, passes=200)
    assert np.isfinite(prior.covariance_DD).all()


def test_an_organisation_lies_between_the_population_and_its_people() -> None:
    population = Prior.of(np.zeros(DIALS), 0.01 * np.eye(DIALS))
    few, many = (organisation_prior(people(count, MEAN), population) for count in (5, 80))
    assert 0.005 < few.mean_D[0] < many.mean_D[0] < 0.14
    assert -0.1 < many.mean_D[1] < 0.0
    assert np.trace(many.covariance_DD) < np.trace(population.covariance_DD)
