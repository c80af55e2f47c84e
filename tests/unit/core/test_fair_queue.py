"""Owners take turns, whoever has queued how much."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.fair_share import InTurn


def rest(queue):
    return [*iter(queue.next, None)]


def test_owners_take_turns_and_a_new_one_comes_behind_those_that_wait():
    queue = InTurn()
    for number in range(3):
        queue.put("many", ("many", number))
    queue.put("few", ("few", 0))
    assert queue.next() == ("many", 0)
    queue.put("late", ("late", 0))
    assert rest(queue) == [("few", 0), ("many", 1), ("late", 0), ("many", 2)]


def test_what_is_discarded_takes_no_turn():
    queue = InTurn()
    for owner, item in (("a", 1), ("a", 2), ("b", 3)):
        queue.put(owner, item)
    queue.discard("a", 1)
    queue.discard("b", 3)
    queue.discard("b", 3)
    queue.discard("nobody", 1)
    assert (queue.count("a"), queue.count("b")) == (1, 0)
    assert rest(queue) == [2]


@given(st.lists(st.sampled_from("abc")))
def test_nobody_waits_for_two_items_of_another(owners):
    queue, places = InTurn(), {}
    for number, owner in enumerate(owners):
        queue.put(owner, (owner, number))
    for owner, number in rest(queue):
        places.setdefault(owner, []).append(number)
    assert sorted(chain.from_iterable(places.values())) == [*range(len(owners))]
    for numbers in places.values():
        assert numbers == sorted(numbers), "an owner's items keep their order"
    queue = InTurn()
    for owner in owners:
        queue.put(owner, owner)
    order = rest(queue)
    for each in set(owners):
        at = [i for i, owner in enumerate(order) if owner == each]
        between = [order[a + 1 : b] for a, b in zip([-1, *at], at, strict=False)]
        assert all(len(set(others)) == len(others) for others in between)
