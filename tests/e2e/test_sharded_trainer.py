"""A trainer over two processes against one process: the same loss and gradient, and refusals by all or none; each with its own
micro-batches, or both with their own tokens of every one.

The ranks are real processes. Each test begins at the same checkpoint of step 0, written by one process.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from tests.e2e import sharded_runs
from tests.e2e.sharded_runs import batches, difference, equal, gradients, masters, sharded

from ostinato.core.errors import Cancelled, NoSignal, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.samples import Sample
from ostinato.model.load import load_model, weights_of
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.references import References
from ostinato.train.sharding.trainer import ShardedTrainer, _rendezvous_store
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
# the weight of a whole turn is a product that magnifies how the bf16 of both drifts apart over steps; kills and whole runs have it
CONFIG = sharded_runs.CONFIG.model_copy(update={"turn_ess": None})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learned_from(path: Path) -> list[list[Sample]]:
    return batches(path, CONFIG, steps=3)


@pytest.fixture(scope="module")
def start(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start")
    PolicyTrainer(path, CONFIG).save(directory, cursor=0, keep=1)
    return directory


def on(ranks: int, config: TrainConfig = CONFIG) -> TrainConfig:
    return config.model_copy(update={"ranks": ranks})


@pytest.fixture(scope="module", params=[1, 2], ids=["micro-batches", "tokens"])
def started(path: Path, request: pytest.FixtureRequest) -> Iterator[ShardedTrainer]:
    trainer = sharded(path, on(2, CONFIG.model_copy(update={"context_ranks": request.param})))
    yield trainer
    trainer.close()


@pytest.fixture
def two(started: ShardedTrainer, start: Path) -> ShardedTrainer:
    started.resume(start)
    return started


def test_loss_and_gradient_are_those_of_one_process(
    two: ShardedTrainer, path: Path, learned_from: list[list[Sample]], tmp_path: Path
):
    one = PolicyTrainer(path, CONFIG)
    for name, trainer in (("one", one), ("two", two)):
        learned = trainer.step(learned_from[0])
        assert learned.metrics["microbatches"] >= 4
        trainer.save(tmp_path / name, cursor=1, keep=1)
    assert two.present().metrics == {}
    assert difference(gradients(tmp_path / "one"), gradients(tmp_path / "two")) < 4e-3  # bf16 rounds to 2e-3
    assert difference(masters(tmp_path / "one"), masters(tmp_path / "two")) < 1e-3
    for samples in learned_from[1:]:
        alone, together = one.step(samples).metrics, two.step(samples).metrics
        assert together["loss"] == pytest.approx(alone["loss"], rel=2e-2, abs=1e-4)


def test_the_same_ranks_give_the_same_bits(two: ShardedTrainer, start: Path, learned_from: list[list[Sample]]):
    runs = []
    for _ in range(2):
        two.resume(start)
        metrics = [two.step(samples).metrics for samples in learned_from]
        runs.append((two.weights(), [each["loss"] for each in metrics], [each["grad_norm"] for each in metrics]))
    assert equal(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]


def test_a_step_cancelled_between_micro_batches_leaves_no_trace(two: ShardedTrainer, learned_from: list[list[Sample]]):
    before = two.weights()
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    with pytest.raises(Cancelled):
        two.step(learned_from[0], None, stop)
    assert two.step_count == 0
    assert equal(before, two.weights())
    two.step(learned_from[0])
    assert not equal(before, two.weights())


def test_a_batch_that_says_nothing_is_refused_by_all(two: ShardedTrainer, learned_from: list[list[Sample]]):
    flat = [replace(sample, advantages=(0.0,) * len(sample.advantages)) for sample in learned_from[0]]
    with pytest.raises(NoSignal):
        two.step(flat)
    two.skip_step()
    assert two.step(learned_from[1]).step == 2


def test_references_are_dealt_out_and_one_that_cannot_be_fetched_is_an_error_of_all(
    two: ShardedTrainer, path: Path, learned_from: list[list[Sample]], tmp_path: Path
):
    others = weights_of(load_model(tiny_model(tmp_path / "other", seed=3), torch.bfloat16))
    far = PolicyVersion(number=0, hash="f" * 64)

    def away(policy: PolicyVersion) -> dict:
        raise Unavailable(f"no store for {policy}")

    with pytest.raises(Unavailable, match="no store"):
        two.step(learned_from[0], References(release=far, fetch=away))
    one = PolicyTrainer(path, CONFIG)
    references = References(release=far, fetch=lambda policy: others)
    alone, together = (trainer.step(learned_from[0], references).metrics for trainer in (one, two))
    assert together["kl_k1"] == alone["kl_k1"]
    assert together["kl_k1"] != 0
    assert together["loss"] == alone["loss"]
    two.go_back(others, 0)
    assert equal(two.weights(), others)


def test_where_the_ranks_meet_only_this_machine_can_ask():
    store = _rendezvous_store(2)
    listening = [each for each in psutil.Process().net_connections("tcp") if each.laddr.port == store.port]
    assert {each.laddr.ip for each in listening if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
