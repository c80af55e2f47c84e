"""The population's and an organisation's prior, fitted to planted populations."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from ostinato.adapt.learner import Evidence, PersonState, Regression
from ostinato.adapt.prior import MOST_DEVIATIONS, Organisation, Population, fit_prior, flat_prior

DIALS = 4
MEAN = np.array([0.12, -0.08, 0.0, 0.05])


def people(count: int, mean: np.ndarray, ratings: int = 40, deviation: float = 0.05) -> list[Evidence]:
    """People whose slopes are drawn around `mean`, after so many ratings of linear probability. The same ones at each call."""
    return list(_people(count, tuple(mean.tolist()), ratings, deviation))


@cache
def _people(count: int, mean: tuple[float, ...], ratings: int, deviation: float) -> list[Evidence]:
    rng, flat, regression = np.random.default_rng(1), flat_prior(DIALS), Regression(decay=1.0, limit=np.inf)
    slopes = np.array(mean) + deviation * rng.normal(size=(count, DIALS))
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
    assert Organisation.fit([Evidence.none(DIALS)], DIALS).people == 0
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


def pooled(*organisations: list[Evidence], least: int = 20, share: float = 0.25) -> Population:
    fitted = [Organisation.fit(each, DIALS) for each in organisations]
    return Population.pool(fitted, DIALS, least=least, share=share)


def with_own(population: Population, told: list[Evidence]) -> Population:
    own = Organisation.fit(told, DIALS)
    return replace(population, organisations={"acme": (own.people, own.prior.mean_D)})


def test_an_organisation_lies_between_the_population_and_its_people() -> None:
    population = pooled(*(people(30, sign * MEAN) for sign in (0.5, 0.0, -0.5)))
    few, many = (with_own(population, people(count, MEAN)) for count in (5, 80))
    for each in (few, many):
        assert each.of("bolt") is each.shared
    shared = population.shared.mean_D[0]
    assert shared + 0.01 < few.of("acme").mean_D[0] < many.of("acme").mean_D[0] < 0.14
    assert -0.1 < many.of("acme").mean_D[1] < shared
    traces = [np.trace(prior.covariance_DD) for prior in (population.shared, few.of("acme"), many.of("acme"))]
    assert traces == sorted(traces, reverse=True)
    left = np.trace(many.of("acme").covariance_DD - population.within_DD)
    assert left == pytest.approx(0.2 * np.trace(population.between_DD)), "80 people: a fifth of what lies between"


def test_one_organisation_alone_is_the_population() -> None:
    told = people(40, MEAN)
    alone, fitted = pooled(told).shared, fit_prior(told, flat_prior(DIALS))
    np.testing.assert_array_equal(alone.mean_D, fitted.mean_D)
    np.testing.assert_array_equal(alone.covariance_DD, fitted.covariance_DD)


def test_too_few_people_in_all_leave_the_flat_prior() -> None:
    told = people(12, MEAN)
    few = pooled(told[:9], told[:10])
    assert (few.people, few.shared.mean_D.tolist()) == (0, flat_prior(DIALS).mean_D.tolist())
    enough = pooled(told[:9], told[:11])
    assert enough.people == 20
    assert enough.shared.mean_D[0] > 0.05


def invented(push: float) -> list[Evidence]:
    """As many people as a fit takes, of one wish and any amount of evidence for it: an organisation can make them up."""
    size = DIALS + 1
    precision_DD = 1e6 * np.eye(size, dtype=np.float32)
    return [Evidence(precision_DD, precision_DD @ np.full(size, push, np.float32), ratings=100)] * 1000


@pytest.mark.parametrize("push", [0.2, 1e6, -1e6])
def test_an_organisation_of_invented_people_moves_the_others_prior_by_its_share_at_most(push: float) -> None:
    honest, flat = [people(30, sign * MEAN) for sign in (1.0, 0.8, 0.5, 1.2)], flat_prior(DIALS)
    before, attacked = pooled(*honest), pooled(*honest, invented(push))
    reach_D = MOST_DEVIATIONS * np.sqrt(np.diag(flat.covariance_DD))
    moved_D = np.abs(attacked.mean_D - before.mean_D)
    assert (moved_D <= 0.25 * (reach_D + np.abs(before.mean_D - flat.mean_D)) + 1e-9).all()
    assert moved_D[0] > 0.005, "it is heard, as a quarter"
    widest = np.linalg.eigvalsh(attacked.shared.covariance_DD).max()
    assert widest < np.linalg.eigvalsh(before.shared.covariance_DD).max() + 0.25 * (2 * reach_D @ (2 * reach_D))
    uncapped = pooled(*honest, invented(push), share=1.0)
    assert np.abs(uncapped.mean_D - before.mean_D)[0] > 2 * moved_D[0]


def test_an_organisation_counts_fully_up_to_the_least_number_and_beyond_it_up_to_its_share() -> None:
    large, small = people(60, MEAN), people(3, -MEAN)
    only_small = Organisation.fit(small, DIALS).prior.mean_D
    only_large = Organisation.fit(large, DIALS).prior.mean_D
    both = pooled(large, small, least=27)
    np.testing.assert_allclose(both.mean_D, 0.9 * only_large + 0.1 * only_small)
    assert both.people == 63


def test_a_row_of_the_log_gives_the_same_bits_and_a_wrong_one_is_refused() -> None:
    population = with_own(pooled(people(30, MEAN), people(30, -MEAN)), people(9, MEAN))
    row = population.row(names="9c", number=4, upto=77, at=9.0)
    read = Population.read(row, DIALS)
    for tenant in ("acme", "bolt"):
        assert read.of(tenant).mean_D.tobytes() == population.of(tenant).mean_D.tobytes()
        assert read.of(tenant).covariance_DD.tobytes() == population.of(tenant).covariance_DD.tobytes()
    assert read.row(names="9c", number=4, upto=77, at=9.0) == row
    size = len(row.within)
    for wrong in (
        replace(row, mean=row.mean[:-1]),
        replace(row, within=row.within[:-1]),
        replace(row, within=(-1.0,) * size),
        replace(row, between=(float("inf"),) * size),
        replace(row, organisations={"acme": (9.0, float("inf"), *row.mean[1:])}),
        replace(row, organisations={"acme": row.mean}),
    ):
        with pytest.raises(ValueError, match=r"prior|finite|positive"):
            Population.read(wrong, DIALS)
