"""Acceptance per arm, and the difference that the demo reports."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from ostinato.core.records import Arm, Reward
from ostinato.evaluate.acceptance import Rated, by_arm, live_minus_control, share_of
from ostinato.testing.records import a_turn


def rated(i: int, user: str, arm: Arm, value: float) -> Rated:
    turn = a_turn(f"t{i}-{arm}", user=user, arm=arm, propensity=0.2 if arm is Arm.CONTROL else 0.8)
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


def test_users_who_could_never_be_on_control_are_not_compared_with_it():
    rng = np.random.default_rng(1)
    data: list[Rated] = []
    for i in range(4000):
        arm = Arm.CONTROL if i % 5 == 0 else Arm.LIVE
        data.append(rated(i, f"u{i % 200}", arm, float(rng.random() < 0.6)))
    dealt = live_minus_control(data)
    for i in range(3200):
        turn, reward = rated(10_000 + i, "anonymous", Arm.LIVE, float(rng.random() < 0.4))
        data.append((replace(turn, propensity=1.0), reward))
    assert live_minus_control(data) == dealt
    assert dealt.mean == pytest.approx(0.0, abs=0.06)


@pytest.mark.parametrize(("users", "spread"), [(100, 1.2), (100, 0.3), (25, 1.2)])
def test_an_arms_interval_covers_the_truth_when_users_differ(users: int, spread: float):
    """Ten turns a user, log-normal; tastes that correlate two turns of one user by 0.15."""
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(300):
        turns = rng.poisson(rng.lognormal(-(spread**2) / 2, spread, users) * 10)
        tastes = rng.beta(0.6 * 0.85 / 0.15, 0.4 * 0.85 / 0.15, users)
        point = share_of(
            (("acme", f"u{user}"), bool(liked))
            for user in range(users)
            for liked in rng.random(turns[user]) < tastes[user]
        )
        covered += point.lower <= 0.6 <= point.upper
    assert 0.92 <= covered / 300 <= 0.98


def test_an_arms_interval_never_has_zero_width_and_claims_nothing_of_one_user():
    alone = share_of((("acme", "ann"), i % 2 == 0) for i in range(400))
    assert (alone.turns, alone.acceptance, alone.lower, alone.upper) == (400, 0.5, 0.0, 1.0)
    pleased = share_of((("acme", f"u{i % 20}"), True) for i in range(400))
    assert 0.7 < pleased.lower < 0.9
    assert pleased.upper == 1.0


def test_the_difference_adjusted_for_prompts_covers_the_truth_with_less_error():
    """Fifty people who each ask for tasks of their own kinds, which differ much; they are dealt anew each time."""
    covered, spreads = {"plain": 0, "adjusted": 0}, {"plain": list[float](), "adjusted": list[float]()}
    means = list[float]()
    for number in range(150):
        rng = np.random.default_rng(number)
        prompts = [tuple(rng.integers(0, 1000, 6).tolist()) for _ in range(60)]
        odds = rng.beta(0.4, 1.0, 60)
        kinds = rng.integers(0, 60, (50, 5))
        control = set(rng.permutation(50)[:15].tolist())

        @cache  # only who asked for what and liked it counts
        def asked(user: int, task: int, liked: bool, prompts=prompts, control=control) -> Rated:
            turn, reward = rated(task, f"u{user}", Arm.CONTROL if user in control else Arm.LIVE, float(liked))
            return replace(turn, prompt_ids=prompts[task]), reward

        def turns(count: int, lift: float, rng=rng, odds=odds, kinds=kinds, control=control, asked=asked):
            users = rng.integers(50, size=count)
            tasks = kinds[users, rng.integers(5, size=count)]
            liked = rng.random(count) < odds[tasks] + lift * ~np.isin(users, [*control])
            return [asked(*each) for each in zip(users.tolist(), tasks.tolist(), liked.tolist(), strict=True)]

        truth = 0.1 - float(np.maximum(0.0, odds + 0.1 - 1.0).mean())
        before, last = turns(800, 0.0), turns(500, 0.1)
        for name, found in (
            ("plain", live_minus_control(last)),
            ("adjusted", live_minus_control(last, before)),
        ):
            covered[name] += found.lower <= truth <= found.upper
            spreads[name].append(found.upper - found.lower)
            means += [found.mean - truth] * (name == "adjusted")
    assert all(0.91 <= count / 150 <= 0.995 for count in covered.values()), covered
    assert np.mean(spreads["adjusted"]) < 0.7 * np.mean(spreads["plain"])
    assert abs(np.mean(means)) < 0.012, "adjusting biases nothing"


def test_a_side_whose_adjusted_outcomes_do_not_differ_still_has_an_interval():
    before = [rated(i, f"b{i}", Arm.LIVE, 1.0) for i in range(40)]
    last = [rated(i, f"c{i % 2}", Arm.CONTROL, -1.0) for i in range(4)] + [
        rated(i, f"l{i % 9}", Arm.LIVE, 1.0 if i % 2 else -1.0) for i in range(40)
    ]
    found = live_minus_control(last, before)
    assert found.mean == pytest.approx(0.5)
    assert found.lower < found.mean < found.upper
    assert found.error > 0.1


@pytest.mark.parametrize(("control", "live"), [(0.0, 0.4), (1.0, 0.6), (0.0, 0.0)])
def test_a_side_that_answers_alike_to_prompts_that_differ_keeps_the_spread_of_its_few_users(control, live):
    """Expected outcomes alone vary there, which the side's turns say nothing about."""
    rng = np.random.default_rng(1)

    def turns(count: int, chance: dict[Arm, float]) -> list[Rated]:
        made = list[Rated]()
        for i in range(20 * count):
            arm = Arm.CONTROL if i % 20 < 4 else Arm.LIVE
            turn, reward = rated(i, f"u{i % 20}", arm, 1.0 if rng.random() < chance[arm] else -1.0)
            made.append((replace(turn, prompt_ids=(int(rng.integers(30)),)), reward))
        return made

    before = turns(10, dict.fromkeys((Arm.LIVE, Arm.CONTROL), 0.15))
    last = turns(3, {Arm.LIVE: live, Arm.CONTROL: control})
    plain, adjusted = live_minus_control(last), live_minus_control(last, before)
    assert adjusted.error > 0.9 * plain.error
    assert adjusted.lower < 0.0 < adjusted.upper


def test_what_nobody_asked_before_is_adjusted_by_nothing_that_differs():
    last = [rated(i, f"c{i % 5}", Arm.CONTROL, float(i % 3 == 0)) for i in range(30)]
    last += [rated(i, f"l{i % 5}", Arm.LIVE, float(i % 2 == 0)) for i in range(30)]
    others = [(replace(turn, prompt_ids=(7, 7)), reward) for turn, reward in last]
    assert live_minus_control(last, others).mean == pytest.approx(live_minus_control(last).mean)
    assert live_minus_control(last, ()) == live_minus_control(last)
