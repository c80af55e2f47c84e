"""Ranks that are killed, checkpoints that change hands, and every number of ranks against one process. The ranks are real processes."""

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.e2e.sharded_runs import CONFIG, batches, difference, episodes, equal, gradients, masters

from ostinato.core.errors import BadConfig, BadWeights, Unavailable
from ostinato.core.samples import Sample
from ostinato.testing.tiny import tiny_model
from ostinato.train import checkpoint
from ostinato.train.config import TrainConfig
from ostinato.train.sharding.trainer import ShardedTrainer
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learned_from(path: Path) -> list[list[Sample]]:
    return batches(path, CONFIG, steps=4)


def on(ranks: int, config: TrainConfig = CONFIG, *, context_ranks: int = 1) -> TrainConfig:
    return config.model_copy(update={"ranks": ranks, "context_ranks": context_ranks})


@pytest.mark.examination
@pytest.mark.parametrize("context_ranks", [1, 2])
def test_a_rank_killed_in_mid_step_ends_all_and_the_last_checkpoint_goes_on_to_the_same_bits(
    path: Path, learned_from: list[list[Sample]], tmp_path: Path, context_ranks: int
):
    trainer = ShardedTrainer(path, on(2, context_ranks=context_ranks))
    for samples in learned_from[:2]:
        trainer.step(samples)
        trainer.save(tmp_path, cursor=0, keep=2)
    trainer.step(learned_from[2])
    expected = trainer.weights()
    assert trainer.resume(tmp_path)
    victim, asked = trainer.others[0], 0

    def kill_at_the_third_micro_batch() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            os.kill(victim.pid, signal.SIGKILL)
        return False

    with pytest.raises(Unavailable, match="a rank of the trainer is lost"):
        trainer.step(learned_from[2], None, kill_at_the_third_micro_batch)
    assert asked >= 3
    trainer.close()
    assert victim.poll() == -signal.SIGKILL
    again = ShardedTrainer(path, on(2, context_ranks=context_ranks))
    assert again.resume(tmp_path)
    assert again.step_count == 2
    again.step(learned_from[2])
    assert equal(again.weights(), expected)
    again.others[0].kill()
    again.others[0].wait()
    with pytest.raises(Unavailable, match="a rank of the trainer is lost"):
        again.save(tmp_path, cursor=0, keep=2)
    again.close()
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found.step == 2


@pytest.mark.examination
def test_a_rank_that_cannot_start_is_told(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((Unavailable, BadConfig, BadWeights)):
        ShardedTrainer(tmp_path, on(2))


@pytest.mark.examination
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize(("ranks", "context_ranks"), [(2, 1), (4, 1), (4, 2), (4, 4)])
def test_loss_gradient_and_bits_at_every_number_of_ranks(
    path: Path, learned_from: list[list[Sample]], tmp_path: Path, ranks: int, context_ranks: int, compute: str
):
    config = CONFIG.model_copy(update={"compute": compute})
    if context_ranks > 1:
        learned_from = episodes(path, config, steps=2)
    one = PolicyTrainer(path, config)
    first = one.step(learned_from[0])
    one.save(tmp_path / "one", cursor=0, keep=1)
    ended = []
    for run in range(2):
        trainer = ShardedTrainer(path, on(ranks, config, context_ranks=context_ranks))
        learned = trainer.step(learned_from[0])
        assert learned.metrics["loss"] == first.metrics["loss"]
        trainer.save(tmp_path / f"run{run}", cursor=0, keep=1)
        for samples in learned_from[1:]:
            trainer.step(samples)
        ended.append(trainer.weights())
        trainer.close()
    assert equal(*ended)
    found = difference(gradients(tmp_path / "one"), gradients(tmp_path / "run0"))
    assert found < (4e-3 if compute == "bf16" else 2e-6)


@pytest.mark.examination
@pytest.mark.parametrize("settings", [((2, 1), (4, 1), (1, 1)), ((2, 2), (2, 1), (4, 2), (1, 1))])
def test_a_checkpoint_goes_on_over_any_number_of_ranks(
    path: Path, learned_from: list[list[Sample]], tmp_path: Path, settings: tuple[tuple[int, int], ...]
):
    before = None
    for number, (ranks, context_ranks) in enumerate(settings):
        config = on(ranks, context_ranks=context_ranks)
        trainer = ShardedTrainer(path, config) if ranks > 1 else PolicyTrainer(path, CONFIG)
        assert trainer.resume(tmp_path) is (number > 0)
        assert trainer.step_count == number
        if before is not None:
            assert equal(trainer.weights(), before)
        trainer.step(learned_from[number])
        before = trainer.weights()
        trainer.save(tmp_path, cursor=number, keep=1)
        if isinstance(trainer, ShardedTrainer):
            trainer.close()
    held = masters(tmp_path)
    alone = PolicyTrainer(path, CONFIG)
    for samples in learned_from[: len(settings)]:
        alone.step(samples)
    alone.save(tmp_path / "alone", cursor=0, keep=1)
    assert difference(masters(tmp_path / "alone"), held) < 1e-2
