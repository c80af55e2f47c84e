"""The learning rate falls where the gradient is mostly noise: simulated people, and the trainer's own steps."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ostinato.core.samples import Episode
from ostinato.reward.baseline import Baseline
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import SingleRollout
from ostinato.testing.records import a_sample, a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import GradientSignal, PolicyTrainer, signal_factor

PROMPTS, TURNS, FLIPPED = 60, 144, 0.05
CONFIG = TrainConfig(compute="fp32", publish="fp32", learning_rate=1e-4, warmup_steps=0, turn_tokens=8)


def divergence(logits_P, moved_P) -> float:
    """Mean KL(before || after) of one step, in nats."""
    before, after = (1 / (1 + np.exp(-x)) for x in (logits_P, moved_P))
    return float(np.mean(before * np.log(before / after) + (1 - before) * np.log((1 - before) / (1 - after))))


def steps_at(accepted: float, config: TrainConfig, steps: int = 60, rate: float = 0.1) -> tuple[float, float]:
    """The KL per step of AdamW's steps from a policy that is held where this share is good; and the last share of signal.

    Each prompt has a good answer and a bad one; people accept the good, and one label in twenty is wrong.
    """
    rng, signal = np.random.default_rng(3), GradientSignal(config.beta1)
    credit = SingleRollout(RewardConfig(user_cap=1.0), Baseline())
    logits_P = np.full(PROMPTS, math.log(accepted / (1 - accepted)))
    weights = torch.nn.Parameter(torch.zeros(PROMPTS, dtype=torch.float64))
    adam = torch.optim.AdamW([weights], lr=1.0, betas=(config.beta1, config.beta2), eps=1e-8, weight_decay=0.0)
    spent: list[float] = []
    for step in range(steps):
        prompts_N, good_N = rng.integers(PROMPTS, size=TURNS), rng.random(TURNS) < accepted
        labels_N = good_N ^ (rng.random(TURNS) < FLIPPED)
        turns = [a_turn(f"{step}-{i}:0", sampled=(1,)) for i in range(TURNS)]
        mean = labels_N.mean()  # a baseline that knows the policy
        found = credit(
            [Episode(id=turn.id, tenant="default", turns=(turn,)) for turn in turns],
            {turn.id: float(label) - mean for turn, label in zip(turns, labels_N, strict=True)},
        )
        gradient_P = np.zeros(PROMPTS)
        np.add.at(gradient_P, prompts_N, [-found[t.id][0] * (g - accepted) for t, g in zip(turns, good_N, strict=True)])
        weights.grad = torch.from_numpy(gradient_P / TURNS)
        momentum = adam.state[weights]["exp_avg"].numpy() if step else np.zeros(PROMPTS)
        signal.see(square=float(weights.grad.square().sum()), with_momentum=float(weights.grad.numpy() @ momentum))
        before = weights.detach().clone()
        adam.step()
        move_P = (weights.detach() - before).numpy() * rate * signal_factor(signal.share, config)
        spent.append(divergence(logits_P, logits_P + move_P))
    return float(np.mean(spent[steps // 2 :])), signal.share


def test_the_step_shrinks_where_nearly_all_is_accepted_and_labels_are_wrong():
    without = CONFIG.model_copy(update={"signal_share": None})
    scaled, share = steps_at(0.97, CONFIG)
    full, _ = steps_at(0.97, without)
    assert share < 0.1
    assert scaled < 0.5 * full, (scaled, full)
    early, share = steps_at(0.5, CONFIG)
    assert share > 0.2
    assert early == steps_at(0.5, without)[0], "where there is much to learn, nothing is lost"


def test_the_share_is_that_of_the_gradients_square():
    rng, mean_D = np.random.default_rng(0), np.full(1000, 0.01)
    signal, momentum_D, shares = GradientSignal(0.9), np.zeros(1000), list[float]()
    for _ in range(300):
        gradient_D = mean_D + rng.normal(0, 0.02, 1000)  # |E g|^2 = 0.1, E |g|^2 = 0.5
        signal.see(square=float(gradient_D @ gradient_D), with_momentum=float(gradient_D @ momentum_D))
        momentum_D = 0.9 * momentum_D + 0.1 * gradient_D
        shares.append(signal.share)
    assert shares[0] == 1.0
    assert np.mean(shares[60:]) == pytest.approx(0.2, abs=0.01)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def taken(trainer: PolicyTrainer, sign: float) -> dict[str, float]:
    turns = [a_turn(f"{i}:0", prompt=b"def f", sampled=(97 + i, 98)) for i in range(4)]
    scored = zip(turns, trainer.score(turns), strict=True)
    samples = [a_sample(replace(t, logprobs=now), sign * (1.0 if i % 2 else -1.0)) for i, (t, now) in enumerate(scored)]
    return dict(trainer.step(samples).metrics)


def test_the_trainer_steps_slower_where_batches_contradict_each_other_and_goes_on_so_after_a_restart(path: Path):
    agreeing, torn = PolicyTrainer(path, CONFIG), PolicyTrainer(path, CONFIG)
    with_it = [taken(agreeing, 1.0) for _ in range(8)][-1]
    against = [taken(torn, 1.0 if i % 2 else -1.0) for i in range(24)][-1]
    assert with_it["signal"] > 0.8
    assert with_it["learning_rate"] == CONFIG.learning_rate
    assert against["signal"] < 0.05
    assert against["learning_rate"] < 0.5 * CONFIG.learning_rate
    again = PolicyTrainer(path, CONFIG)
    again.restore(torn.state())
    assert taken(again, 1.0)["signal"] == taken(torn, 1.0)["signal"] < 0.5
    old = torn.state()
    again.restore(replace(old, moments={name: each for name, each in old.moments.items() if name != "signal"}))
    assert again.step_count == torn.step_count
    torn.go_back(agreeing.weights())
    before = taken(torn, 1.0)["signal"]
    assert before == taken_share(old), "a dropped momentum says nothing"


def taken_share(state) -> float:
    signal = GradientSignal(0.9)
    signal.restore(state.moments["signal"])
    return signal.share
