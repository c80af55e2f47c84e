"""Signals that come before their turns: kept within bounds, by tenant, and the same however often the fold is taken up again."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.reward.ledger import Orphans
from ostinato.testing.records import a_signal, a_turn


def about(turn, tenant, number=0):
    return replace(a_signal(a_turn(turn), id=f"s{number}"), tenant=tenant)


def a_few(**bounds):
    return Orphans(**{"most": 10, "most_bytes": 1 << 20, "seconds": 100.0, **bounds})


@pytest.mark.parametrize("bounds", [{}, {"most": 10_000, "most_bytes": 2_000}])
def test_one_tenants_flood_costs_no_other_its_own(bounds):
    orphans = a_few(**bounds)
    orphans.add(1, about("mine", "acme"), 0.0)
    for number in range(1000):
        orphans.add(2 + number, about(f"guess{number}", "bolt", number), 0.0)
    assert orphans.claim("acme", "mine") == [(1, "s0", None)]
    assert orphans.claim("bolt", "guess999")
    assert not orphans.claim("bolt", "guess0"), "the flood's own oldest made room"
    assert orphans.dropped > 900


def test_nor_does_a_flood_about_the_very_turn():
    orphans = a_few()
    orphans.add(1, about("mine", "acme"), 0.0)
    for number in range(50):
        orphans.add(2 + number, about("mine", "bolt", number), 0.0)
    assert orphans.claim("acme", "mine") == [(1, "s0", None)]


def test_each_tenants_oldest_expire():
    orphans = a_few()
    for now, tenant in ((0.0, "acme"), (0.0, "bolt"), (60.0, "acme")):
        orphans.add(1, about(f"at{now}", tenant), now)
    orphans.expire(101.0)
    assert orphans.expired == 2
    assert [orphans.claim(*key) != [] for key in (("acme", "at0.0"), ("bolt", "at0.0"), ("acme", "at60.0"))] == [
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
            broken.restore(state)
        for each in (straight, broken):
            if claims:
                each.claim(tenant, str(turn))
            else:
                each.add(number, about(str(turn), tenant, number), float(number))
            assert each.count <= most
            assert 0 <= each.bytes <= 1500
    assert (straight.count, straight.bytes, straight.dropped) == (broken.count, broken.bytes, broken.dropped)
    for tenant in "abc":
        for turn in range(9):
            assert straight.claim(tenant, str(turn)) == broken.claim(tenant, str(turn))
    assert (straight.count, straight.bytes) == (0, 0)
