"""A call arrives as it was made, numbers that nobody should learn from included."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ostinato.core.records import PolicyVersion, Sampling, SteeringBasis
from ostinato.core.samples import Sample
from ostinato.core.steering import Basis, Steered
from ostinato.testing.records import a_turn
from ostinato.train.config import TrainConfig
from ostinato.train.sharding.calls import RankCall, RankTask, call_line, read_call, read_task, task_line

BASIS = Basis(("brief",), np.array([2, 7]), np.array([[1.0, -0.5]], np.float32), "9f")
VERSION = PolicyVersion(number=3, hash="ab" * 32)


def test_a_step_arrives_whole():
    turn = replace(
        a_turn("t:0", sampled=(7, 9, 11), routes=bytes(range(256))),
        text='line\n"quoted" é 漢',
        logprobs=(-0.1, -1 / 3, -1e-300),
        sampling=Sampling(max_tokens=3, temperature=0.7, logit_bias=((5, -2.5),), grammar="start: /a/\n"),
        steered=Steered(
            basis="9c", dials=(0.5, -1 / 3), cap=0.1, budget=3.0, tokens=2, kl=0.1 / 3, features=(1e-9, -7.1)
        ),
    )
    samples = (
        Sample(turn=turn, reward=0.1, advantages=(0.1, -0.2, 0.3), weight=0.5),
        Sample(turn=a_turn("t:1"), reward=1.0, advantages=(1.0, math.inf), summed=True),
    )
    call = RankCall(
        method="step", samples=samples, held=True, release=VERSION, bases=(SteeringBasis.of(BASIS, at=1.0),)
    )
    line = call_line(call)
    assert line.count(b"\n") == 1
    assert read_call(line) == call


def test_what_is_not_a_number_stays_so():
    sample = Sample(turn=a_turn(), reward=1.0, advantages=(math.nan, 1.0))
    found = read_call(call_line(RankCall(method="step", samples=(sample,)))).samples[0]
    assert math.isnan(found.advantages[0])
    assert found.advantages[1] == 1.0


@pytest.mark.parametrize(
    "call",
    [
        RankCall(method="save", directory=Path("a b/c"), cursor=1 << 40, keep=3),
        RankCall(method="resume", directory=Path("/x")),
        RankCall(method="go_back", number=4),
        RankCall(method="skip_step"),
    ],
)
def test_other_calls_arrive(call: RankCall):
    assert read_call(call_line(call)) == call


def test_nothing_else_can_be_called():
    with pytest.raises(ValueError, match="method"):
        read_call(call_line(RankCall(method="skip_step")).replace(b"skip_step", b"__class__"))


def test_a_task_arrives():
    config = TrainConfig(compute="bf16", ranks=3, anchor_kl=None)
    task = RankTask(model=Path("/m"), config=config, contract=None, rank=2, port=4711)
    assert read_task(task_line(task)) == task
