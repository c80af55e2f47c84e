"""A journal that was written anew tells the same as the whole one, wherever it was cut, and what follows is decided the same way."""

import random

from hypothesis import given
from hypothesis import strategies as st

from ostinato.worlds.rollout.groups import Groups

TASKS = [f"t{n}" for n in range(7)]


def fresh(tasks=TASKS, seed=3) -> Groups:
    return Groups(tasks, token="w", seed=seed, epochs=0)


def happens(groups: Groups, chance: random.Random) -> dict:
    """The next event of a worker that nobody paces."""
    going = [group for group in groups.open.values() if not group.ended]
    told = [group for group in groups.open.values() if group.told]
    ended = [group for group in groups.open.values() if group.ended and not group.told]
    what = chance.random()
    if told and what < 0.1:
        n = chance.choice(told).number
        return {"kind": "spent", "n": n} | ({"after": groups.drawn * 10} if chance.random() < 0.7 else {})
    if ended and what < 0.3:
        return {"kind": "told", "n": chance.choice(ended).number}
    if not going or (what > 0.8 and len(groups.open) < 8):
        return groups.draw(chance.randint(1, 3))
    group = chance.choice(going)
    member = chance.choice([place for place, slot in enumerate(group.slots) if slot.last is None])
    slot = group.slots[member]
    about = {"n": group.number, "member": member, "episode": f"{group.name}.{member}.{max(0, slot.begun - 1)}"}
    if slot.begun <= len(slot.failed) or chance.random() < 0.2:  # some were killed, and begin again
        return {"kind": "begun", **about, "episode": groups.episode(group.number, member)}
    grade = chance.choice([None, 0.0, 1.0, chance.random()])
    last = grade is not None or chance.random() < 0.3
    return {"kind": "ended", **about, "last": last, "turns": [f"{chance.random()}"], "grade": grade, "why": "so"}


def fold(events, **how) -> Groups:
    groups = fresh(**how)
    for event in events:
        groups.apply(event)
    return groups


def state(groups: Groups) -> dict:
    return vars(groups) | {"open": list(groups.open.items())}  # their order, too


@given(
    st.integers(0, 2**32), st.integers(0, 400), st.sampled_from([TASKS, TASKS[2:], [*TASKS, "new"]]), st.integers(0, 4)
)
def test_at_any_cut_it_is_the_same_and_goes_on_the_same(seed, cut, tasks, cuts):
    """Also where the taskset is another one when it is read."""
    chance, whole, events = random.Random(seed), fresh(), []
    for _ in range(cut):
        events.append(happens(whole, chance))
        whole.apply(events[-1])
    short = list(whole.events())
    assert state(fold(short)) == state(whole) == state(fold(events))
    assert state(fold(short, tasks=tasks, seed=8)) == state(fold(events, tasks=tasks, seed=8))
    again = fold(short)
    for number in range(120):
        expected = random.Random(f"{seed}.{number}")
        event = happens(whole, expected)
        assert happens(again, random.Random(f"{seed}.{number}")) == event
        whole.apply(event)
        again.apply(event)
        if cuts and number % (60 // cuts) == 0:  # and cut again and again
            again = fold(again.events())
    assert state(again) == state(whole)
