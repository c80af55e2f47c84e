"""Engine and trainer by torch's own operations, on the CPU: the code that a GPU would run, beside our kernels."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tests.devices import TORCH
from tests.fakes.step_gate import StepGate

from ostinato.core.errors import Cancelled
from ostinato.core.generation import Generate
from ostinato.core.records import Finish, PolicyVersion, Sampling, Span, Turn
from ostinato.core.samples import Sample
from ostinato.core.weights import Snapshot
from ostinato.engine.embedded.kv import DeviceStore
from ostinato.model.attention import hidden
from ostinato.model.backend import OWN, ComputeBackend
from ostinato.model.device_step import Decoding, DecodingStep, RecordedPass, StepAttend, numbers_of
from ostinato.model.numerics import contract
from ostinato.testing.records import a_sample, a_turn
from ostinato.testing.tiny import tiny_model, tiny_moe
from ostinato.testing.tiny_engine import tiny_engine
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
CONFIG = TrainConfig(
    compute="fp32", publish="fp32", learning_rate=1e-3, warmup_steps=0, turn_tokens=8, microbatch_tokens=64
)
WITHIN = 2e-5
"""Nats between two log-probabilities of one token in fp32."""


def prompt_of(number: int) -> tuple[int, ...]:
    return (*(b"def add(a, b): return a " * (1 + number % 3)), number)


class Answer(NamedTuple):
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy: PolicyVersion
    routes: bytes


async def answer(engine, number: int, tokens: int = 24, **sampling) -> Answer:
    prompt = prompt_of(number)
    asked = Generate(
        id=f"r{number}", slot="live", prompt_ids=prompt, sampling=Sampling(max_tokens=tokens, seed=number, **sampling)
    )
    chunks = [chunk async for chunk in engine.generate(asked)]
    ids = tuple(token for chunk in chunks for token in chunk.ids)
    logprobs = tuple(logprob for chunk in chunks for logprob in chunk.logprobs)
    return Answer(ids, logprobs, chunks[-1].policy, chunks[-1].routes)


@pytest.mark.parametrize("write", [tiny_model, tiny_moe])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_same_tokens_are_drawn(tmp_path: Path, temperature: float, write):
    found = []
    for backend in (OWN, TORCH):
        async with tiny_engine(tmp_path, backend=backend, write=write) as tiny:
            found.append([await answer(tiny.engine, i, temperature=temperature) for i in range(6)])
    for ours, torchs in zip(*found, strict=True):
        assert (torchs.ids, torchs.routes) == (ours.ids, ours.routes)
        assert torchs.logprobs == pytest.approx(ours.logprobs, abs=WITHIN)


def teaching(trainer: PolicyTrainer, turns: list[Turn]) -> list[Sample]:
    scores = trainer.score(turns)
    return [
        a_sample(replace(turn, logprobs=scored), value, reward=value)
        for i, (turn, scored) in enumerate(zip(turns, scores, strict=True))
        for value in [1.0 if i % 2 else -0.7]
    ]


def some_turns() -> list[Turn]:
    shared = tuple(range(5, 45))
    return [a_turn(f"{i}:0", prompt=(*shared, i), sampled=tuple(range(100 + i, 108 + i))) for i in range(6)]


@pytest.mark.parametrize("recompute_tokens", [0, 2048])
def test_a_step_moves_the_weights_as_our_kernels_do(tmp_path: Path, recompute_tokens: int):
    path = tiny_model(tmp_path / "m")
    moved = []
    for backend in (OWN, TORCH):
        trainer = PolicyTrainer(path, CONFIG.model_copy(update={"recompute_tokens": recompute_tokens}), backend=backend)
        learned = trainer.step(teaching(trainer, some_turns()))
        mean = np.array(trainer.state().moments["exp_avg"])
        moved.append((learned.metrics["loss"], learned.metrics["grad_norm"], mean))
    (own_loss, own_norm, own_mean), (loss, norm, mean) = moved
    assert (loss, norm) == pytest.approx((own_loss, own_norm), rel=1e-3, abs=1e-5)
    assert np.abs(own_mean).max() > 1e-5
    np.testing.assert_allclose(mean, own_mean, atol=2e-4 * np.abs(own_mean).max(), rtol=0)


def test_a_resumed_trainer_goes_on_with_the_same_bits(tmp_path: Path):
    path = tiny_model(tmp_path / "m")
    trainer = PolicyTrainer(path, CONFIG, backend=TORCH)
    trainer.step(teaching(trainer, some_turns()))
    trainer.save(tmp_path / "kept", cursor=1, keep=1)
    other = PolicyTrainer(path, CONFIG, backend=TORCH)
    assert other.resume(tmp_path / "kept")
    ends = []
    for each in (trainer, other):
        each.step(teaching(each, some_turns()))
        ends.append({name: array.data.tobytes() for name, array in each.weights().items()})
    assert ends[0] == ends[1]


def test_a_step_ends_at_a_layer_when_it_is_told_to(tmp_path: Path):
    trainer = PolicyTrainer(tiny_model(tmp_path / "m"), CONFIG, backend=TORCH)
    samples = teaching(trainer, some_turns())
    for asked in (1, 2):  # the second layer; the first of the backward pass
        left = iter(range(asked))
        with pytest.raises(Cancelled):
            trainer.step(samples, stop=lambda left=left: next(left, None) is None)
    assert trainer.step_count == 0


@pytest.mark.parametrize("write", [tiny_model, tiny_moe])
async def test_what_was_served_is_learned_from_and_served(tmp_path: Path, write):
    """One turn of the loop: sampled, trained on under the same contract, published, loaded, and another answer."""
    own = contract(torch.float32, "fast", 1, 16, backend=TORCH)
    async with tiny_engine(tmp_path, backend=TORCH, write=write) as tiny:
        trainer = PolicyTrainer(tiny.path, CONFIG, own, backend=TORCH)
        samples = []
        for i in range(6):
            ids, logprobs, policy, routes = await answer(tiny.engine, i, temperature=1.0)
            turn = a_turn(f"{i}:0", prompt=prompt_of(i), sampled=ids)
            spans = (Span(policy=policy, tokens=len(ids)),)
            turn = replace(turn, logprobs=logprobs, spans=spans, numerics=own.id, finish=Finish.LENGTH, routes=routes)
            samples.append(a_sample(turn, 1.0 if i % 2 else -0.7, reward=1.0))
        taught = [*samples[1].turn.prompt_ids, *samples[1].turn.sampled_ids]
        before = await tiny.engine.score("live", taught, len(prompt_of(1)))
        learned = trainer.step(samples)
        assert learned.metrics["mismatch_tokens"] == sum(len(sample.turn.sampled_ids) for sample in samples)
        assert learned.metrics["mismatch_max_abs"] < WITHIN
        if write is tiny_moe:
            assert learned.metrics["router_routed"] == 2 * learned.metrics["tokens"], (
                "both layers' choices are replayed"
            )
            assert learned.metrics["router_flips"] == learned.metrics["router_refused"] == 0
        version = PolicyVersion(number=learned.policy_number, hash="step1")
        await tiny.engine.load("live", Snapshot(policy=version, weights=learned.weights))
        after = await tiny.engine.score("live", taught, len(prompt_of(1)))
        assert sum(after) > sum(before), "what was rewarded is likelier"
        assert (await answer(tiny.engine, 1, temperature=0.0)).policy == version


def decoded(self: DeviceStore, *args):
    """`DeviceStore.decoded` as on a GPU."""
    if self._decoding is None:
        self._decoding = Decoding(self._layers, self.block, len(self._layers[0].keys) // self.block - 1)
    return self._decoding.run(*args)


@pytest.mark.skipif(TORCH.device != "cpu", reason="on a GPU Triton's interpreter is off, and real steps are recorded")
async def test_a_recorded_step_draws_the_same_tokens(tmp_path: Path, monkeypatch):
    """What a GPU replays is computed anew here from the same numbers, in Triton's interpreter; streams end, and spare rows are added."""
    pytest.importorskip("triton", reason="Triton is not installed here: it is for Linux only")
    sizes = []

    def record(self: Decoding, model, rows: int, blocks: int) -> RecordedPass:
        sizes.append(rows)
        step = DecodingStep(torch.from_numpy(numbers_of((), (), self._block, rows, blocks, self._spare)))
        again = partial(hidden, model, step.ids_R, step.positions_R, StepAttend(self._layers, self._block, step))
        states_RD = again()
        return RecordedPass(SimpleNamespace(replay=lambda: states_RD.copy_(again())), step, states_RD)

    async def some(backend: ComputeBackend) -> tuple[list[Answer], dict[str, float]]:
        async with tiny_engine(tmp_path, backend=backend) as tiny:
            with StepGate(tiny.engine):  # so that all are there before one has ended
                asking = [asyncio.create_task(answer(tiny.engine, i, 6 + 2 * i, temperature=1.0)) for i in range(5)]
                await asyncio.sleep(0)
            return await asyncio.gather(*asking), tiny.engine.stats()

    expected, launched = await some(OWN)
    monkeypatch.setattr(Decoding, "_record", record)
    monkeypatch.setattr(DeviceStore, "decoded", decoded)
    found, replayed = await some(ComputeBackend(kernels="torch"))
    for ours, recorded in zip(expected, found, strict=True):
        assert recorded.ids == ours.ids
        assert recorded.logprobs == pytest.approx(ours.logprobs, abs=WITHIN)
    assert max(sizes) == 8, "five rows and three spare ones"
    assert launched["recorded_passes"] == 0
    assert 0 < replayed["recorded_passes"] < replayed["passes"], "the prompts are launched"


async def test_a_model_that_cannot_be_recorded_is_tried_once_and_its_steps_are_launched(tmp_path: Path, monkeypatch):
    tried = []

    def fail(self: Decoding, model, rows: int, blocks: int) -> None:
        tried.append(rows)
        self._failed.add(model)

    monkeypatch.setattr(Decoding, "_record", fail)
    monkeypatch.setattr(DeviceStore, "decoded", decoded)
    async with tiny_engine(tmp_path, backend=ComputeBackend(kernels="torch")) as tiny:
        found = await answer(tiny.engine, 1, temperature=0.0)
    async with tiny_engine(tmp_path) as tiny:
        assert found.ids == (await answer(tiny.engine, 1, temperature=0.0)).ids
    assert tried == [1]
