"""One arm minus another: against the textbook's formula, and under what would fool a pooled share."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ostinato.release.trial.contrast import NOTHING, Contrast, SlotTally, TimeSlot, log_evidence


def slot(people, turns, good, treated, *, expected=0.0, day=0, share=None):
    people = np.asarray(people, dtype=np.int64)
    return TimeSlot(
        day=day,
        people_R=people,
        turns_R=np.asarray(turns, dtype=np.float64),
        good_R=np.asarray(good, dtype=np.float64),
        expected_R=np.broadcast_to(np.asarray(expected, dtype=np.float64), people.shape),
        treated_R=np.asarray(treated, dtype=np.bool_),
        share=share,
    )


def after(*slots, most=20.0):
    contrast = Contrast(most)
    for each in slots:
        contrast.add(each)
    return contrast.effect()


def test_one_slot_is_the_delta_methods_ratio_difference():
    rng = np.random.default_rng(1)
    turns = rng.integers(1, 9, 400).astype(float)
    good = rng.binomial(turns.astype(int), rng.beta(3, 2, 400)).astype(float)
    treated = rng.random(400) < 0.3
    effect = after(slot(range(400), turns, good, treated))
    means, variance = [], 0.0
    for side in (treated, ~treated):
        mean = good[side].sum() / turns[side].sum()
        influence = (good[side] - mean * turns[side]) / turns[side].sum()
        k = (influence**2).sum() ** 2 / (influence**4).sum()
        means.append(mean)
        variance += (influence**2).sum() * k / (k - 1)
    assert effect.difference == pytest.approx(means[0] - means[1])
    assert effect.variance == pytest.approx(variance)
    assert effect.turns == min(turns[treated].sum(), turns[~treated].sum())


def test_nobody_or_one_arm_only_says_nothing():
    assert after() == NOTHING
    assert after(slot([], [], [], [])) == NOTHING
    assert after(slot([0, 1], [3, 4], [1, 2], [True, True])) == NOTHING


def test_one_person_a_side_is_one_person():
    effect = after(slot([0, 1], [9, 9], [1, 8], [True, False]))
    assert effect.people == 1.0
    assert effect.variance > 0.05


@pytest.mark.parametrize("expected", [0.0, 0.9, 1 / 3])
def test_people_who_all_say_the_same_are_no_proof_of_no_spread(expected):
    """Three of three against three of three: nothing is known to a point yet."""
    for n in (3, 300):
        rows = [slot(range(2 * n), np.full(2 * n, 7.0), np.full(2 * n, 7.0), np.arange(2 * n) < n, expected=expected)]
        effect = after(*rows, *rows)
        assert effect.people == n
        share = (n + 1) / (n + 2)
        assert effect.variance == pytest.approx(2 * share * (1 - share) / (n + 2))
        assert effect.difference == pytest.approx(0.0, abs=1e-12)


def test_a_person_who_comes_back_stays_one_person():
    """Ten times the same answers are ten times the turns and no more people: the variance does not shrink."""
    rng = np.random.default_rng(2)
    good, treated = rng.integers(0, 3, 60).astype(float), np.arange(60) % 2 == 0
    once = after(slot(range(60), np.full(60, 2.0), good, treated))
    often = after(*[slot(range(60), np.full(60, 2.0), good, treated) for _ in range(10)], most=1000.0)
    assert often.difference == pytest.approx(once.difference)
    assert often.variance == pytest.approx(once.variance)
    assert often.people == pytest.approx(once.people)


def test_a_ramp_through_the_day_makes_no_difference_where_there_is_none():
    """Few are treated in the good hours and many in the bad ones: pooled shares differ by far, slots by nothing."""
    rng = np.random.default_rng(3)
    slots, pooled = [], {True: [0.0, 0.0], False: [0.0, 0.0]}
    for share, level in ((0.05, 0.9), (0.5, 0.3)):
        treated = rng.random(4000) < share
        turns = np.full(4000, 3.0)
        good = rng.binomial(3, level, 4000).astype(float)
        slots.append(slot(range(4000), turns, good, treated))
        for side in (True, False):
            pooled[side][0] += good[treated == side].sum()
            pooled[side][1] += turns[treated == side].sum()
    naive = pooled[True][0] / pooled[True][1] - pooled[False][0] / pooled[False][1]
    effect = after(*slots)
    assert naive < -0.1
    assert abs(effect.difference) < 3 * math.sqrt(effect.variance) < 0.03


def test_what_a_person_was_expected_to_do_is_taken_off_and_takes_the_noise_with_it():
    rng = np.random.default_rng(4)
    taste = rng.beta(2, 1.5, 3000)
    turns = np.full(3000, 8.0)
    treated = rng.random(3000) < 0.5
    good = rng.binomial(8, np.clip(taste - 0.03 * treated, 0, 1)).astype(float)
    plain = after(slot(range(3000), turns, good, treated))
    knowing = after(slot(range(3000), turns, good, treated, expected=taste))
    assert knowing.variance < plain.variance / 2
    assert abs(knowing.difference + 0.03) < 4 * math.sqrt(knowing.variance)


def test_the_interval_covers_what_is_true_with_people_who_differ_and_come_back():
    rng = np.random.default_rng(5)
    covered, runs = 0, 300
    for _ in range(runs):
        taste, rate = rng.beta(3.4, 2.3, 240), rng.lognormal(0, 1.0, 240)
        treated = rng.random(240) < 0.3
        slots = []
        for j in range(8):
            turns = rng.poisson(rate)
            came = turns > 0
            good = rng.binomial(turns, np.clip(taste + 0.05 * treated, 0, 1))
            slots.append(slot(np.flatnonzero(came), turns[came], good[came], treated[came], day=j // 4))
        effect = after(*slots)
        covered += abs(effect.difference - 0.05) < 1.96 * math.sqrt(effect.variance)
    assert 0.91 <= covered / runs <= 0.985


def test_a_busy_person_counts_for_a_days_turns_and_again_tomorrow():
    rows = ([0, 1, 2, 3], [500.0, 2.0, 2.0, 2.0], [0.0, 1.0, 1.0, 1.0], [True, True, False, False])
    today, also_today = slot(*rows), slot(*rows)
    tomorrow = slot(*rows, day=1)
    assert after(today, most=20.0).turns == 4.0
    capped, more, again = (Contrast(20.0) for _ in range(3))
    capped.add(today)
    for contrast in (more, again):
        contrast.add(today)
    more.add(also_today)
    again.add(tomorrow)
    assert capped.effect().difference == pytest.approx(1 / 22 - 0.5)
    # person 0 has no turns left today, so the second slot is the other treated person alone
    assert more.effect().difference > capped.effect().difference
    assert again.effect().difference == pytest.approx(capped.effect().difference)


def test_turns_are_counted_and_capped_whatever_a_turns_denominator_is():
    people, treated = np.arange(8), np.arange(8) < 4
    turns, good = np.array([30.0, 2, 3, 4, 40, 2, 3, 4]), np.array([10.0, 2, 1, 3, 20, 1, 2, 0])
    plain = after(slot(people, turns, good, treated))
    for size in (0.01, 250.0):
        contrast, tally = Contrast(20.0), SlotTally()
        for person, count, each in zip(people, turns, good, strict=True):
            for _ in range(int(count)):
                tally.add("", int(person), bool(treated[person]), (each / count * size, size), 0.0)
        contrast.add(tally.slot(0))
        effect = contrast.effect()
        assert effect.turns == plain.turns == 29.0
        assert effect.difference == pytest.approx(plain.difference)
        assert effect.variance == pytest.approx(plain.variance)


def test_a_person_who_changes_sides_is_still_one_person():
    first = slot([0, 1, 2, 3], [4.0] * 4, [3.0, 2.0, 1.0, 2.0], [False, False, True, True])
    later = slot([0, 1, 2, 3], [4.0] * 4, [3.0, 2.0, 1.0, 2.0], [True, False, True, True], day=1)
    effect = after(first, later)
    assert math.isfinite(effect.difference)
    assert effect.people < 4


def test_where_nearly_nobody_of_one_side_has_the_event_the_others_people_count():
    """Three of two hundred fail beside three in ten of two hundred: how sure that is depends on the second."""
    good = np.zeros(400)
    good[:3] = 1.0
    good[200::3] = 1.0
    effect = after(slot(range(400), np.full(400, 4.0), good, np.arange(400) >= 200))
    assert effect.people < 4
    assert effect.freedom > 60


def test_what_was_expected_of_people_who_all_did_the_same_is_no_spread():
    expected = np.random.default_rng(7).uniform(0.0, 0.1, 80)
    effect = after(slot(range(80), np.full(80, 5.0), np.zeros(80), np.arange(80) < 40, expected=expected))
    share = 1 / 42
    assert effect.variance == pytest.approx(2 * share * (1 - share) / 42)
    assert effect.people == 40


@pytest.mark.parametrize("tiny", [1e-6, 1e-100, 1e-300])
def test_tiny_denominators_are_no_numbers_to_fail_on(tiny):
    contrast = Contrast()
    good = np.array([1.0, 0.0, 1.0, 0.5])
    contrast.add(
        TimeSlot(
            day=0,
            people_R=np.arange(4),
            turns_R=np.full(4, tiny),
            good_R=good * tiny,
            expected_R=np.zeros(4),
            treated_R=np.array([True, True, False, False]),
        )
    )
    effect = contrast.effect()
    assert effect.people == pytest.approx(2.0) if tiny > 1e-9 else effect.people == 0.0


def test_many_small_tenants_are_as_uncertain_as_their_people():
    """40 tenants of 60 people, one in twelve treated, half-hours in which few of each come."""
    differences, variances = [], []
    for seed in range(40):
        rng, contrast = np.random.default_rng(seed), Contrast()
        taste_U, treated_U = rng.beta(3.4, 2.3, 2_400), rng.random(2_400) < 1 / 12
        for slot in range(12):
            turns_U, tally = rng.poisson(0.2, 2_400), SlotTally()
            for person in np.flatnonzero(turns_U):
                good = float(rng.binomial(turns_U[person], taste_U[person]))
                tally.add(f"t{person // 60}", int(person), bool(treated_U[person]), (good, float(turns_U[person])), 0.6)
            for each in tally.slots(slot // 48).values():
                contrast.add(each)
        effect = contrast.effect()
        differences.append(effect.difference)
        variances.append(effect.variance)
    assert np.var(differences) < 1.6 * np.median(variances)


def test_half_hours_in_which_few_come_are_as_uncertain_as_their_people():
    """600 users of whom nine come in half an hour, one of them on control, who does not differ from control's mean."""
    differences, variances = [], []
    for seed in range(60):
        rng, contrast = np.random.default_rng(seed), Contrast()
        taste_U, treated_U = rng.beta(0.5, 0.5, 600), rng.random(600) >= 0.1
        for number in range(96):
            came = np.flatnonzero(rng.random(600) < 0.015)
            turns = rng.poisson(5.0, len(came)) + 1
            good = rng.binomial(turns, taste_U[came])
            contrast.add(slot(came, turns, good, treated_U[came], day=number // 48))
        effect = contrast.effect()
        differences.append(effect.difference)
        variances.append(effect.variance)
    assert np.mean(np.square(differences)) < 2.0 * np.mean(variances)


def test_sparse_slots_are_compared_as_one_and_others_are_not():
    """Three people a side in each of two half-hours are six in an hour; an ample half-hour between them stays by itself."""
    rng, sides = np.random.default_rng(8), np.arange(6) < 3
    good = rng.integers(0, 5, 12).astype(float)
    first = slot(range(6), np.full(6, 4.0), good[:6], sides)
    other = slot(range(6, 12), np.full(6, 4.0), good[6:], sides)
    both = slot(range(12), np.full(12, 4.0), good, np.tile(sides, 2))
    ample = slot(range(20, 60), np.full(40, 4.0), rng.integers(0, 5, 40), np.arange(40) < 20)
    apart, whole = after(first, ample, other), after(both, ample)
    assert apart.difference == pytest.approx(whole.difference)
    assert apart.variance == pytest.approx(whole.variance)


def test_where_few_come_the_hour_of_the_day_makes_no_difference():
    """Nights with a tenth of the people are 40 points worse for everybody. In most of them nobody of control comes."""
    differences = []
    for seed in range(20):
        rng, contrast = np.random.default_rng(seed), Contrast()
        treated_U = rng.random(1_000) >= 0.1
        for number in range(3 * 48):
            night = number % 48 < 16
            came = np.flatnonzero(rng.random(1_000) < (0.002 if night else 0.02))
            good = np.full(len(came), 0.4 if night else 0.8)
            contrast.add(slot(came, np.ones(len(came)), good, treated_U[came], day=number // 48))
        differences.append(contrast.effect().difference)
    assert abs(np.mean(differences)) < 0.003


def test_half_hours_with_one_arm_only_count_with_those_that_follow():
    sides = np.arange(12) < 6
    good = np.random.default_rng(9).integers(0, 5, 12).astype(float)
    first = slot(range(6), np.full(6, 4.0), good[:6], sides[:6])
    other = slot(range(6, 12), np.full(6, 4.0), good[6:], sides[6:])
    assert after(first) == NOTHING
    apart, whole = after(first, other), after(slot(range(12), np.full(12, 4.0), good, sides))
    assert apart.difference == pytest.approx(whole.difference)
    assert apart.variance == pytest.approx(whole.variance)


def test_half_hours_of_different_shares_are_not_compared_as_one():
    """All is good at first, when an eighth is treated, and nothing later, when half are: versions are equal at either time."""
    first = slot(range(8), np.ones(8), np.ones(8), np.arange(8) < 1, share=0.125)
    later = slot(range(8, 16), np.ones(8), np.zeros(8), np.arange(8) < 4, share=0.5)
    assert after(first, later).difference == 0.0
    assert after(first, replace(later, share=0.125)).difference == pytest.approx(1 / 5 - 7 / 11)


def test_where_all_reject_everything_the_expected_outcomes_are_still_a_spread():
    """An outage at the start of a trial: what differs is only who was dealt to which arm."""
    beyond, rng = 0, np.random.default_rng(4)
    for _ in range(200):
        contrast, expected_R = Contrast(), rng.beta(3.0, 2.0, 60)
        people = np.arange(60)
        contrast.add(
            TimeSlot(
                day=0,
                people_R=people,
                turns_R=np.full(60, 4.0),
                good_R=np.zeros(60),
                expected_R=expected_R,
                treated_R=people < 30,
            )
        )
        effect = contrast.effect()
        beyond += abs(effect.difference) > 2.576 * effect.variance**0.5
    assert beyond / 200 <= 0.03


def test_what_is_expected_of_each_turn_is_added_up():
    tally = SlotTally()
    for expected, good in ((0.9, 1.0), (0.1, 0.0)):
        tally.add("", 3, True, (good, 1.0), expected)
    tally.add("", 4, False, (2.0, 4.0), 0.25)
    rows = tally.slot(day=0)
    assert rows.expected_R.tolist() == [0.5, 0.25]
    assert (rows.good_R - rows.units_R * rows.expected_R).tolist() == [0.0, 1.0]


def test_expectations_of_tasks_however_wrong_raise_no_false_alarms():
    """1,000 trials of equal versions whose tasks' expectations rest on two turns each: the sequence of level 0.05 is wrong in fewer."""
    rng, wrong = np.random.default_rng(11), 0
    for _ in range(1_000):
        chance_K = rng.random(40)
        expected_K = rng.binomial(2, chance_K) / 2.0
        contrast, taste_U, beyond = Contrast(), rng.normal(0.0, 0.1, 60), False
        for day in range(6):
            task_UT = rng.integers(0, 40, (60, 4))
            good_UT = rng.random((60, 4)) < chance_K[task_UT] + taste_U[:, None]
            contrast.add(
                slot(
                    range(60),
                    np.full(60, 4.0),
                    good_UT.sum(axis=1),
                    np.arange(60) % 2 == 0,
                    expected=0.5 + (expected_K[task_UT] - 0.5).mean(axis=1),
                    day=day,
                )
            )
            effect = contrast.effect()
            beyond |= log_evidence(effect.difference, effect.variance, 1) >= math.log(20.0)
        wrong += beyond
    assert wrong <= 50
