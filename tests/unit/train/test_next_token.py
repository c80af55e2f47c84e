"""Reading on: the loss and its gradient are those of plain next-token prediction, and no piece sees another."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ostinato.app.supervised import learning_rate_at
from ostinato.core.errors import BadWeights
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
CONFIG = TrainConfig(compute="fp32", publish="fp32", microbatch_tokens=16, clip=1e9)
PIECES = [tuple(b"def f(x):\n    return x"), tuple(b"def g(y):"), tuple(b"ab"), tuple(b"def f(x):\n    pass")]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def plain_loss(path):
    """The mean over all predictions of all pieces, each by itself, as transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(path)
    total = sum(len(piece) - 1 for piece in PIECES)
    parts = []
    for piece in PIECES:
        ids = torch.tensor([piece])
        parts.append(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
    loss = torch.stack(parts).sum() / total
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_loss_and_gradient_are_those_of_each_piece_by_itself(path):
    expected, gradients = plain_loss(path)
    trainer = PolicyTrainer(path, CONFIG)
    assert trainer.surprise(PIECES) == pytest.approx(expected, rel=1e-5)
    metrics = trainer.read(PIECES, learning_rate=1e-30)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["tokens"] == sum(len(piece) - 1 for piece in PIECES)
    for name, total in trainer._masters.sums.items():
        assert torch.allclose(total, gradients[name], rtol=1e-3, atol=1e-6), name


def test_what_is_read_becomes_likely(path):
    trainer = PolicyTrainer(path, TrainConfig(compute="fp32", publish="fp32"))
    before = trainer.surprise(PIECES)
    for _ in range(12):
        trainer.read(PIECES, learning_rate=3e-3)
    assert trainer.surprise(PIECES) < 0.5 * before
    assert trainer.step_count == 12


def test_a_gradient_that_is_no_number_changes_nothing(path):
    trainer = PolicyTrainer(path, CONFIG)
    name = next(iter(trainer._masters.weights))
    sound = trainer._masters.weights[name][0].clone()
    trainer._masters.weights[name][0] = math.nan
    trainer._masters.round_into_model()
    with pytest.raises(BadWeights, match="step 1 refused"):
        trainer.read([(0, 1, 2)], learning_rate=1e-3)
    assert trainer.step_count == 0
    trainer._masters.weights[name][0] = sound
    trainer._masters.round_into_model()
    assert np.isfinite(trainer.read(PIECES, learning_rate=1e-3)["loss"])


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate_at(step, steps=100, peak=1.0, warmup=10, floor=0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == max(rates) == 1.0
    assert rates[99] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate_at(0, steps=1, peak=1.0, warmup=0, floor=0.1) == 1.0
