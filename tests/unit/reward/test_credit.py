"""Baseline and credit: figures a person can check."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.reward import baseline as script

from ostinato.core.errors import NoSignal
from ostinato.core.records import Finish
from ostinato.reward.config import BaselineConfig
from ostinato.reward.credit import Baseline, credit
from ostinato.testing.records import a_turn

TURN = a_turn("r:0")


@pytest.mark.parametrize("reward", [1.0, -1.0, 0.75, -0.25])
def test_one_turn_moves_the_policy_in_the_direction_of_its_reward(reward: float):
    assert credit([reward], [0.0], ["u"], cap=0.1) == [math.copysign(1.0, reward)]


def test_advantages_are_residuals_over_their_rms():
    rewards, baseline = [0.75, -0.25, 0.0, 0.75], [0.25, 0.25, 0.25, 0.5]
    residuals = np.array([0.5, -0.5, -0.25, 0.25])
    expected = residuals / np.sqrt(np.mean(residuals**2))
    assert credit(rewards, baseline, ["a", "b", "a", "b"], cap=1.0) == pytest.approx(expected.tolist(), abs=1e-15)


@pytest.mark.parametrize(
    ("rewards", "baseline", "why"),
    [
        ([], [], "batch is empty"),
        ([-0.25] * 8, [0.1 * i for i in range(8)], "all 8 rewards are -0.25"),
        ([0.5, 0.5], [0.0, 0.0], "all 2 rewards are 0.5"),
        ([0.5, -0.5], [0.5, -0.5 + 1e-9], "the baseline explains every reward"),
        ([0.0], [0.0], "the baseline explains every reward"),
    ],
)
def test_a_batch_that_teaches_nothing_is_refused_and_says_why(rewards: list[float], baseline: list[float], why: str):
    with pytest.raises(NoSignal, match=why):
        credit(rewards, baseline, ["u"] * len(rewards), cap=0.1)


def test_numbers_must_be_finite_and_lengths_equal():
    with pytest.raises(ValueError, match="finite"):
        credit([math.nan, 1.0], [0.0, 0.0], ["a", "b"], cap=0.1)
    with pytest.raises(ValueError, match="one entry per turn"):
        credit([1.0], [0.0], ["a", "b"], cap=0.1)


def shares(advantages: list[float], users: list[str]) -> dict[str, float]:
    total = sum(map(abs, advantages))
    return {user: sum(abs(a) for a, u in zip(advantages, users, strict=True) if u == user) / total for user in users}


def test_a_flood_by_one_user_in_a_hundred_gets_the_cap_and_no_more():
    users = [f"u{i}" for i in range(99)] + ["attacker"] * 50
    rewards = [(-1.0) ** i for i in range(99)] + [1.0] * 50
    uncapped = credit(rewards, [0.0] * 149, users, cap=1.0)
    capped = credit(rewards, [0.0] * 149, users, cap=0.03)
    assert shares(uncapped, users)["attacker"] == pytest.approx(50 / 149)
    assert shares(capped, users)["attacker"] == pytest.approx(0.03)
    assert capped[:99] == uncapped[:99]
    assert len(set(capped[99:])) == 1
    assert capped[-1] > 0


def test_small_batches_cap_at_twice_an_equal_share():
    # one or two users: no cap
    assert shares(credit([1.0, 0.9, -0.1], [0.0] * 3, ["a", "a", "b"], cap=0.1), ["a", "a", "b"])["a"] == pytest.approx(
        0.95
    )
    # four users: half at most, not a tenth, which four users could not all keep to
    users = ["a"] * 7 + ["b", "c", "d"]
    mixed = credit([1.0] * 7 + [-1.0] * 3, [0.0] * 10, users, cap=0.1)
    assert shares(mixed, users)["a"] == pytest.approx(0.5)
    # users without any credit do not count as users
    assert credit([1.0, 0.0, 0.0, 0.0], [0.0] * 4, ["a", "b", "c", "d"], cap=0.1) == [2.0, 0.0, 0.0, 0.0]


def test_the_baseline_starts_at_zero_and_finds_the_users_mean():
    baseline = Baseline()
    assert baseline.predict(TURN) == 0.0
    rng = np.random.default_rng(0)
    for i in range(1500):
        turn = replace(TURN, user=f"u{i % 10}", prompt_ids=tuple(rng.integers(0, 99, 20).tolist()))
        baseline.observe(turn, float(rng.random() < (0.9 if i % 10 == 0 else 0.2)))
    fresh = replace(TURN, prompt_ids=tuple(range(20)))
    assert baseline.predict(replace(fresh, user="u0")) == pytest.approx(0.9, abs=0.1)
    assert baseline.predict(replace(fresh, user="u1")) == pytest.approx(0.2, abs=0.1)
    assert baseline.predict(replace(fresh, user="new")) == pytest.approx(0.27, abs=0.1)


def test_the_baseline_follows_a_policy_that_improves():
    baseline, rng = Baseline(), np.random.default_rng(1)
    for i in range(6000):
        turn = replace(TURN, user=f"u{i % 20}", prompt_ids=tuple(rng.integers(0, 99, 20).tolist()))
        baseline.observe(turn, float(rng.random() < (0.2 if i < 3000 else 0.7)))
    predictions = [baseline.predict(replace(TURN, user=f"u{i}", prompt_ids=tuple(range(20)))) for i in range(20)]
    assert np.mean(predictions) == pytest.approx(0.7, abs=0.06)


def test_the_baseline_sees_nothing_that_was_sampled():
    baseline = Baseline()
    for i in range(50):
        baseline.observe(replace(TURN, user=f"u{i % 3}"), float(i % 2))
    other = replace(
        TURN, sampled_ids=(1,) * 9, logprobs=(-2.0,) * 9, text="other", finish=Finish.LENGTH, ended_at=99.0, id="z:1"
    )
    assert baseline.predict(other) == baseline.predict(TURN)


def test_a_restored_baseline_predicts_the_same_bits():
    baseline, rng = Baseline(BaselineConfig(max_keys=7)), np.random.default_rng(2)
    turns = [replace(TURN, user=f"u{i % 11}", prompt_ids=(i % 5,), started_at=i * 977.0) for i in range(200)]
    for turn in turns[:150]:
        baseline.observe(turn, float(rng.random()))
    twin = Baseline.restore(json.loads(json.dumps(baseline.snapshot())), BaselineConfig(max_keys=7))
    for turn in turns[150:]:
        assert twin.predict(turn) == baseline.predict(turn)
        baseline.observe(turn, 0.5)
        twin.observe(turn, 0.5)
    assert twin.snapshot() == baseline.snapshot()
    assert len(baseline.snapshot()["users"]) == 7


def test_the_baseline_beats_the_batch_mean_on_a_simulated_population():
    squares = script.measure(script.population(seed=11, batches=40))
    assert squares["ours"] <= 0.85 * squares["batch mean"]
    assert squares["oracle"] < squares["ours"] < squares["user mean"] < squares["batch mean"] < squares["none"]
