"""Lending and giving back: each rule by hand, then a simulation in which users are late as soon as the guard is taken away."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.compute.lending_simulation import (
    Diurnal,
    ServingFleet,
    mean_wait,
    moved,
    read_traffic,
    simulate_lending,
    traffic_of,
)

from ostinato.compute.borrowing import FleetView, GuardRules, lending
from ostinato.compute.ledger import ShareRules
from ostinato.core.errors import BadRequest

GUARD = GuardRules()
CALM = FleetView(serving=20, returning=0, lent=5, rate=30, highest=35, delay_s=0, carries=5, since_s=1e9)
STEP_S = 60.0
DAYS = traffic_of(Diurnal(days=2), STEP_S, seed=3)
FLEET = ServingFleet(outage_at_s=86_400.0 + 10 * 3600.0)


@pytest.mark.parametrize(
    ("change", "wanted", "lent"),
    [
        ({}, 12, 2),  # 35 / (5 * 0.6) = 11.7: eight could go, two at once
        ({"highest": 57}, 12, 1),  # 19 are needed
        ({"highest": 60}, 12, 0),
        ({}, 6, 1),
        ({}, 4, -1),  # sampling has use for four
        ({"since_s": 800}, 12, 0),
        ({"rate": 78, "highest": 78}, 12, -1),  # 78 / (5 * 0.75) = 20.8
        ({"rate": 78, "highest": 78, "returning": 1}, 12, 0),
        ({"rate": 150, "highest": 150}, 12, -5),
        ({"delay_s": 0.6}, 12, -5),
        ({"delay_s": 0.6, "since_s": 0}, 12, -5),  # users first: no pause holds up what is given back
    ],
)
def test_each_rule_by_hand(change, wanted, lent):
    assert lending(GUARD, replace(CALM, **change), wanted) == lent


@pytest.mark.parametrize(
    ("workers", "sampling", "borrowed", "observed", "change"),
    [
        (30, 10, 0, 1 / 3, 0),
        (30, 4, 0, 1 / 3, 4),  # six are missing, four move at once
        (30, 10, 6, 1 / 3, -4),  # a third of 36 is 12, six of them borrowed
        (30, 10, 0, 1 / 3 + 0.02, 0),  # less than `slack` of a worker
        (30, 10, 0, 1 / 3 + 0.04, -1),
        (30, 0, 40, 0.6, 0),  # more is borrowed than the share allows: nobody is left to move
    ],
)
def test_workers_that_move_by_hand(workers, sampling, borrowed, observed, change):
    assert moved(ShareRules(), workers, sampling, borrowed, observed) == change


def test_one_server_waits_as_the_formula_for_one_says():
    assert mean_wait(1, 0.5, 3.0) == pytest.approx(0.5 / (1 - 0.5) * 3.0)


def test_under_the_guard_users_wait_no_longer_than_promised_and_much_is_harvested():
    off, on = (simulate_lending(FLEET, guard, ShareRules(), DAYS, STEP_S) for guard in (None, GUARD))
    assert (off.violations, on.violations) == (0, 0)
    assert (off.harvested_h, off.preemptions) == (0, 0)
    assert on.harvested_h > 0.4 * off.idle_h
    assert on.idle_h + on.harvested_h == pytest.approx(off.idle_h, rel=0.02)  # the rest is under way
    assert max(on.apart, off.apart) <= 0.02


@pytest.mark.parametrize("without", [{"return_above": 1e18}, {"return_above": 1e18, "guard_s": 1e18}])
def test_without_the_guard_users_are_late(without):
    assert simulate_lending(FLEET, replace(GUARD, **without), ShareRules(), DAYS, STEP_S).violations > 0


def test_the_pause_bounds_how_often_rollouts_are_cut_off():
    often = simulate_lending(FLEET, replace(GUARD, hold_s=0.0, window_s=0.0), ShareRules(), DAYS, STEP_S)
    seldom = simulate_lending(FLEET, GUARD, ShareRules(), DAYS, STEP_S)
    assert 0 < seldom.preemptions < often.preemptions


def test_without_moving_workers_the_share_is_not_held():
    still = simulate_lending(FLEET, GUARD, replace(ShareRules(), moves=0), DAYS, STEP_S)
    assert still.apart > 0.1


def test_no_worker_moves_within_an_optimizer_step():
    """With a single step that lasts throughout, workers can move at its beginning only."""
    one = simulate_lending(replace(FLEET, step_s=1e12), GUARD, ShareRules(), DAYS, STEP_S)
    assert one.moves <= ShareRules().moves
    assert simulate_lending(FLEET, GUARD, ShareRules(), DAYS, STEP_S).moves > 10


def test_an_outage_calls_replicas_back():
    steady = np.full(24 * 60, 60.0)
    fleet = replace(FLEET, replicas=24, outage_at_s=12 * 3600.0, outage=0.25)
    calm = simulate_lending(replace(fleet, outage=0.0), GUARD, ShareRules(), steady, STEP_S)
    struck = simulate_lending(fleet, GUARD, ShareRules(), steady, STEP_S)
    assert calm.preemptions == 0
    assert struck.preemptions > 0
    assert struck.violations == 0


def test_what_cannot_be_carried_waits_by_hand():
    fleet = replace(FLEET, replicas=2, carries=5.0, slots=1, outage=0.0)
    found = simulate_lending(fleet, None, ShareRules(), np.array([12.0, 8.0, 0.0]), step_s=10.0)
    # 20 requests are left after the first step, none after the second; at a load of 0.999 two slots wait on top
    assert found.worst_delay_s == pytest.approx(20 / 10 + mean_wait(2, 0.999, 0.2))
    assert found.violations == 1
    assert found.late == 12 / 20


def test_traffic_is_the_same_under_the_same_seed_and_rests_at_night_and_on_weekends():
    made = Diurnal(days=7, noise=0.0, bursts=0.0)
    rate = traffic_of(made, 3600.0, seed=1)
    assert (rate == traffic_of(made, 3600.0, seed=1)).all()
    assert rate[2] == pytest.approx(15)
    assert rate[14] == pytest.approx(100)
    assert rate[5 * 24 + 14] == pytest.approx(60)


def test_a_users_own_trace():
    text = "seconds,requests_per_second\n0,5\n60,7\n"
    assert read_traffic(text, 20.0).tolist() == [5, 5, 5, 7, 7, 7]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "line 1"),
        ("a,b\n0,1\n1,1\n", "line 1"),
        ("seconds,requests_per_second\n0,1\n", "at least two"),
        ("seconds,requests_per_second\n0,1\n0,1\n", "line 3: .* does not come after"),
        ("seconds,requests_per_second\n0,1\n5,x\n", "line 3: two numbers"),
        ("seconds,requests_per_second\n0,-1\n5,1\n", "line 2: -1.0 is no rate"),
        ("seconds,requests_per_second\n0,1\n5,nan\n", "line 3"),
        ("seconds,requests_per_second\nnan,1\n5,1\n", "line 2"),
    ],
)
def test_a_trace_that_cannot_be_read_is_named(text, names):
    with pytest.raises(BadRequest, match=names):
        read_traffic(text, 20.0)


def test_a_fleet_of_nothing_is_refused():
    with pytest.raises(BadRequest):
        simulate_lending(replace(FLEET, replicas=0), GUARD, ShareRules(), DAYS, STEP_S)
