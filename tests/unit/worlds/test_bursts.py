"""A burst is placed as its assumptions say: where the answer can be worked out by hand, it is that."""

from dataclasses import replace

import pytest

from ostinato.core.errors import BadRequest
from ostinato.worlds.bursts import Burst, Fleet, Packing, simulate

CALM = Burst(sandboxes=400, failure=0.0, spread=0.0, start_s=0.1)


@pytest.mark.parametrize("packing", Packing)
def test_the_same_seed_gives_the_same_numbers_and_nothing_is_lost_on_the_way(packing):
    burst = Burst(sandboxes=3000, failure=0.1, lose_region_at=1.0)
    found = simulate(Fleet(nodes=20), burst, packing, seed=4)
    assert found == simulate(Fleet(nodes=20), burst, packing, seed=4)
    assert found.placed + found.unplaced == 3000
    assert found.lost > 0
    assert found.failed > 200


@pytest.mark.parametrize("packing", Packing)
def test_a_control_plane_that_is_the_narrowest_place_sets_the_time(packing):
    found = simulate(Fleet(clusters=1, nodes=50, cluster_rate=40.0, start_rate=1e6), CALM, packing)
    assert 400 / 40 <= found.all_s <= 400 / 40 + 0.2


def test_first_fit_waits_for_few_machines_where_starts_are_slow_and_pays_for_few():
    fleet = Fleet(clusters=1, nodes=10, cluster_rate=1e6, start_rate=10.0)
    first, least, pressure = (simulate(fleet, CALM, packing) for packing in Packing)
    assert first.machines == 4  # 128 of 1 GB on each
    assert first.all_s >= 128 / 10
    assert least.machines == pressure.machines == 10
    assert max(least.all_s, pressure.all_s) <= 400 / 10 / 10 + 0.3


def test_what_is_asked_for_and_not_taken_holds_nobody_up_who_looks_at_what_is_taken():
    fleet, burst = Fleet(clusters=1, nodes=2), replace(CALM, taken_gb=0.4)
    asked, taken = (simulate(fleet, burst, packing) for packing in (Packing.LEAST_LOADED, Packing.PRESSURE))
    assert (asked.placed, asked.unplaced) == (256, 144)
    assert (taken.placed, taken.unplaced, taken.killed) == (400, 0, 0)


def test_who_takes_more_than_was_asked_for_is_killed_unless_somebody_looks():
    fleet, burst = Fleet(clusters=1, nodes=8), replace(CALM, taken_gb=1.6)
    blind, seeing = (simulate(fleet, burst, packing) for packing in (Packing.FIRST_FIT, Packing.PRESSURE))
    assert blind.killed > 0
    assert seeing.killed == 0
    assert seeing.placed == 400


def test_a_region_that_is_lost_is_made_up_for_where_there_is_room():
    burst = replace(CALM, lose_region_at=0.5, notice_s=2.0)
    found = simulate(Fleet(clusters=2, nodes=10), burst, Packing.LEAST_LOADED)
    assert found.placed == 400
    assert 0 < found.lost <= 200
    assert found.all_s > 2.5


def test_a_fleet_of_nothing_is_refused():
    with pytest.raises(BadRequest):
        simulate(Fleet(nodes=0), CALM, Packing.FIRST_FIT)
