"""The probe names what gives a simulation away, and calls a coin a coin."""

import math

import numpy as np
import pytest
from tests.fakes.lookalikes import observed

from ostinato.core.errors import BadRequest
from ostinato.worlds.fidelity.observation import Observation
from ostinato.worlds.fidelity.probe import BOUND, hanley_mcneil, tell_apart


def test_a_planted_tell_is_caught_and_named_first():
    found = tell_apart(observed(1, "p", 30, 2), observed(1, "s", 30, 2, tell=0.8))
    assert found.told_apart
    assert not found.faithful
    assert found.auc > 0.85
    assert found.lower > 0.7
    assert found.p == 0.01
    first = found.tells[0]
    assert (first.name, first.production) == ("env:IS_SANDBOX is there", "0 of 60")
    assert first.p < 1e-6
    assert all(tell.p > 0.05 for tell in found.tells[1:])


def test_a_number_that_only_spreads_otherwise_is_found():
    found = tell_apart(observed(2, "p", 60, 3), observed(2, "s", 60, 3, spread=4.0), permutations=19)
    assert found.told_apart
    assert found.tells[0].name == "n1, how far from the middle"


def test_machines_drawn_alike_are_not_told_apart():
    found = tell_apart(observed(3, "p", 400), observed(3, "s", 400), permutations=0)
    assert found.auc <= BOUND
    assert found.lower <= 0.5 <= found.upper
    assert not found.told_apart
    assert found.p is None


def test_names_that_are_new_each_time_are_no_tell():
    """Every host's name occurs on one side only, so a classifier that is asked about machines it knows would be always right."""
    found = [
        tell_apart(observed(s, "p", 40, 4), observed(s, "s", 40, 4), permutations=0, resamples=50).auc for s in range(8)
    ]
    assert abs(np.mean(found) - 0.5) < 0.06
    assert max(found) < 0.75


def test_seeing_a_machine_again_and_again_makes_nothing_surer():
    few, many = (tell_apart(observed(5, "p", 15, n), observed(5, "s", 15, n), permutations=0) for n in (2, 40))
    assert many.upper - many.lower > 0.6 * (few.upper - few.lower)
    assert many.production == (600, 15)


def test_one_constant_tell_gives_no_interval_of_zero_width():
    sides = [[Observation(group=f"{name}{at}", features={"kernel": name}) for at in range(12)] for name in "ab"]
    found = tell_apart(*sides)
    assert (found.auc, found.upper) == (1.0, 1.0)
    assert 0.8 < found.lower < 1.0
    assert found.tells[0].name.startswith("kernel = a (and 1 alike: kernel = b")


def test_few_groups_say_nothing_and_the_number_that_would_is_said():
    found = tell_apart(observed(6, "p", 4, 9), observed(6, "s", 4, 9, tell=1.0), permutations=19)
    assert found.too_few
    assert not found.told_apart
    assert not found.faithful
    assert found.needed == 257
    assert 1.96 * hanley_mcneil(0.5, found.needed, found.needed) <= 0.05 < 1.96 * hanley_mcneil(0.5, 255, 255)
    with pytest.raises(BadRequest, match="each side needs two"):
        tell_apart(observed(6, "p", 1, 9), observed(6, "s", 4, 9))


def test_nothing_that_differs_is_a_coin():
    same = [Observation(group=str(at), features={"x": 1.0}) for at in range(12)]
    found = tell_apart(same, [Observation(group=f"s{at}", features={"x": 1.0}) for at in range(12)], permutations=19)
    assert (found.auc, found.columns, found.tells) == (0.5, 0, ())


def test_the_same_arguments_give_the_same_numbers():
    sides = observed(7, "p", 12, 2), observed(7, "s", 12, 2)
    assert tell_apart(*sides, seed=3, permutations=19) == tell_apart(*sides, seed=3, permutations=19)


@pytest.mark.examination
def test_intervals_and_odds_hold_where_both_sides_are_alike():
    """Of 200 pairs drawn alike: the interval holds 0.5 in 19 of 20, and "told apart" is said of one in twenty at most."""
    found = [
        tell_apart(observed(s, "p", 40, 2), observed(s, "s", 40, 2), permutations=19, resamples=500) for s in range(200)
    ]
    covered = np.mean([each.lower <= 0.5 <= each.upper for each in found])
    assert covered >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / 200)
    assert np.mean([each.told_apart for each in found]) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
    assert abs(np.mean([each.auc for each in found]) - 0.5) < 0.02
