"""Arms are compared hour by hour: what both went through at different strengths is nobody's fault."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ostinato.evaluate.statistics import clustered_difference
from ostinato.release.trial.contrast import NOTHING, Contrast, TimeSlot


def compared(live, control):
    """The effect over the slots, as the guard adds them up."""
    contrast, numbers = Contrast(1e9), {}
    for slot in sorted({at for at, _ in (*live, *control)}):
        rows = [
            (numbers.setdefault(person, len(numbers)), treated, value, count)
            for treated, tallies in ((True, live), (False, control))
            for (at, person), (value, count) in tallies.items()
            if at == slot
        ]
        people, treated, good, turns = (np.array(column) for column in zip(*rows, strict=True))
        contrast.add(
            TimeSlot(
                day=slot // 24,
                people_R=people,
                turns_R=turns.astype(float),
                good_R=good,
                expected_R=np.full(len(rows), 0.5),
                treated_R=treated,
            )
        )
    return contrast.effect()


def error(effect):
    return effect.variance**0.5


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
    found = compared(live, control)
    assert abs(found.difference) < 0.03
    assert abs(found.difference) < 2.576 * error(found)


def test_the_hours_add_nothing_to_the_spread_between_people():
    rng = np.random.default_rng(8)
    rates = [0.9, 0.1] * 12
    live, control = (served(rng, 1_000, rates, [200] * 24, name=name) for name in "lc")
    together = clustered_difference(pooled(live), pooled(control), 0.95)
    assert error(compared(live, control)) < 0.8 * together.error


@pytest.mark.parametrize("swing", [0.0, 0.3])
def test_equally_good_arms_are_told_apart_as_often_as_the_level_says(swing):
    rng, wrong, runs = np.random.default_rng(9), 0, 200
    for _ in range(runs):
        rates = 0.5 + swing * np.sin(np.arange(24))
        live = served(rng, 60, rates, rng.integers(40, 200, 24), name="l")
        control = served(rng, 12, rates, rng.integers(5, 20, 24), name="c")
        found = compared(live, control)
        wrong += abs(found.difference) > stats.t.ppf(0.95, max(found.freedom - 1.0, 1.0)) * error(found)
    assert wrong / runs < 0.1 + 2 * math.sqrt(0.1 * 0.9 / runs)


def test_a_loss_in_every_hour_is_found_whole():
    rng = np.random.default_rng(10)
    rates = [0.8, 0.4] * 24
    live = served(rng, 300, rates, [600] * 48, name="l", loss=0.1)
    control = served(rng, 300, rates, [600] * 48, name="c")
    found = compared(live, control)
    lower, upper = found.difference - 2.576 * error(found), found.difference + 2.576 * error(found)
    assert lower < -0.1 < upper < -0.05


def test_an_arm_whose_outcomes_are_all_good_keeps_the_spread_that_stands_in_for_none():
    rng = np.random.default_rng(11)
    live = served(rng, 40, [0.5, 0.7], [40, 40], name="l")
    control = {(slot, ("t", f"c{n}")): (1.0, 1) for slot in (0, 1) for n in range(5)}
    found = compared(live, control)
    assert found.difference + stats.t.ppf(0.995, found.freedom - 1.0) * error(found) > 0.0


tally = st.integers(1, 9).flatmap(lambda n: st.tuples(st.integers(0, n).map(float), st.just(n)))
counts = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 5).map(lambda n: ("t", f"u{n}"))),
    tally,
    max_size=20,
)
ample = st.dictionaries(st.integers(0, 3), st.lists(tally, min_size=5, max_size=7)).map(
    lambda found: {(slot, ("t", f"u{n}")): each for slot, some in found.items() for n, each in enumerate(some)}
)
"""Five people a slot at least: slots with fewer on a side, or none, are compared as one."""


@given(ample, ample)
def test_the_difference_is_the_weighted_mean_of_the_hours_differences(treated, control):
    def of(tallies, slot):
        chosen = [tally for (at, _), tally in tallies.items() if at == slot]
        return sum(value for value, _ in chosen), sum(count for _, count in chosen)

    both = {slot for slot, _ in treated} & {slot for slot, _ in control}
    treated, control = ({key: each for key, each in side.items() if key[0] in both} for side in (treated, control))
    weighted = weight = 0.0
    for slot in both:
        (good, turns), (others_good, others) = of(treated, slot), of(control, slot)
        each = turns * others / (turns + others)
        weighted, weight = weighted + each * (good / turns - others_good / others), weight + each
    found = compared(treated, control)
    if not both:
        assert found == NOTHING
        return
    assert found.difference == pytest.approx(weighted / weight, abs=1e-9)


@given(counts, counts)
def test_one_slot_alone_is_the_plain_comparison(treated, control):
    treated, control = ({(0, person): tally for (_, person), tally in each.items()} for each in (treated, control))
    if len(treated) > 1 and len(control) > 1:
        plain = clustered_difference(pooled(treated), pooled(control), 0.9)
        assert compared(treated, control).difference == pytest.approx(plain.mean, abs=1e-9)
