"""A trainer over several ranks by torch's kernels: two processes on the CPU, or, for a run on GPUs, one process for each GPU."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.devices import TORCH
from tests.e2e.sharded_runs import batches, difference, equal, gradients, masters, sharded

from ostinato.core.errors import BadWeights, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.samples import Sample
from ostinato.model.load import load_model, weights_of
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.references import References
from ostinato.train.sharding.trainer import ShardedTrainer
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
RANKS = 2 if TORCH.device == "cpu" else torch.cuda.device_count()
FP32 = TrainConfig(
    compute="fp32", publish="fp32", learning_rate=1e-3, warmup_steps=0, microbatch_tokens=64, turn_tokens=8
)
BF16 = FP32.model_copy(update={"compute": "bf16", "publish": "bf16"})


@pytest.fixture(scope="module", params=[FP32, BF16], ids=["fp32", "bf16"])
def config(request: pytest.FixtureRequest) -> TrainConfig:
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learned_from(path: Path, config: TrainConfig) -> list[list[Sample]]:
    return batches(path, config, steps=2)


@pytest.fixture(scope="module")
def start(path: Path, config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start")
    PolicyTrainer(path, config, backend=TORCH).save(directory, cursor=0, keep=1)
    return directory


@pytest.fixture(scope="module")
def started(path: Path, config: TrainConfig) -> Iterator[ShardedTrainer]:
    trainer = sharded(path, config.model_copy(update={"ranks": RANKS}), backend=TORCH)
    yield trainer
    trainer.close()


@pytest.fixture
def ranks(started: ShardedTrainer, start: Path) -> ShardedTrainer:
    assert started.resume(start)
    return started


def test_a_step_is_that_of_one_process(
    ranks: ShardedTrainer, path: Path, config: TrainConfig, learned_from: list[list[Sample]], tmp_path: Path
):
    one = PolicyTrainer(path, config, backend=TORCH)
    found = []
    for name, trainer in (("one", one), ("ranks", ranks)):
        found.append(trainer.step(learned_from[0]))
        trainer.save(tmp_path / name, cursor=1, keep=1)
    alone, together = (learned.metrics for learned in found)
    assert together["microbatches"] >= 4
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-3, abs=1e-6)
    within = 1e-4 if config is FP32 else 4e-3  # bf16 rounds to 2e-3
    assert difference(gradients(tmp_path / "one"), gradients(tmp_path / "ranks")) < within
    assert difference(masters(tmp_path / "one"), masters(tmp_path / "ranks")) < 1e-3
    assert one.resume(tmp_path / "ranks"), "a checkpoint of any number of ranks is one process's too"
    assert equal(one.weights(), ranks.weights())


def test_the_same_ranks_give_the_same_bits(ranks: ShardedTrainer, start: Path, learned_from: list[list[Sample]]):
    ends = []
    for _ in range(2):
        ranks.resume(start)
        losses = [ranks.step(samples).metrics["loss"] for samples in learned_from]
        ends.append((losses, ranks.weights()))
    assert ends[0][0] == ends[1][0]
    assert equal(ends[0][1], ends[1][1])


def test_references_are_put_in_and_taken_out_again(
    ranks: ShardedTrainer, path: Path, config: TrainConfig, learned_from: list[list[Sample]], tmp_path: Path
):
    dtype = torch.float32 if config is FP32 else torch.bfloat16
    others = weights_of(load_model(tiny_model(tmp_path / "other", seed=3), dtype))
    far, before = PolicyVersion(number=0, hash="f" * 64), ranks.weights()

    def away(policy: PolicyVersion) -> dict:
        raise Unavailable(f"no store for {policy}")

    with pytest.raises(Unavailable, match="no store"):
        ranks.step(learned_from[0], References(release=far, fetch=away))
    with pytest.raises(BadWeights):
        ranks.step(learned_from[0], References(release=far, fetch=lambda policy: {}))
    assert equal(ranks.weights(), before)
    references = References(release=far, fetch=lambda policy: others)
    one = PolicyTrainer(path, config, backend=TORCH)
    alone, together = (trainer.step(learned_from[0], references).metrics for trainer in (one, ranks))
    assert together["kl_k1"] == pytest.approx(alone["kl_k1"], rel=1e-3)
    assert together["kl_k1"] != 0
    moved = ranks.weights()
    assert any(not np.array_equal(moved[name].data, before[name].data) for name in before)
    ranks.go_back(others, 0)
    assert equal(ranks.weights(), others)
