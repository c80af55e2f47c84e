"""How much is suggested and how much of it accepted: who counts for what, and intervals that hold what they say."""

import numpy as np
import pytest

from ostinato.core.records import Arm, Reward
from ostinato.core.report import ItemScore
from ostinato.evaluate.acceptance import Rated
from ostinato.evaluate.suggestions import by_item, by_user, change, ratio
from ostinato.testing.records import a_turn

T = 0.25


def rated(number: int, user: str, arm: Arm, value: float) -> Rated:
    turn = a_turn(f"t{number}-{user}", user=user, arm=arm)
    return turn, Reward(turn=turn.id, value=value, function="tab@1", signals=(), at=0.0)


def test_silence_counts_as_a_request_and_not_as_a_suggestion():
    values = [0.75, -0.25, 0.0, 0.0]
    arms = by_user(
        [rated(n, "ann", Arm.LIVE, value) for n, value in enumerate(values)] + [rated(9, "bob", Arm.CONTROL, 0.0)]
    )
    assert arms[Arm.LIVE].suggested == {("default", "ann"): (2.0, 4)}
    assert arms[Arm.LIVE].accepted == {("default", "ann"): (1.0, 2)}
    assert arms[Arm.CONTROL].suggested == {("default", "bob"): (0.0, 1)}
    assert arms[Arm.CONTROL].accepted == {}


def test_a_suite_says_the_same_around_t():
    scores = [ItemScore(item="a/0", draw=draw, score=score) for draw, score in enumerate((1.0, T, 0.0, T))]
    scores += [ItemScore(item="b/0", draw=0, score=1.0)]
    families = by_item(scores, {"a/0": "a", "b/0": "b"}, T)
    assert families["a"].suggested == {("a", "a/0"): (2.0, 4)}
    assert families["a"].accepted == {("a", "a/0"): (1.0, 2)}
    assert families["b"].accepted == {("b", "b/0"): (1.0, 1)}


def test_a_ratio_needs_two_users():
    assert ratio({}) is None
    assert ratio({("t", "a"): (3.0, 9)}) is None
    assert ratio({("t", "a"): (3.0, 9), ("t", "b"): (0.0, 0)}) is None
    found = ratio({("t", "a"): (3.0, 9), ("t", "b"): (1.0, 1)})
    assert found is not None
    assert found.mean == pytest.approx(0.4)
    assert (found.n, found.df) == (2, 1.0)


def test_where_all_say_the_same_the_interval_still_has_a_width():
    for value in (0.0, 1.0):
        found = ratio({("t", f"u{n}"): (5 * value, 5) for n in range(10)})
        assert found is not None
        assert found.mean == value
        assert 0.05 < found.upper - found.lower < 0.5


def crowd(rng: np.random.Generator, users: int, mean: float, name: str) -> dict[tuple[str, str], tuple[float, int]]:
    """Users who differ in their own rate and in how much they ask; the rate does not depend on how much."""
    tastes = np.clip(rng.normal(mean, 0.12, users), 0.02, 0.98)
    counts = rng.integers(5, 60, users)
    return {
        ("t", f"{name}{n}"): (float(rng.binomial(count, taste)), int(count))
        for n, (taste, count) in enumerate(zip(tastes, counts, strict=True))
    }


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    rounds = 400
    hits = np.zeros(3)
    for _ in range(rounds):
        live, control = crowd(rng, 40, 0.6, "l"), crowd(rng, 16, 0.5, "c")
        found, single = change(live, control), ratio(live)
        assert found is not None
        assert single is not None
        hits += [
            single.lower <= 0.6 <= single.upper,
            found.difference.lower <= 0.1 <= found.difference.upper,
            found.relative.lower <= 0.2 <= found.relative.upper,
        ]
    assert np.all(hits / rounds > 0.91)
    assert np.all(hits / rounds < 0.985)


def test_a_change_of_nothing_known_is_none():
    some = {("t", "a"): (1.0, 4), ("t", "b"): (2.0, 4)}
    assert change(some, {}) is None
    assert change(some, {("t", "c"): (0.0, 4), ("t", "d"): (0.0, 4)}) is None  # a quotient by 0
    assert change({}, some) is None


def test_the_relative_change_is_the_quotient_less_one():
    live = {("t", f"l{n}"): (6.0, 10) for n in range(5)} | {("t", "l9"): (5.0, 10)}
    control = {("t", f"c{n}"): (8.0, 10) for n in range(5)} | {("t", "c9"): (7.0, 10)}
    found = change(live, control)
    assert found is not None
    assert found.relative.mean == pytest.approx((35 / 60) / (47 / 60) - 1)
    assert found.difference.mean == pytest.approx(35 / 60 - 47 / 60)
    assert found.relative.lower < found.relative.mean < found.relative.upper < 0.0
