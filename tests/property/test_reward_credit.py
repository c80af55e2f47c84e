"""What holds for the credit of any batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ostinato.core.errors import NoSignal
from ostinato.core.records import Turn
from ostinato.reward.baseline import Baseline
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import SingleRollout, by_episode
from ostinato.reward.recent_shares import capped
from ostinato.testing.records import a_turn

entry = st.tuples(
    st.sampled_from([0.75, -0.25, 0.0]) | st.floats(-10, 10) | st.sampled_from([1e200, -1e308]),
    st.sampled_from("abcdefghijkl"),  # user
    st.sampled_from("xyz"),  # tenant
    st.sampled_from("0123456789"),  # episode
    st.integers(1, 4),  # tokens
)
batches = st.lists(entry, min_size=1, max_size=60)


def turns_of(batch: list[tuple[float, str, str, str, int]]) -> tuple[list[Turn], dict[str, float]]:
    turns = [
        replace(
            a_turn(f"t{i}:0", prompt=(i,), sampled=(7,) * tokens), user=user, tenant=tenant, episode=f"{user}{episode}"
        )
        for i, (_, user, tenant, episode, tokens) in enumerate(batch)
    ]
    return turns, {turn.id: each[0] for turn, each in zip(turns, batch, strict=True)}


def credited(turns: list[Turn], rewards: dict[str, float], **settings: float) -> dict[str, tuple[float, ...]]:
    return dict(SingleRollout(RewardConfig(**settings), Baseline())(by_episode(turns), rewards))


@given(batches, st.floats(0.01, 1.0), st.floats(0.2, 1.0), st.floats(0.0, 1.0))
def test_caps_signs_and_scale(batch, user_cap: float, tenant_cap: float, discount: float):
    turns, rewards = turns_of(batch)
    try:
        found = credited(turns, rewards, user_cap=user_cap, tenant_cap=tenant_cap, discount=discount)
        free = credited(turns, rewards, user_cap=1.0, tenant_cap=1.0, user_steps=0, discount=discount)
    except NoSignal:
        return  # when it is raised is the unit tests' matter
    assert sum(free[id][0] ** 2 for id in free) / len(turns) == pytest.approx(1.0)
    assert [len(found[turn.id]) for turn in turns] == [len(turn.sampled_ids) for turn in turns]
    factors: dict[tuple[str, str], list[float]] = {}
    for turn in turns:
        assert all(map(math.isfinite, found[turn.id]))
        if abs(free[turn.id][0]) > 1e-100:  # below, a factor may vanish
            factors.setdefault(turn.person, []).append(found[turn.id][0] / free[turn.id][0])
    for theirs in factors.values():
        assert 0 <= min(theirs) <= max(theirs) <= 1 + 1e-12, "signs stay, and nobody is scaled up"
        assert min(theirs) > 0 or max(theirs) < 1e-200, "only what is too small for a float vanishes"
        assert max(theirs) - min(theirs) < 1e-9, "a person is scaled as a whole"


masses = st.dictionaries(
    st.tuples(st.sampled_from("xyzw"), st.sampled_from("abcdefghij")),
    st.sampled_from([1.0, 5.0]) | st.floats(1e-6, 1e6) | st.just(0.0),
    min_size=1,
    max_size=40,
)


@settings(max_examples=300)
@given(masses, st.floats(0.01, 1.0), st.floats(0.05, 1.0))
def test_nobody_keeps_more_than_their_share_and_the_rest_keep_all(given_masses, user_cap: float, tenant_cap: float):
    factors = capped(given_masses, user_cap=user_cap, tenant_cap=tenant_cap)
    assert set(factors) == {person for person, mass in given_masses.items() if mass > 0}
    assume(factors)
    kept = {person: given_masses[person] * factor for person, factor in factors.items()}
    total, tenants = sum(kept.values()), {person[0] for person in kept}
    assert total > 0
    most = min(1.0, max(user_cap, 2 / len(kept))) * total
    assert max(kept.values()) <= most * (1 + 1e-9)
    members = {tenant: sum(person[0] == tenant for person in kept) for tenant in tenants}
    by_tenant = {tenant: sum(mass for person, mass in kept.items() if person[0] == tenant) for tenant in tenants}
    limit = max(tenant_cap, 2 / len(tenants)) * total
    over = [tenant for tenant in tenants if by_tenant[tenant] > limit * (1 + 1e-9)]
    if over:  # only where the others' people, each at the cap, cannot fill the rest
        others = sum(min(by_tenant[over[0]], members[tenant] * most) for tenant in tenants if tenant not in over)
        assert others + len(over) * max(by_tenant[tenant] for tenant in over) == pytest.approx(total, rel=1e-6)
    for person, factor in factors.items():
        if factor < 1:  # whoever lost anything is at one of the limits
            at_user = kept[person] >= most * (1 - 1e-9)
            at_tenant = by_tenant[person[0]] >= min(limit, max(by_tenant.values())) * (1 - 1e-9)
            assert at_user or at_tenant


@given(batches, st.randoms())
def test_the_order_of_episodes_does_not_matter(batch, rng):
    turns, rewards = turns_of(batch)
    try:
        straight = credited(turns, rewards)
    except NoSignal:
        assume(False)
    names = list(dict.fromkeys((turn.tenant, turn.episode) for turn in turns))
    rng.shuffle(names)
    shuffled = [turn for name in names for turn in turns if (turn.tenant, turn.episode) == name]
    mixed = credited(shuffled, rewards)
    for turn in turns:
        assert mixed[turn.id][0] == pytest.approx(straight[turn.id][0], rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.floats(0, 1))
def test_credit_of_one_episode_is_proportional_to_what_followed(rewards, discount: float):
    turns = [replace(a_turn(f"t{i}:0", prompt=(i,)), episode="e") for i in range(len(rewards))]
    by_id = {turn.id: reward for turn, reward in zip(turns, rewards, strict=True)}
    try:
        found = credited(turns, by_id, discount=discount)
    except NoSignal:
        return
    expected = [
        sum(discount ** (later - i) * rewards[later] for later in range(i, len(rewards))) for i in range(len(rewards))
    ]
    scale = math.sqrt(np.mean(np.square(expected)))
    for turn, value in zip(turns, expected, strict=True):
        assert found[turn.id][0] == pytest.approx(value / scale, rel=1e-6, abs=1e-9)
