"""Acceptance per arm, and the difference that the demo reports."""

import numpy as np

from ostinato.core.records import Arm, Reward
from ostinato.evaluate.acceptance import Rated, by_arm, live_minus_control
from ostinato.testing.records import a_turn


def rated(i: int, user: str, arm: Arm, value: float) -> Rated:
    turn = a_turn(f"t{i}-{arm}", user=user, arm=arm)
    return turn, Reward(turn=turn.id, value=value, function="copilot@1", signals=(), at=0.0)


def test_points_per_arm():
    data = [rated(i, f"u{i % 4}", Arm.LIVE, 0.75 if i % 2 else -0.25) for i in range(10)]
    data += [rated(i, "c", Arm.CONTROL, 0.0) for i in range(10)]  # ignored is not accepted
    points = by_arm(data)
    assert (points[Arm.LIVE].acceptance, points[Arm.LIVE].turns) == (0.5, 10)
    assert points[Arm.LIVE].lower < 0.5 < points[Arm.LIVE].upper
    assert points[Arm.CONTROL].acceptance == 0.0


def test_the_difference_of_arms_covers_the_truth_when_users_differ():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(150):
        data: list[Rated] = []
        for arm, lift, users in ((Arm.LIVE, 0.1, 40), (Arm.CONTROL, 0.0, 10)):
            tastes = rng.uniform(0.1, 0.7, users) + lift
            data += [
                rated(i, f"{arm}{i % users}", arm, float(rng.random() < tastes[i % users]) - 0.25)
                for i in range(3 * users)
            ]
        found = live_minus_control(data)
        covered += found.lower <= 0.1 <= found.upper
    assert 0.91 <= covered / 150 <= 0.995


def test_a_difference_without_users_claims_nothing():
    found = live_minus_control([rated(i, "u", Arm.LIVE, 0.75) for i in range(50)])
    assert (found.mean, found.lower, found.upper) == (1.0, -1.0, 1.0)
