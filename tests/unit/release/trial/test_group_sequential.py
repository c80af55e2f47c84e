"""The plan of a trial's looks: errors at the margin, the users that it saves, and that no look is taken twice."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from tests.grids import covering

from ostinato.release.pace import POWER, Traffic, needed_variance, ship_plan
from ostinato.release.trial.config import HOUR, TrialConfig
from ostinato.release.trial.contrast import NOTHING, Effect, lower_bound
from ostinato.release.trial.group_sequential import GroupSequentialTest, ShipPlan, spent_alpha

MARGIN, ALPHA = 0.02, 0.05
NORMAL = NormalDist()
SINGLE = ((NORMAL.inv_cdf(1 - ALPHA) + NORMAL.inv_cdf(POWER)) / MARGIN) ** 2
"""The information of a single test of this power."""
PLAN = ShipPlan(information={"acceptance": SINGLE}, alpha=ALPHA, limit_s=192.0)
RUNS = 40_000


def an_effect(information, difference=0.0, freedom=1e9):
    return Effect(difference=difference, variance=1 / information, people=freedom, freedom=freedom, turns=1e6)


def a_test(planned=1.0):
    return GroupSequentialTest(planned * SINGLE, PLAN)


def reaches(slots, test):
    """The slots (information after each) at which the real test looks, and each look's half-width; the last slot is the time limit."""
    found, before = [], 0
    for place, information in enumerate(slots):
        elapsed_s = PLAN.limit_s if place == len(slots) - 1 else 1.0
        test.add(an_effect(information), elapsed_s)
        if test.looks > before:
            found.append((place, -test.lower))
            before = test.looks
    return [place for place, _ in found], np.array([reach for _, reach in found])


def paths(slots, difference, runs=RUNS, seed=0):
    """Estimates after each slot, of simulated trials whose candidate differs by `difference`."""
    steps = np.diff(slots, prepend=0.0)
    noise = np.random.default_rng(seed).normal(size=(runs, len(slots))) * np.sqrt(steps)
    return difference + np.cumsum(noise, axis=1) / slots


def shipped(slots, difference, planned=1.0):
    """Share of simulated candidates that ship, and the mean information until then, or until the limit."""
    looks, reach = reaches(slots, a_test(planned))
    crossed = paths(slots, difference)[:, looks] - reach > -MARGIN
    first = np.where(crossed.any(axis=1), crossed.argmax(axis=1), len(looks) - 1)
    return crossed.any(axis=1).mean(), slots[looks][first].mean()


@pytest.mark.parametrize(("end", "planned"), covering([0.3, 0.5, 1.0, 2.0, 4.0], [0.5, 1.0, 2.0]))
def test_a_candidate_that_loses_the_margin_ships_at_the_stated_rate_however_wrong_the_plan_is(end, planned):
    error, _ = shipped(np.linspace(end / 96, end, 96) * SINGLE, -MARGIN, planned)
    assert 0.045 <= error <= 0.053


def test_a_trial_without_an_end_never_spends_more():
    looks, reach = reaches(np.linspace(0.05, 40.0, 800) * SINGLE, a_test())
    slots = np.linspace(0.05, 40.0, 800)[looks[:-1]] * SINGLE
    error = (paths(slots, -MARGIN, 20_000) - reach[:-1] > -MARGIN).any(axis=1).mean()
    assert 0.042 <= error <= 0.053
    assert spent_alpha(1.0, ALPHA) == pytest.approx(0.9 * ALPHA)
    assert spent_alpha(1e9, ALPHA) < ALPHA


def test_information_that_grows_with_what_was_seen_spends_no_more():
    """A ramp gives a candidate that looks good more users, and one that looks bad fewer."""
    first = np.linspace(0.02, 0.3, 12) * SINGLE
    speeds = [np.linspace(0.3 + step, 0.3 + 40 * step, 40) * SINGLE for step in (0.004, 0.02)]
    slow, fast = (np.concatenate([first, rest]) for rest in speeds)
    errors = []
    for slots, wanted in ((slow, False), (fast, True)):
        looks, reach = reaches(slots, a_test())
        seen = paths(slots, -MARGIN, seed=1)
        crossed = (seen[:, looks] - reach > -MARGIN).any(axis=1)
        errors.append((crossed & ((seen[:, 11] > -MARGIN) == wanted)).mean())
    assert 0.045 <= sum(errors) <= 0.053


