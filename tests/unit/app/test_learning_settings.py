"""What `learn.batch = "auto"` means for the desk, and for the trainer's learning rate."""

import math

import pytest

from ostinato.app.numerics import training
from ostinato.app.trainer import taught_by
from ostinato.config import load
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import batch_factor


@pytest.mark.parametrize(
    ("words", "every", "base"),
    [
        ([], True, 144),
        (["learn.batch=32"], False, None),
        (["learn.source=both", "worlds.groups=4"], False, None),
        (["learn.source=worlds", "worlds.groups=4"], False, None),
        (["train.base_turns=60"], True, 60),
    ],
)
def test_a_step_takes_all_turns_unless_their_number_is_set_or_rollouts_share_it(words, every, base):
    config = load(None, ["model.compute=bf16", *words])
    assert (taught_by(config).every, training(config).base_turns) == (every, base)


def test_the_learning_rate_grows_with_the_root_of_a_steps_turns_to_twice_as_much():
    config = TrainConfig(base_turns=144)
    assert [batch_factor(turns, config) for turns in (10, 144, 288, 576, 5_000)] == [1.0, 1.0, math.sqrt(2), 2.0, 2.0]
    assert batch_factor(5_000, TrainConfig()) == 1.0
