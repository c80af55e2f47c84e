"""How many releases a week a traffic carries: what was computed does what it says, and what was measured comes first."""

from dataclasses import replace

import numpy as np
import pytest

from ostinato.release.pace import (
    INTRACLASS_CORRELATION,
    Traffic,
    TrialEnd,
    cadence,
    variance_of,
)
from ostinato.release.trial.config import HOUR, TrialConfig

CONFIG = TrialConfig()
TRAFFIC = Traffic(people=10_000, turns=100_000, good=0.6)


def ends(*hours, passed=True):
    return [TrialEnd(at=0.0, seconds=hour * HOUR, passed=passed) for hour in hours]


def test_the_variance_is_that_of_users_whose_turns_are_alike():
    """Two halves of simulated users whose taste is their own, with the correlation that is assumed."""
    rng, people, each, days = np.random.default_rng(2), 400, 5, 2
    spread = 1 / INTRACLASS_CORRELATION - 1  # of a beta distribution with this intraclass correlation
    differences = []
    for _ in range(1_500):
        taste = rng.beta(0.6 * spread, 0.4 * spread, people)
        good = rng.binomial(each * days, taste) / (each * days)
        differences.append(good[::2].mean() - good[1::2].mean())
    predicted = variance_of(Traffic(people=people, turns=people * each, good=0.6), days, 20.0)
    assert np.var(differences) == pytest.approx(predicted, rel=0.12)


def test_more_people_carry_more_and_a_busy_program_is_not_a_crowd():
    few, many = (cadence(replace(TRAFFIC, people=n, turns=10 * n), [], CONFIG) for n in (10_000, 100_000))
    assert 1.0 < few.a_week < many.a_week
    assert many.sees < few.sees < CONFIG.margin
    busy = cadence(Traffic(people=10, turns=10_000_000, good=0.6), [], CONFIG)
    assert (busy.a_week, busy.trial_s) == (0.0, None)


def test_a_traffic_that_cannot_hold_the_margin_in_time_carries_none():
    small = cadence(Traffic(people=100, turns=1_000, good=0.6), [], CONFIG)
    assert (small.a_week, small.trial_s) == (0.0, None)
    assert small.sees > CONFIG.margin
    wide = cadence(
        Traffic(people=100, turns=1_000, good=0.6), [], CONFIG.model_copy(update={"margin": small.sees * 1.0005})
    )
    assert wide.trial_s == pytest.approx(CONFIG.limit_s, rel=0.1)
    nobody = cadence(Traffic(people=0, turns=0, good=0.0), [], CONFIG)
    assert (nobody.a_week, nobody.sees) == (0.0, 1.0)


def test_what_trials_took_says_more_than_what_was_computed():
    computed = cadence(TRAFFIC, ends(20.0, 24.0), CONFIG)
    assert computed.measured == 0
    found = cadence(TRAFFIC, [*ends(20.0, 24.0, 28.0), *ends(1.0, 1.0, passed=False)], CONFIG)
    assert (found.measured, found.trial_s) == (3, 24 * HOUR)
    assert found.a_week == pytest.approx(7.0)
    assert cadence(TRAFFIC, ends(*[90.0] * 9, *[10.0] * 10), CONFIG).trial_s == 10 * HOUR, "the last ten"
