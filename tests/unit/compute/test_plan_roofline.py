"""Formulas of the plan with numbers that can be worked out by hand."""

import pytest

from ostinato.compute.plan import (
    Need,
    PlannedHardware,
    PlannedModel,
    PlannedShares,
    PlannedTurns,
    cache_bytes,
    decode_work,
    dispatch_bytes,
    fitting_answers,
    parameters_read,
    planned_work,
    prefill_work,
    roofline,
    smallest_replica,
)

DENSE = PlannedModel(parameters=1000, active=1000, layers=2, hidden=10, heads=4, kv_heads=2, head_size=5, experts=0)
SPARSE = PlannedModel(
    parameters=900, active=300, layers=2, hidden=10, heads=4, kv_heads=2, head_size=5, experts=4, experts_per_token=1
)
TURNS = PlannedTurns(prompt=8, answer=2, cached=0.5)
CARD = PlannedHardware(accelerators=2, flops=100, memory=1000, memory_rate=10, network=5)
ALL = PlannedShares(memory_rate=1, network=1, memory=1)


@pytest.mark.parametrize(
    ("need", "seconds", "by"),
    [
        (Need(flops=1000, memory=50, wire=10), 20.0, "operations"),
        (Need(flops=1000, memory=250, wire=10), 25.0, "memory"),
        (Need(flops=1000, memory=50, wire=500), 100.0, "network"),
    ],
)
def test_the_slowest_of_three_sets_the_time(need, seconds, by):
    found = roofline(need, CARD, ALL, compute=0.5)
    assert (found.seconds, found.by) == (seconds, by)


def test_a_token_costs_two_operations_a_parameter_and_four_a_head_width_and_pair():
    work = planned_work(DENSE)
    assert (work.body, work.pair) == (2000, 4 * 2 * 4 * 5)


def test_a_token_of_cache_is_a_key_and_a_value_in_each_layer():
    assert cache_bytes(DENSE) == 2 * 2 * 2 * 5 * 2


def test_experts_that_are_read():
    assert parameters_read(DENSE, 1) == 1000
    # 900 = d + x and 300 = d + x/4: experts hold 800, everybody reads the other 100
    assert parameters_read(SPARSE, 1) == pytest.approx(300)
    assert parameters_read(SPARSE, 2) == pytest.approx(100 + 800 * (1 - 0.75**2))
    assert parameters_read(SPARSE, 1e4) == pytest.approx(900)


def test_what_experts_on_other_machines_cost_the_network():
    assert dispatch_bytes(SPARSE, 3) == 2 * 2 * 2 * 3 * 10
    assert dispatch_bytes(DENSE, 3) == 0


def test_a_prefill_by_hand():
    found = prefill_work(DENSE, TURNS, chunk=16, copies=0)
    pairs = 5 + 6 + 7 + 8  # four new tokens after four cached ones
    assert found.flops == 4 * 2000 + pairs * 160
    assert found.memory == 4 / 16 * 1000 * 2 + 8 * 80


def test_a_decode_by_hand():
    found = decode_work(DENSE, TURNS, batch=4, copies=0)
    pairs = 9 + 10
    assert found.flops == 2 * 2000 + pairs * 160
    assert found.memory == 2 / 4 * 1000 * 2 + pairs * 80


def test_room_beside_the_weights():
    assert fitting_answers(DENSE, TURNS, CARD, ALL, replica=2) == (2 * 2 * 1000 - 2000) / (9 * 80)
    assert fitting_answers(DENSE, TURNS, CARD, ALL, replica=1) == 0
    assert smallest_replica(DENSE, TURNS, CARD, ALL) == 2
