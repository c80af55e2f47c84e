"""A cancelled step has not been: at whatever layer it ends, the state's bits are as before, and the next step's as if undisturbed."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S

from ostinato.core.errors import BadWeights, Cancelled, NoSignal
from ostinato.core.records import Batch, PolicyVersion
from ostinato.core.samples import Sample, TrainingBatch
from ostinato.core.weights import Learned, Snapshot
from ostinato.testing.records import a_sample, a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.checkpoint import Checkpoint
from ostinato.train.config import TrainConfig
from ostinato.train.references import References
from ostinato.train.stepper import Stepper
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
V0, V1 = (PolicyVersion(number=number, hash=f"{number:064x}") for number in range(2))
CONFIG = TrainConfig(compute="fp32", learning_rate=1e-3, turn_tokens=8, microbatch_tokens=24, clip=1e9)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def samples(trainer: PolicyTrainer) -> list[Sample]:
    turns = [a_turn(f"{i}:0", prompt=b"%d def f(" % i, sampled=b"x%d):\n" % i, version=1) for i in range(6)]
    scores = trainer.score(turns)
    return [
        a_sample(replace(turn, logprobs=scored), 1.0 if i % 2 else -0.7)
        for i, (turn, scored) in enumerate(zip(turns, scores, strict=True))
    ]


def bits(state: Checkpoint) -> list[bytes]:
    return [array.tobytes() for arrays in (state.weights, state.moments) for array in arrays.values()]


class After:
    """Says stop when it was asked for the n-th time."""

    def __init__(self, calls: float) -> None:
        self.calls, self.asked = calls, 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked >= self.calls


@pytest.mark.parametrize("recompute_tokens", [0, 10_000])
def test_a_step_cancelled_at_any_layer_leaves_no_trace(path: Path, recompute_tokens: int):
    """Two layers, two micro-batches, forward and backward, after a pass under the release's weights: each in turn."""
    config = CONFIG.model_copy(update={"recompute_tokens": recompute_tokens})
    trainer, twin = PolicyTrainer(path, config), PolicyTrainer(path, config)
    release = twin.weights()
    references = References(release=V0, fetch=lambda policy: release)
    given = samples(trainer)[:4]
    whole = After(float("inf"))
    expected = twin.step(given, references, whole)
    assert whole.asked == 2 * 2 * (4 if recompute_tokens == 0 else 3)
    before = bits(trainer.state())
    for calls in range(1, whole.asked + 1):
        stop = After(calls)
        with pytest.raises(Cancelled, match="step 1 was cancelled"):
            trainer.step(given, references, stop)
        assert stop.asked == calls
        assert bits(trainer.state()) == before
        assert trainer.step_count == 0
    learned = trainer.step(given, references)
    assert bits(trainer.state()) == bits(twin.state())
    assert all(learned.weights[name].data.tobytes() == array.data.tobytes() for name, array in expected.weights.items())


# ---------------------------------------------------------------- the worker's side of it


