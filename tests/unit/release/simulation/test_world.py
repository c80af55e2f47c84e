"""The simulated product: its users are the same whatever rule they meet."""

import numpy as np
import pytest
from benchmarks.release.path.world import SLOTS_A_DAY, Habits, Product, Stream, Version

HABITS = Habits(active=1000)


def day(product, worth=0.0):
    seen = []
    for _ in range(SLOTS_A_DAY):
        visits = product.visits()
        seen.append(product.answer(visits, np.full(len(visits.people_R), worth)))
    return seen


def test_who_comes_and_how_lucky_they_are_does_not_depend_on_what_they_are_served():
    same, worse = day(Product(HABITS, 3)), day(Product(HABITS, 3), worth=-0.2)
    for one, other in zip(same, worse, strict=True):
        assert (one.people_R == other.people_R).all()
        assert (one.turns_R == other.turns_R).all()
        assert (one.good_R >= other.good_R).all(), "no turn is better for a worse version"
    assert sum(each.good_R.sum() for each in same) > sum(each.good_R.sum() for each in worse)


def test_users_come_as_often_as_said_and_accept_as_much_as_said():
    seen = [each for seed in range(5) for each in day(Product(Habits(active=4000, swing=0.0), seed))]
    turns, good = sum(each.turns_R.sum() for each in seen), sum(each.good_R.sum() for each in seen)
    assert turns / 5 / 4000 == pytest.approx(10 * 1.13, rel=0.1)
    assert good / turns == pytest.approx(0.6, abs=0.03)


def test_each_is_found_by_the_place_of_a_number_among_the_users_reach():
    """The search is done on sorted numbers; one by one finds the same people."""
    product = Product(HABITS, 11)
    rng = product.stream(Stream.VISITS, 0)
    total = rng.poisson(product._turns_a_slot)
    people, turns = np.unique(
        [int((product._reach_U <= place).sum()) for place in rng.random(total)], return_counts=True
    )
    visits = product.visits()
    assert visits.people_R.tolist() == people.tolist()
    assert visits.turns_R.tolist() == turns.tolist()


def test_an_outage_takes_its_share_of_every_version():
    whole, struck = day(Product(HABITS, 5)), day(Product(HABITS, 5, lambda slot: 0.3))
    share = sum(each.good_R.sum() for each in struck) / sum(each.good_R.sum() for each in whole)
    assert share == pytest.approx(0.7, abs=0.03)


def test_what_is_new_pleases_less_and_less():
    version = Version(effect=-0.01, effect_U=np.full(3, -0.01), novelty=0.04, born=10)
    people = np.arange(3)
    assert version.worth(people, 10) == pytest.approx(0.03)
    assert version.worth(people, 10 + SLOTS_A_DAY) == pytest.approx(-0.01 + 0.04 / np.e)
    assert version.worth(people, 10 + 20 * SLOTS_A_DAY) == pytest.approx(-0.01, abs=1e-6)


def test_versions_suit_users_differently_and_the_next_one_does_not_depend_on_the_last():
    product, other = Product(HABITS, 5), Product(HABITS, 5)
    first, second = product.version(0.0), product.version(-0.1)
    other.version(0.5)
    assert np.std(first.effect_U) == pytest.approx(0.03, rel=0.1)
    assert (other.version(-0.1).effect_U == second.effect_U).all()
    assert abs(np.corrcoef(first.effect_U, second.effect_U)[0, 1]) < 0.1
