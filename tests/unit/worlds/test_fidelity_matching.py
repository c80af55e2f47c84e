"""With the task mix set aside, only the environment can be told apart, and it still is."""

import math
from collections import Counter

import numpy as np
import pytest
from tests.fakes.lookalikes import episodes, observed

from ostinato.core.errors import BadRequest
from ostinato.worlds.fidelity.observation import Observation
from ostinato.worlds.fidelity.paired import match_prompts, tell_pairs_apart
from ostinato.worlds.fidelity.probe import tell_apart


def paired(production, simulation, **more):
    return tell_pairs_apart(match_prompts(production, simulation), **more)


def test_a_task_mix_is_told_apart_until_it_is_set_aside():
    sides = episodes(1, "p", 120, popular=3.0), episodes(1, "s", 120)
    mixed, same = tell_apart(*sides, permutations=0), paired(*sides, permutations=19)
    assert mixed.told_apart
    assert mixed.auc > 0.65
    assert not same.told_apart
    assert abs(same.auc - 0.5) < 0.08
    assert same.lower <= 0.5 <= same.upper


def test_a_planted_tell_is_caught_under_the_same_prompts():
    found = paired(episodes(2, "p", 80, popular=3.0), episodes(2, "s", 80, tell=0.7), permutations=19)
    assert found.told_apart
    assert found.auc > 0.75
    assert found.p == 0.05
    assert found.tells[0].name == "system.word:simulated is there"
    assert all(tell.p > 0.05 for tell in found.tells[1:])


def test_what_follows_from_the_prompt_alone_is_a_coin_to_the_last_bit():
    """Both sides say the same under the same prompt, however often each asks it."""
    rng = np.random.default_rng(0)

    def side(name, popular):
        chances = np.exp(-popular * np.arange(9))
        asked = rng.choice(9, size=90, p=chances / chances.sum())
        return [
            Observation(group=f"{name}{at // 2}", features={"x": float(q * q), "y": str(q)}, asked=str(q))
            for at, q in enumerate(asked.tolist())
        ]

    found = paired(side("p", 0.8), side("s", 0.0), permutations=9)
    assert (found.auc, found.p) == (0.5, 1.0)
    assert {tell.auc for tell in found.tells} == {0.5}


def test_one_group_seen_again_and_again_is_no_tell():
    """Each person leaves a mark of their own: a classifier that is asked about people it knows would be right about them."""
    found = [paired(episodes(s, "p", 20, 20), episodes(s, "s", 60), permutations=0).auc for s in range(8)]
    assert abs(np.mean(found) - 0.5) < 0.06


def test_groups_are_drawn_from_before_any_is_drawn_from_twice():
    many = [Observation(group=f"p{at % 6}", features={}, asked="q") for at in range(60)]
    few = [Observation(group="s", features={}, asked="q")] * 6
    found = match_prompts(many, few)
    assert Counter(each.group for each in found.production) == {f"p{at}": 1 for at in range(6)}
    assert (found.prompts, found.left_out) == (1, (54, 0))


def test_where_nothing_is_shared_it_is_said_why():
    with pytest.raises(BadRequest, match="not machines"):
        match_prompts(observed(1, "p", 12), episodes(1, "s", 12))
    other = [Observation(group=each.group, features={}, asked="other") for each in episodes(1, "p", 12)]
    with pytest.raises(BadRequest, match="none of them the same"):
        match_prompts(other, episodes(1, "s", 12))
    with pytest.raises(BadRequest, match="each side needs two"):
        paired(episodes(1, "p", 1, 9), episodes(1, "s", 40))


def test_pairs_need_more_than_groups_do():
    found = paired(episodes(3, "p", 12), episodes(3, "s", 12), permutations=0)
    assert (found.paired, found.needed) == (True, 385)


@pytest.mark.examination
def test_pairs_that_are_alike_are_rarely_told_apart():
    """Of 200 worlds like production under each prompt, with people and rollouts that have ways of their own."""
    found = [
        paired(episodes(s, "p", 40, popular=2.0), episodes(s, "s", 40), permutations=19, seed=s) for s in range(200)
    ]
    covered = np.mean([each.lower <= 0.5 <= each.upper for each in found])
    assert covered >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / 200)
    assert np.mean([each.told_apart for each in found]) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
    assert abs(np.mean([each.auc for each in found]) - 0.5) < 0.02
