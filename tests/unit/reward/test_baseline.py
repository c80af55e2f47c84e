"""The baseline: it learns what can be known before a turn is sampled, and nothing else."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.reward import baseline as script
from tests.grids import first

from ostinato.core.records import Finish, Turn
from ostinato.reward.baseline import Baseline, context_of
from ostinato.reward.config import BaselineConfig
from ostinato.testing.records import a_turn

TURN = a_turn("r:0")


def predict(baseline: Baseline, turn: Turn) -> float:
    return baseline.predict(context_of(turn))


def test_the_baseline_starts_at_zero_and_finds_the_users_mean():
    baseline = Baseline()
    assert predict(baseline, TURN) == 0.0
    rng = np.random.default_rng(0)
    for i in range(1500):
        turn = replace(TURN, user=f"u{i % 10}", prompt_ids=tuple(rng.integers(0, 99, 20).tolist()))
        baseline.observe(context_of(turn), float(rng.random() < (0.9 if i % 10 == 0 else 0.2)), 5)
    fresh = replace(TURN, prompt_ids=tuple(range(20)))
    assert predict(baseline, replace(fresh, user="u0")) == pytest.approx(0.9, abs=0.1)
    assert predict(baseline, replace(fresh, user="u1")) == pytest.approx(0.2, abs=0.1)
    assert predict(baseline, replace(fresh, user="new")) == pytest.approx(0.27, abs=0.1)


def test_the_baseline_follows_a_policy_that_improves():
    baseline, rng = Baseline(), np.random.default_rng(1)
    for i in range(6000):
        turn = replace(TURN, user=f"u{i % 20}", prompt_ids=tuple(rng.integers(0, 99, 20).tolist()))
        baseline.observe(context_of(turn), float(rng.random() < (0.2 if i < 3000 else 0.7)), 5)
    predictions = [predict(baseline, replace(TURN, user=f"u{i}", prompt_ids=tuple(range(20)))) for i in range(20)]
    assert np.mean(predictions) == pytest.approx(0.7, abs=0.06)


def test_the_baseline_sees_nothing_that_was_sampled():
    baseline = Baseline()
    for i in range(50):
        baseline.observe(context_of(replace(TURN, user=f"u{i % 3}")), float(i % 2), 5)
    other = replace(
        TURN, sampled_ids=(1,) * 9, logprobs=(-2.0,) * 9, text="other", finish=Finish.LENGTH, ended_at=99.0, id="z:1"
    )
    assert predict(baseline, other) == predict(baseline, TURN)


def test_a_restored_baseline_predicts_the_same_bits():
    baseline, rng = Baseline(BaselineConfig(max_keys=7)), np.random.default_rng(2)
    turns = [replace(TURN, user=f"u{i % 11}", prompt_ids=(i % 5,), started_at=i * 977.0) for i in range(200)]
    for turn in turns[:150]:
        baseline.observe(context_of(turn), float(rng.random()), 5)
    twin = Baseline(BaselineConfig(max_keys=7))
    twin.restore(json.loads(json.dumps(baseline.snapshot())))
    for turn in turns[150:]:
        assert predict(twin, turn) == predict(baseline, turn)
        baseline.observe(context_of(turn), 0.5, 5)
        twin.observe(context_of(turn), 0.5, 5)
    assert twin.snapshot() == baseline.snapshot()
    assert len(baseline.snapshot()["users"]) == 7


@pytest.mark.parametrize("batches", first([30, 60]))
@pytest.mark.parametrize("world", script.WORLDS)
def test_the_baseline_leaves_less_gradient_noise_than_the_batch_mean_on_simulated_populations(world, batches):
    measured = script.measure(script.population(script.WORLDS[world], 11, batches))
    left = {name: noise for name, (noise, _) in measured.items()}
    if world == "alike":
        assert left["ours"] < 1.03 * left["every turn alike"], "where length tells nothing, weighting costs little"
    else:
        assert left["ours"] < 0.75
        assert left["ours"] < 0.85 * left["every turn alike"]
    assert left["every turn alike"] < left["batch mean"]


def test_repeated_prompts_and_drifting_users_are_followed():
    """By the share of what knowing each turn's probability would gain, in E[A^2] and with every turn's evidence alike."""
    for world, config, least in (
        ("repeated", BaselineConfig(length_exponent=0.0), 0.75),
        ("drifting", BaselineConfig(length_exponent=0.0), 0.15),
    ):
        square = {
            name: value
            for name, (_, value) in script.measure(script.population(script.WORLDS[world], 3), config).items()
        }
        assert (1.0 - square["ours"]) / (1.0 - square["accepted"]) > least
        assert square["ours"] < square["user mean"]


def gradient(baseline: float, lengths: dict[int, float]) -> tuple[float, float]:
    """Mean and variance of (r - b) d log pi, by enumeration, of a policy that draws a length and then as many fair bits, with one logit for
    the bits. A bit of 1 is worth 0.1 more; `lengths` gives the chance of acceptance by length.
    """
    mean = square = 0.0
    for length, accepted in lengths.items():
        for ones in range(length + 1):
            chance = math.comb(length, ones) * 0.5**length / len(lengths)
            score, likely = ones - length / 2, accepted + 0.1 * ones / length
            for reward, odds in ((1.0, likely), (0.0, 1.0 - likely)):
                mean += chance * odds * (reward - baseline) * score
                square += chance * odds * ((reward - baseline) * score) ** 2
    return mean, square - mean**2


@pytest.mark.parametrize("lengths", [{2: 0.7, 8: 0.2}, {2: 0.2, 8: 0.7}], ids=["bad ones long", "bad ones short"])
def test_evidence_by_length_lowers_the_gradients_variance_and_leaves_its_mean(lengths):
    rng, found = np.random.default_rng(0), {}
    for exponent in (0.0, 1.0, 2.0):
        baseline = Baseline(BaselineConfig(length_exponent=exponent, forget=1.0, forget_key=1.0))
        for i in range(4000):
            length = int(rng.choice(list(lengths)))
            value = float(rng.random() < lengths[length] + 0.05)
            baseline.observe(context_of(replace(TURN, user=f"u{i}", prompt_ids=(i, 1))), value, length)
        found[exponent] = gradient(predict(baseline, replace(TURN, user="new", prompt_ids=(1, 1))), lengths)
    means, variances = zip(*found.values(), strict=True)
    assert means == pytest.approx([means[0]] * 3)
    assert variances[1] < 0.97 * variances[0]
    assert variances[2] < 0.97 * variances[0]


def test_one_very_long_answer_does_not_decide():
    baseline = Baseline()
    for i in range(200):
        baseline.observe(context_of(replace(TURN, user=f"u{i}", prompt_ids=(i,))), 1.0, 20)
    baseline.observe(context_of(replace(TURN, user="long", prompt_ids=(7,))), 0.0, 100_000)
    assert predict(baseline, replace(TURN, user="new", prompt_ids=(8,))) > 0.85


def test_one_tenants_users_and_prompts_say_nothing_about_anothers():
    taught, fresh = Baseline(), Baseline()
    for i in range(40):
        for baseline in (taught, fresh):
            baseline.observe(
                context_of(replace(TURN, tenant="acme", user=f"u{i % 8}", prompt_ids=(i,))), float(i % 2), 5
            )
        taught.observe(context_of(replace(TURN, tenant="acme", user="ann", prompt_ids=(5, 5))), 1.0, 5)
        fresh.observe(context_of(replace(TURN, tenant="acme", user="joe", prompt_ids=(6, 6))), 1.0, 5)
    ann = replace(TURN, tenant="rival", user="ann", prompt_ids=(5, 5))
    assert predict(taught, ann) == predict(fresh, ann), "another tenant's ann, asking the same, is a stranger"
    assert predict(taught, replace(ann, tenant="acme")) > predict(taught, ann) + 0.1


# ---------------------------------------------------------------- what a later turn tells about an earlier one


def expectation(newest_first: bool) -> tuple[float, float]:
    """E[A d log pi] of a first turn whose two actions, a fair coin, only decide what the second turn is worth; and its true value.

    The first turn earns nothing itself, so without credit for what follows its true gradient is 0. `newest_first`: the second turn
    is learned from in an earlier batch than the first, as when the newest turns are taken and an episode may be split.
    """
    advantages: list[float] = []
    for action in (0.0, 1.0):
        baseline = Baseline()
        for i in range(50):
            baseline.observe(context_of(replace(TURN, user=f"u{i}", prompt_ids=(i, 3))), float(i % 2), 5)
        first, second = replace(TURN, prompt_ids=(1,)), replace(TURN, prompt_ids=(1, 7, 2))
        if newest_first:
            baseline.observe(context_of(second), action, 5)
        advantages.append(0.0 - predict(baseline, first))
    return sum(0.5 * each * (action - 0.5) for each, action in zip(advantages, (0.0, 1.0), strict=True)), 0.0


def test_a_baseline_taught_by_the_second_turn_bends_the_first_turns_gradient():
    leaked, true = expectation(newest_first=True)
    whole, _ = expectation(newest_first=False)
    assert leaked < true - 0.01, "what the action led to has reached the baseline that it is measured against"
    assert whole == true
