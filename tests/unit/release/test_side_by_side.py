"""Arms are compared hour by hour: what both went through at different strengths is nobody's fault."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ostinato.evaluate.statistics import clustered_difference
from ostinato.release.watch import side_by_side


def mean(tally):
    return math.fsum(value for value, _ in tally.values()) / math.fsum(count for _, count in tally.values())


def pooled(tallies):
    made = {}
    for (_, person), (value, count) in tallies.items():
        before = made.get(person, (0.0, 0))
        made[person] = before[0] + value, before[1] + count
    return made


def served(rng, people, rates, turns, *, name, loss=0.0):
    """So many turns of each slot among people, good at the slot's rate; each person a little better or worse."""
    own, made = rng.normal(0.0, 0.1, people), {}
    for slot, (rate, count) in enumerate(zip(rates, turns, strict=True)):
        numbers = rng.multinomial(count, np.full(people, 1 / people))
        came = np.flatnonzero(numbers)
        share = np.clip(rate + own[came] - loss, 0.0, 1.0) if rate else np.zeros(len(came))
        good = rng.binomial(numbers[came], share)
        for person, number, value in zip(came.tolist(), numbers[came].tolist(), good.tolist(), strict=True):
            made[slot, ("t", f"{name}{person}")] = float(value), number
    return made


def test_an_outage_before_a_candidate_took_half_of_lives_users_is_not_lives_fault():
    rng = np.random.default_rng(7)
    rates = [0.0] * 12 + [0.6] * 12
    live = served(rng, 400, rates, [800] * 12 + [400] * 12, name="l")
    control = served(rng, 100, rates, [200] * 24, name="c")
    assert clustered_difference(pooled(live), pooled(control), 0.99).upper < -0.05
    found = clustered_difference(*side_by_side(live, control), 0.99)
    assert abs(found.mean) < 0.03
    assert found.lower < 0.0 < found.upper


def test_the_hours_add_nothing_to_the_spread_between_people():
    rng = np.random.default_rng(8)
    rates = [0.9, 0.1] * 12
    live, control = (served(rng, 1_000, rates, [200] * 24, name=name) for name in "lc")
    apart = clustered_difference(*side_by_side(live, control), 0.95)
    together = clustered_difference(pooled(live), pooled(control), 0.95)
    assert apart.error < 0.8 * together.error


@pytest.mark.parametrize("swing", [0.0, 0.3])
def test_equally_good_arms_are_told_apart_as_often_as_the_level_says(swing):
    rng, wrong, runs = np.random.default_rng(9), 0, 400
    for _ in range(runs):
        rates = 0.5 + swing * np.sin(np.arange(24))
        live = served(rng, 60, rates, rng.integers(40, 200, 24), name="l")
        control = served(rng, 12, rates, rng.integers(5, 20, 24), name="c")
        found = clustered_difference(*side_by_side(live, control), 0.9)
        wrong += not found.lower <= 0.0 <= found.upper
    assert wrong / runs < 0.1 + 2 * math.sqrt(0.1 * 0.9 / runs)


def test_a_loss_in_every_hour_is_found_whole():
    rng = np.random.default_rng(10)
    rates = [0.8, 0.4] * 24
    live = served(rng, 300, rates, [600] * 48, name="l", loss=0.1)
    control = served(rng, 300, rates, [600] * 48, name="c")
    found = clustered_difference(*side_by_side(live, control), 0.99)
    assert found.lower < -0.1 < found.upper < -0.05


def test_an_arm_whose_outcomes_are_all_good_keeps_the_spread_that_stands_in_for_none():
    rng = np.random.default_rng(11)
    live = served(rng, 40, [0.5, 0.7], [40, 40], name="l")
    control = {(slot, ("t", f"c{n}")): (1.0, 1) for slot in (0, 1) for n in range(5)}
    assert clustered_difference(*side_by_side(live, control), 0.99).upper > 0.0


counts = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 5).map(lambda n: ("t", f"u{n}"))),
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.integers(0, n).map(float), st.just(n))),
    max_size=20,
)


@given(counts, counts)
def test_the_difference_is_the_weighted_mean_of_the_hours_differences(treated, control):
    def of(tallies, slot):
        chosen = [tally for (at, _), tally in tallies.items() if at == slot]
        return sum(value for value, _ in chosen), sum(count for _, count in chosen)

    weighted = weight = 0.0
    for slot in range(4):
        (good, turns), (others_good, others) = of(treated, slot), of(control, slot)
        if turns and others:
            each = turns * others / (turns + others)
            weighted, weight = weighted + each * (good / turns - others_good / others), weight + each
    one, other = side_by_side(treated, control)
    if not weight:
        assert (one, other) == ({}, {})
        return
    assert mean(one) - mean(other) == pytest.approx(weighted / weight, abs=1e-9)
    assert set(one) <= {person for _, person in treated}


@given(counts, counts)
def test_one_slot_alone_is_the_plain_comparison(treated, control):
    treated, control = ({(0, person): tally for (_, person), tally in each.items()} for each in (treated, control))
    if len(treated) > 1 and len(control) > 1:
        plain = clustered_difference(pooled(treated), pooled(control), 0.9)
        found = clustered_difference(*side_by_side(treated, control), 0.9)
        assert (found.mean, found.df) == pytest.approx((plain.mean, plain.df), abs=1e-9)
        means = {id(each): mean(pooled(each)) for each in (treated, control)}
        away = [abs(value - means[id(each)] * count) for each in (treated, control) for value, count in each.values()]
        assume(min(away) > 1e-6)  # of people, only those who differ from the mean are counted
        assert found.error == pytest.approx(plain.error, abs=1e-9)
