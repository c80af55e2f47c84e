"""What is learned from how many ratings, on the benchmark's simulated people: the order of the methods, and what adversaries gain."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.adaptation.learning import CAP, DIALS, Course, World, course, organisations, same_width

from ostinato.adapt.learner import Evidence, Prior, Rated, Regression
from ostinato.adapt.prior import fit_prior, flat_prior

PEOPLE = 24


@functools.cache
def world() -> World:
    return World(3)


@functools.cache
def population() -> Prior:
    return fit_prior(world().rated(60, 1, 20), flat_prior(DIALS))


@functools.cache
def wished() -> np.ndarray:
    """What the people of all courses want."""
    return world().people(PEOPLE, 901)


@functools.cache
def bounds(sign: int) -> tuple[float, float]:
    """The acceptance of frozen answers and of the best dials, by people who want that or the opposite."""
    wishes = sign * wished()
    return world().acceptance(wishes, np.zeros((PEOPLE, DIALS))).mean(), world().oracle(wishes).mean()


def gap(came: Course, at: int, sign: int = 1) -> float:
    frozen, oracle = bounds(sign)
    return (came.acceptance[at].mean() - frozen) / (oracle - frozen)


def test_ratings_close_the_gap_and_a_population_closes_it_sooner() -> None:
    wishes = wished()
    ours = course(world(), wishes, population(), Regression(), at=(0, 30))
    flat = course(world(), wishes, same_width(population()), Regression(), at=(0, 30))
    assert gap(ours, 0) > 0.08
    assert abs(gap(flat, 0)) < 0.01
    assert gap(ours, 30) > gap(ours, 0) + 0.15
    assert gap(ours, 30) > 0.4
    assert ours.worst <= CAP * 1.001


def test_an_inverted_person_comes_back_above_base_within_forty_ratings_because_of_the_reset() -> None:
    wishes = wished()
    ours = course(world(), wishes, population(), Regression(), feedback="inverted", at=(50, 90))
    never = course(world(), wishes, population(), Regression(limit=np.inf), feedback="inverted", at=(50, 90))
    assert ours.reset_early <= 1 / PEOPLE
    assert ours.reset > 0.25
    assert never.reset == 0
    assert gap(ours, 50, -1) < -0.3
    assert gap(ours, 90, -1) > 0.0
    assert gap(ours, 90, -1) > gap(never, 90, -1) + 0.03


def test_signals_that_come_late_or_are_retracted_cost_little_and_return_nobody_honest_to_the_prior() -> None:
    wishes = wished()
    late = course(world(), wishes, population(), Regression(), feedback="late", at=(40,))
    wrong = course(world(), wishes, population(), Regression(), feedback="wrong", at=(40,))
    assert late.reset <= 1 / PEOPLE
    assert gap(late, 40) > 0.35
    assert gap(wrong, 40) < 0.0
    assert max(late.worst, wrong.worst) <= CAP * 1.001


async def test_an_organisations_own_prior_beats_the_shared_one_on_its_people_at_once_and_after_five_ratings() -> None:
    """Two organisations of opposite wishes and five others, through the gateway's classes."""
    asked = {"others": 16, "rated": 16, "ratings": 8, "at": (0, 5)}
    own = await organisations(world(), "own", PEOPLE, **asked)
    shared = await organisations(world(), "shared", PEOPLE, **asked)
    for tenant, (_, came) in own.items():
        better = {at: (acceptance - shared[tenant][1][at]).mean() for at, acceptance in came.items()}
        assert better[0] > 0.02
        assert better[5] > 0.01


@pytest.mark.examination
@pytest.mark.parametrize("seed", [3, 4])
def test_of_honest_people_at_most_one_in_a_hundred_is_returned_to_the_prior_within_a_hundred_ratings(seed: int) -> None:
    some, returned = World(seed), 0.0
    fitted = fit_prior(some.rated(300, 1, 30), flat_prior(DIALS))
    for prior in (fitted, same_width(fitted)):
        returned += course(some, some.people(192, 901), prior, Regression(), at=(100,)).reset
    assert returned / 2 <= 0.01


def test_where_predictions_are_right_one_in_a_hundred_is_returned_within_a_hundred_ratings_at_most() -> None:
    """Of ratings of one half, the widest that there are: ten times the people and more are returned at a limit of 2."""
    regression, rng, prior = Regression(), np.random.default_rng(2), flat_prior(1)
    # a person of whom everything is known: the prediction stays 0.5
    known = replace(Evidence.none(1), precision_DD=np.diag([1e9, 1e9]).astype(np.float32), shift_D=np.float32([0, 5e8]))
    ratings, returns, cusum = 20_000, 0, 0.0
    for place in range(ratings):
        rated = Rated(place, np.zeros(1, np.float16), ((1, float(rng.random() < 0.5)),))
        now = replace(known, cusum=cusum).then(rated, prior, regression)
        returns, cusum = returns + now.resets, now.cusum
    assert returns <= 0.01 * ratings / 100
    assert ratings / np.exp(8 * regression.drift * regression.limit) > returns, "the bound for any ratings"
