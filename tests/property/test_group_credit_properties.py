"""Group credit for whatever groups: it sums to zero, does not see a shift, and does not depend on the order."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.errors import NoSignal
from ostinato.reward.credit import GroupRelative, by_episode, relative
from ostinato.testing.records import a_turn

grades = st.floats(-10, 10, allow_nan=False)
groups = st.lists(st.lists(st.tuples(grades, st.integers(1, 3)), min_size=1, max_size=8), min_size=1, max_size=5)


def laid_out(sizes):
    """Turns and rewards: of each group its episodes, as (grade, number of turns)."""
    turns, rewards = [], {}
    for name, members in enumerate(sizes):
        for member, (grade, length) in enumerate(members):
            for place in range(length):
                turn = replace(a_turn(f"g{name}e{member}t{place}:0"), episode=f"g{name}e{member}", group=f"g{name}")
                turns.append(turn)
                rewards[turn.id] = grade if place == length - 1 else 0.0
    return turns, rewards


def credited(turns, rewards):
    try:
        return GroupRelative()(by_episode(turns), rewards)
    except NoSignal:
        return {turn.id: (0.0,) * len(turn.sampled_ids) for turn in turns}


@given(st.lists(grades, min_size=1, max_size=128), grades)
def test_it_sums_to_zero_and_a_shift_changes_nothing(returns, shift):
    found = relative(returns)
    size = max(map(abs, returns)) + abs(shift) + 1.0
    assert abs(math.fsum(found)) <= 1e-12 * size * len(returns)
    moved = relative([value + shift for value in returns])
    assert all(abs(one - other) <= 1e-12 * size for one, other in zip(found, moved, strict=True))


@given(groups, st.randoms())
def test_the_order_of_episodes_does_not_matter(sizes, rng):
    turns, rewards = laid_out(sizes)
    episodes = by_episode(turns)
    found = credited(turns, rewards)
    rng.shuffle(episodes)
    again = credited([turn for episode in episodes for turn in episode.turns], rewards)
    assert all(math.isclose(found[turn][0], again[turn][0], abs_tol=1e-12) for turn in found)


@given(groups)
def test_a_group_is_credited_as_if_it_were_alone(sizes):
    turns, rewards = laid_out(sizes)
    together = credited(turns, rewards)
    for name in range(len(sizes)):
        own = [turn for turn in turns if turn.group == f"g{name}"]
        alone = credited(own, rewards)
        assert {turn.id: together[turn.id] for turn in own} == alone
