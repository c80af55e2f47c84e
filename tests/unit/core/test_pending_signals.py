"""Signals that come before their turns: kept within bounds, by tenant, and the same however often the fold is taken up again."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.core.pending_signals import PendingSignals


def a_few(**bounds):
    bounds = {"most": 10, "most_bytes": 1 << 20, "seconds": 100.0, "size": len, **bounds}
    return PendingSignals[str](**bounds)


@pytest.mark.parametrize("bounds", [{}, {"most": 10_000, "most_bytes": 2_000}])
def test_one_tenants_flood_costs_no_other_its_own(bounds):
    pending = a_few(**bounds)
    pending.add("acme", "mine", "s0")
    for number in range(1000):
        pending.add("bolt", f"guess{number}", f"s{number}")
    assert pending.claim("acme", "mine") == ["s0"]
    assert pending.claim("bolt", "guess999")
    assert not pending.claim("bolt", "guess0"), "the flood's own oldest made room"
    assert pending.dropped > 900


def test_nor_does_a_flood_about_the_very_turn():
    pending = a_few()
    pending.add("acme", "mine", "s0")
    for number in range(50):
        pending.add("bolt", "mine", f"s{number}")
    assert pending.claim("acme", "mine") == ["s0"]


def test_each_tenants_oldest_expire():
    pending = a_few()
    for now, tenant in ((0.0, "acme"), (0.0, "bolt"), (60.0, "acme")):
        pending.advance(now)
        pending.add(tenant, f"at{now}", "s0")
    pending.advance(101.0)
    assert pending.expired == 2
    assert [pending.claim(*key) != [] for key in (("acme", "at0.0"), ("bolt", "at0.0"), ("acme", "at60.0"))] == [
        False,
        False,
        True,
    ]


@settings(max_examples=100)
@given(
    words=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 8), st.booleans()), max_size=80),
    taken_up=st.integers(0, 80),
    most=st.integers(0, 12),
)
def test_it_stays_within_its_bounds_and_takes_up_where_it_was(words, taken_up, most):
    straight = a_few(most=most, most_bytes=1500)
    broken = a_few(most=most, most_bytes=1500)
    for number, (tenant, turn, claims) in enumerate(words):
        if number == taken_up:
            state = json.loads(json.dumps(broken.snapshot()))
            broken = a_few(most=most, most_bytes=1500)
            broken.restore(state, float(number - 1), str)
        for each in (straight, broken):
            each.advance(float(number))
            if claims:
                each.claim(tenant, str(turn))
            else:
                each.add(tenant, str(turn), f"s{number}")
            assert each.count <= most
            assert 0 <= each.bytes <= 1500
    assert (straight.count, straight.bytes, straight.dropped) == (broken.count, broken.bytes, broken.dropped)
    for tenant in "abc":
        for turn in range(9):
            assert straight.claim(tenant, str(turn)) == broken.claim(tenant, str(turn))
    assert (straight.count, straight.bytes) == (0, 0)


def test_of_pending_signals_so_many_are_kept_whatever_number_of_turns_they_are_about():
    pending = a_few(most=1_000, most_each=100, most_bytes=None)
    pending.add("t", "a", "mine")
    for number in range(300):
        for other in range(20):
            pending.add("rival", f"guess{number}", f"f{number}:{other}")
            assert pending.count <= 1_000
    for number in range(200):
        pending.add("rival", "b", f"g{number}")
    assert pending.claim("rival", "b") == [f"g{number}" for number in range(100)], "the first count"
    assert pending.claim("rival", "guess0") == [], "the oldest made room"
    assert len(pending.claim("rival", "guess299")) == 20
    assert pending.claim("t", "a") == ["mine"]
    assert pending.claim("t", "a") == pending.claim("nobody", "a") == []


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 5), st.booleans()), max_size=200))
def test_pending_signals_are_counted_rightly_whatever_comes_and_goes(steps):
    pending = a_few(most=7, most_each=3, most_bytes=None, seconds=10.0)
    for number, (tenant, about, later, comes) in enumerate(steps):
        pending.advance(pending.time + later)
        if comes:
            pending.claim(f"t{tenant}", f"turn{about}")
        else:
            pending.add(f"t{tenant}", f"turn{about}", f"s{number}")
        held = pending.snapshot()["held"]
        assert pending.count == sum(len(signals) for *_, signals in held) <= 7
        assert all(0 < len(signals) <= 3 for *_, signals in held)
        assert pending.bytes >= 0
