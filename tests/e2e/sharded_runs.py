"""What the tests and examinations of a trainer over several ranks learn from, and how they compare what came out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.fork_server import FORK_SERVER

from ostinato.core.records import PolicyVersion, Span, Turn
from ostinato.core.samples import Sample
from ostinato.core.weights import Weights
from ostinato.testing.records import a_turn
from ostinato.train import checkpoint
from ostinato.train.config import TrainConfig
from ostinato.train.sharding import trainer
from ostinato.train.sharding.trainer import ShardedTrainer
from ostinato.train.trainer import PolicyTrainer

CONFIG = TrainConfig(
    compute="bf16", learning_rate=1e-3, warmup_steps=0, microbatch_tokens=64, turn_tokens=8, turn_ess=0.3
)


def batches(path: Path, config: TrainConfig, *, steps: int, turns: int = 14) -> list[list[Sample]]:
    """What the log would hold: the same for every run. All of it is scored by the first weights, so that drift grows as it should."""
    draw = random.Random(7)
    found: list[list[Turn]] = []
    for step in range(steps):
        drawn = [
            a_turn(
                f"{step}-{index}:0",
                prompt=[draw.randrange(256) for _ in range(draw.randrange(3, 30))],
                sampled=[draw.randrange(256) for _ in range(draw.randrange(2, 9))],
            )
            for index in range(turns)
        ]
        found.append(drawn)
    return _scored(path, config, found, draw)


def episodes(path: Path, config: TrainConfig, *, steps: int) -> list[list[Sample]]:
    """Long ones: a session whose turns contain each other and branch twice, answers to one prompt, and a short one; with edited logits,
    and each turn at a temperature of its own.
    """
    draw = random.Random(11)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(256) for _ in range(count))

    def made(step: int) -> list[Turn]:
        talk, prompt = ids(330), ids(90)
        cuts = [(40, 60), (75, 160), (180, 200), (230, 330)]
        parts = [(talk[:a], talk[a:b]) for a, b in cuts]
        parts += [(talk[:a] + ids(5), ids(size)) for a, size in ((160, 70), (200, 30))]
        parts += [(prompt, ids(size)) for size in (50, 1, 33)]
        parts.append((ids(3), ids(2)))
        return [
            replace(
                turn := a_turn(f"{step}-{number}:0", prompt=prompt, sampled=sampled),
                sampling=replace(
                    turn.sampling,
                    temperature=0.7 + 0.1 * number,
                    frequency_penalty=0.3 * (number % 3),
                    logit_bias=((sampled[0], 1.5),) if number % 2 else (),
                ),
            )
            for number, (prompt, sampled) in enumerate(parts)
        ]

    return _scored(path, config, [made(step) for step in range(steps)], draw)


def _scored(
    path: Path, config: TrainConfig, found: Sequence[Sequence[Turn]], draw: random.Random
) -> list[list[Sample]]:
    one = PolicyTrainer(path, config.model_copy(update={"ranks": 1, "context_ranks": 1}))
    held = Span(policy=PolicyVersion(number=0, hash="0" * 64), tokens=1)
    return [
        [
            Sample(
                turn=replace(turn, logprobs=own, spans=(replace(held, tokens=len(own)),)),
                reward=1.0,
                advantages=(draw.choice([-1.0, 0.5, 1.0]),) * len(own),
            )
            for turn, own in zip(drawn, one.score(drawn), strict=True)
        ]
        for drawn in found
    ]


def sharded(path: Path, config: TrainConfig, **options: Any) -> ShardedTrainer:
    """A trainer whose other ranks are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "spawn", FORK_SERVER.popen)
        return ShardedTrainer(path, config, **options)


def equal(one: Weights, other: Weights) -> bool:
    """Every byte."""
    return one.keys() == other.keys() and all(np.array_equal(one[name].data, other[name].data) for name in one)


def gradients(directory: Path) -> dict[str, np.ndarray]:
    """By parameter, of a checkpoint after one step: AdamW's first moment is the clipped gradient times 1 - beta1."""
    found = checkpoint.load(directory)
    assert found is not None
    return {name: np.array(found.rows("exp_avg", name, 0, shape[0])) for name, shape in found.shapes.items()}


def masters(directory: Path) -> dict[str, np.ndarray]:
    """By parameter, of a checkpoint."""
    found = checkpoint.load(directory)
    assert found is not None
    return {name: np.array(found.weights[name]) for name in found.shapes}


def difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray], names: Sequence[str] | None = None) -> float:
    """The largest, over the tensors, of the norm of the difference relative to the norm."""
    return max(
        float(np.linalg.norm(one[name] - other[name]) / max(np.linalg.norm(one[name]), 1e-30)) for name in names or one
    )
