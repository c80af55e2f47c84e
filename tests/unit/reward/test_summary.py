"""Curves and intervals."""

import math

import numpy as np
import pytest

from ostinato.core.records import Arm, Finish, PolicyVersion, Reward, Sampling, Span, Turn
from ostinato.reward.summary import Rated, by_arm, by_version, difference, join, over_time, wilson


def rated(i: int, user: str, arm: Arm, value: float, version: int = 0) -> Rated:
    turn = Turn(
        id=f"t{i}",
        episode="e",
        parent=None,
        user=user,
        tenant="t",
        arm=arm,
        propensity=1.0,
        prompt_ids=(1,),
        sampled_ids=(7,),
        logprobs=(-0.5,),
        spans=(Span(policy=PolicyVersion(number=version, hash="aa"), tokens=1),),
        sampling=Sampling(max_tokens=8),
        finish=Finish.STOP,
        text="x",
        started_at=float(i),
        ended_at=float(i) + 1,
    )
    return turn, Reward(turn=turn.id, value=value, function="copilot@1", signals=(), at=0.0)


def test_wilson_matches_known_values():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(15, 50) == pytest.approx((0.1910, 0.4375), abs=1e-4)  # Newcombe 1998, figures of method 3
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)  # Newcombe 1998, table I
    assert wilson(20, 20)[1] == 1.0


def test_points_per_arm_version_and_time():
    data = [rated(i, f"u{i % 4}", Arm.LIVE, 0.75 if i % 2 else -0.25, version=i // 5) for i in range(10)]
    data += [rated(i, "c", Arm.CONTROL, -0.25) for i in range(10)]
    arms = by_arm(data)
    assert (arms[Arm.LIVE].acceptance, arms[Arm.LIVE].turns, arms[Arm.LIVE].users) == (0.5, 10, 4)
    assert arms[Arm.LIVE].reward == pytest.approx(0.25)
    assert arms[Arm.LIVE].lower < 0.5 < arms[Arm.LIVE].upper
    assert arms[Arm.CONTROL].acceptance == 0.0
    assert math.isinf(arms[Arm.CONTROL].reward_pm)  # one user cannot say how users differ
    assert {key: point.turns for key, point in by_version(data).items()} == {
        (Arm.LIVE, 0): 5,
        (Arm.LIVE, 1): 5,
        (Arm.CONTROL, 0): 10,
    }
    bins = over_time(data, 3)
    assert [bins[Arm.LIVE, b].turns for b in range(3)] == [3, 3, 4]
    assert over_time([], 3) == {}
    assert over_time(data[:1], 3).keys() == {(Arm.LIVE, 0)}


def test_join_leaves_out_what_has_no_reward():
    data = [rated(i, "u", Arm.LIVE, 0.0) for i in range(3)]
    assert join([turn for turn, _ in data], [data[2][1], data[0][1]]) == [data[0], data[2]]


def test_the_difference_of_arms_covers_the_truth_when_users_differ():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(150):
        groups: list[list[Rated]] = []
        for arm, lift in ((Arm.LIVE, 0.1), (Arm.CONTROL, 0.0)):
            tastes = rng.uniform(0.1, 0.7, 30) + lift
            groups.append(
                [rated(i, f"{arm}{i % 30}", arm, float(rng.random() < tastes[i % 30]) - 0.25) for i in range(90)]
            )
        found = difference(*groups)
        covered += found.lower <= 0.1 <= found.upper
    assert 0.90 <= covered / 150 <= 0.99


def test_a_difference_without_users_claims_nothing():
    lone = [rated(i, "u", Arm.LIVE, 0.75) for i in range(50)]
    found = difference(lone, [])
    assert (found.lower, found.upper) == (-1.0, 1.0)