def test_equal_candidates_need_about_a_quarter_fewer_users_than_the_sequence():
    slots = np.linspace(0.02, 4.0, 200) * SINGLE
    power, planned = shipped(slots, 0.0)
    reach = np.array([-lower_bound(0.0, 1 / information, ALPHA) for information in slots])
    crossed = paths(slots, 0.0) - reach > -MARGIN
    sequence = slots[np.where(crossed.any(axis=1), crossed.argmax(axis=1), len(slots) - 1)].mean()
    assert power > 0.99
    assert planned < 0.8 * sequence
    until = slots <= 1.1 * SINGLE
    assert shipped(slots[until], 0.0)[0] > 0.89
    assert crossed[:, until].any(axis=1).mean() < 0.7


@pytest.mark.parametrize("margin", [0.005, 0.02, 0.1])
def test_by_the_needed_variance_nine_in_ten_equal_candidates_have_shipped(margin):
    end = 1 / needed_variance(margin, ALPHA) * (margin / MARGIN) ** 2
    slots = np.linspace(end / 60, end, 60)
    looks, reach = reaches(np.append(slots, 9 * end), a_test())
    passed = (paths(slots, 0.0)[:, looks[:-1]] - reach[:-1] > -MARGIN).any(axis=1).mean()
    assert passed == pytest.approx(POWER, abs=0.025)


def test_no_look_is_taken_twice_at_the_same_information_and_the_last_one_spends_the_rest():
    test = a_test()
    test.add(NOTHING, 1.0)
    test.add(an_effect(0.03 * SINGLE), 1.0)
    assert (test.looks, test.lower) == (0, -math.inf), "the first look needs a twenty-fourth"
    for difference in (0.0, 0.05):
        test.add(an_effect(0.5 * SINGLE, difference), 1.0)
        test.add(an_effect(0.45 * SINGLE, difference), 1.0)
        test.add(an_effect(0.53 * SINGLE, difference), 1.0)
    assert (test.looks, test.fraction, test.lower) == (
        1,
        pytest.approx(0.5),
        pytest.approx(-2.254 * (2 / SINGLE) ** 0.5, rel=0.001),
    )
    test.add(an_effect(0.53 * SINGLE), PLAN.limit_s)
    assert (test.looks, test.fraction) == (2, pytest.approx(0.53)), "at the time limit a small growth is enough"
    test.add(an_effect(9.0 * SINGLE, 0.5), PLAN.limit_s + 1.0)
    assert test.looks == 2, "alpha is spent"
    late = a_test()
    late.add(an_effect(0.5 * SINGLE), 1.0)
    late.add(an_effect(0.5 * SINGLE), PLAN.limit_s)
    assert late.looks == 1


def test_few_users_get_wider_bounds():
    wide, narrow = a_test(), a_test()
    wide.add(an_effect(0.5 * SINGLE, freedom=20.0), 1.0)
    narrow.add(an_effect(0.5 * SINGLE), 1.0)
    assert wide.lower < 1.05 * narrow.lower < 0.0


def test_the_plan_is_for_what_is_needed_or_for_what_the_traffic_gives_if_that_is_less():
    config = TrialConfig()
    many, few = (Traffic(people=people, turns=10 * people, good=0.6) for people in (100_000, 500))
    plan = ship_plan(many, {"acceptance": 0.02, "kept": 0.01}, config)
    assert plan.information == {"acceptance": pytest.approx(SINGLE), "kept": pytest.approx(4 * SINGLE)}
    assert (plan.alpha, plan.limit_s) == (config.ship_alpha, 96 * HOUR)
    assert ship_plan(few, {"acceptance": 0.02}, config).information["acceptance"] < 0.5 * SINGLE
    assert ship_plan(None, {"acceptance": 0.02}, config) is None
    # a goal that may lose nothing: as much information as the traffic gives
    assert ship_plan(few, {"acceptance": 0.0}, config).information["acceptance"] > 0.0
    assert ship_plan(Traffic(people=0, turns=0, good=0.0), {"acceptance": 0.02}, config) is None


@pytest.mark.parametrize(
    "stored",
    [
        None,
        "plan",
        {"alpha": 0.05},
        {"information": {"a": -1.0}, "alpha": 0.05, "limit_s": 1.0, "looks": 24},
        {"information": {"a": float("nan")}, "alpha": 0.05, "limit_s": 1.0, "looks": 24},
        {"information": {"a": 1.0}, "alpha": 0.7, "limit_s": 1.0, "looks": 24},
        {"information": [1.0], "alpha": 0.05, "limit_s": 1.0, "looks": 24},
        {"information": {"a": "x"}, "alpha": 0.05, "limit_s": 1.0, "looks": 0},
    ],
)
def test_a_line_without_a_sound_plan_leaves_the_decision_to_the_sequence(stored):
    assert ShipPlan.read(stored) is None