class Gate:
    """A trainer's `score` of the world: holds a step in its first layer until opened."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        real = trainer._policy.logprobs

        def held(*args, **named):
            self.entered.set()
            assert self.opened.wait(WHOLE_PROGRAM_S)
            return real(*args, **named)

        trainer._policy.logprobs = held


def batch(given: list[Sample], step: int = 1) -> TrainingBatch:
    row = Batch(
        step=step,
        turns=tuple(sample.turn.id for sample in given),
        credits=tuple(sample.advantages for sample in given),
        reference=V1,
        at=0.0,
    )
    return TrainingBatch(row=row, samples=tuple(given))


async def no_weights(policy: PolicyVersion) -> Snapshot:
    raise AssertionError(f"{policy} was asked for")


def stepper(trainer: PolicyTrainer, seen: list[Learned], **named) -> Stepper:
    return Stepper(trainer, named.pop("snapshot", no_weights), seen.append, **named)


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 20)


async def test_a_cancelled_step_ends_and_does_not_count(path: Path):
    trainer, twin, seen = PolicyTrainer(path, CONFIG), PolicyTrainer(path, CONFIG), []
    given, before = samples(trainer), bits(trainer.state())
    under_test, gate = stepper(trainer, seen), Gate(trainer)
    task = asyncio.create_task(under_test.step(batch(given)))
    await entered(gate)
    task.cancel()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (bits(trainer.state()), trainer.step_count, seen) == (before, 0, [])
    await under_test.step(batch(given))
    await stepper(twin, []).step(batch(given))
    assert bits(trainer.state()) == bits(twin.state())
    assert [learned.step for learned in seen] == [1]


async def test_a_cancelled_task_waits_for_its_thread(path: Path):
    trainer, seen = PolicyTrainer(path, CONFIG), []
    given, before = samples(trainer), bits(trainer.state())
    gate = Gate(trainer)
    task = asyncio.create_task(stepper(trainer, seen).step(batch(given)))
    await entered(gate)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done(), "the thread is still at work"
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (bits(trainer.state()), trainer.step_count, seen) == (before, 0, [])


async def test_a_step_that_was_through_when_it_was_cancelled_is_told_of(path: Path):
    trainer, seen = PolicyTrainer(path, CONFIG), []
    given = samples(trainer)
    publishing, go_on = threading.Event(), threading.Event()
    real = trainer._masters.publish

    def held():
        publishing.set()
        assert go_on.wait(WHOLE_PROGRAM_S)
        return real()

    trainer._masters.publish = held
    task = asyncio.create_task(stepper(trainer, seen).step(batch(given)))
    assert await asyncio.to_thread(publishing.wait, WHOLE_PROGRAM_S)
    task.cancel()
    await asyncio.sleep(0.01)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (trainer.step_count, [learned.step for learned in seen]) == (1, [1])


async def test_waiting_for_weights_ends_too(path: Path):
    trainer, asked, seen = PolicyTrainer(path, CONFIG), asyncio.Event(), []
    given = samples(trainer)
    given = [replace(sample, turn=replace(sample.turn, numerics="")) for sample in given]

    async def never(policy: PolicyVersion) -> Snapshot:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    under_test = stepper(trainer, seen, snapshot=never)
    elsewhere = batch(given)
    elsewhere = replace(elsewhere, row=replace(elsewhere.row, reference=V0))
    task = asyncio.create_task(under_test.step(elsewhere))
    await asyncio.wait_for(asked.wait(), PATIENT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENT_S)
    assert (trainer.step_count, seen) == (0, [])


async def test_a_step_counts_if_the_release_that_it_goes_back_to_is_refused(path: Path):
    """The log holds its batch, so the next one has the next number."""
    trainer, given = PolicyTrainer(path, CONFIG), batch([])

    async def of_another_model(policy: PolicyVersion) -> Snapshot:
        return Snapshot(policy=policy, weights={})

    with pytest.raises(BadWeights, match="no tensor"):
        await stepper(trainer, [], snapshot=of_another_model).step(replace(given, row=replace(given.row, base=V0)))
    assert trainer.step_count == 1


async def test_no_step_builds_on_what_was_to_be_left_until_the_release_could_be_gone_back_to(path: Path):
    """The log says that training went back, so what comes after it counts as clean."""
    trainer, seen, refused = PolicyTrainer(path, CONFIG), [], [True]
    release, given = trainer.weights(), batch(samples(trainer))

    async def snapshot(policy: PolicyVersion) -> Snapshot:
        return Snapshot(policy=policy, weights={} if refused[0] else release)

    steps = stepper(trainer, seen, snapshot=snapshot)
    await steps.step(given)
    for row in (replace(given.row, base=V0), given.row):
        with pytest.raises(BadWeights, match="no tensor"):
            await steps.step(replace(given, row=row))
    refused[0] = False
    went_back: list[int | None] = []
    go_back = trainer.go_back
    trainer.go_back = lambda weights, number=None: (went_back.append(number), go_back(weights, number))[1]
    for _ in range(2):
        await steps.step(given)
    assert went_back == [V0.number], "once"
    assert (trainer.step_count, len(seen)) == (5, 3)


async def test_a_refused_step_counts(path: Path):
    trainer, seen = PolicyTrainer(path, CONFIG), []
    idle = [replace(sample, advantages=(0.0,) * len(sample.advantages)) for sample in samples(trainer)]
    with pytest.raises(NoSignal, match="exactly 0"):
        await stepper(trainer, seen).step(batch(idle))
    assert (trainer.step_count, seen) == (1, [])


async def test_the_anchor_is_asked_for_once_and_fetched_when_needed(path: Path):
    trainer, seen, questions, fetched = PolicyTrainer(path, CONFIG), [], [], []
    weights = trainer.weights()

    async def anchor() -> PolicyVersion:
        questions.append(1)
        return V0

    async def snapshot(policy: PolicyVersion) -> Snapshot:
        fetched.append(policy)
        return Snapshot(policy=policy, weights=weights)

    under_test = stepper(trainer, seen, snapshot=snapshot, anchor=anchor)
    for step in (1, 2):
        await under_test.step(batch(samples(trainer), step))
    assert questions == [1]
    assert fetched == [V0, V0]
    assert seen[0].metrics["anchor_kl"] == pytest.approx(0.0, abs=1e-9)
    assert seen[1].metrics["anchor_kl"] > 1e-4
