"""Two processes that compute each micro-batch together against one: long episodes, branched and not. The ranks are real processes."""

from pathlib import Path

import pytest
import torch
from tests.e2e.sharded_runs import CONFIG, difference, episodes, equal, gradients, sharded

from ostinato.testing.tiny import SUPPORTED, tiny_model, tiny_of
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)


def together(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"ranks": 2, "context_ranks": 2})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("compute", "recompute_tokens", "bound"),
    [("bf16", 2048, 4e-3), ("fp32", 0, 2e-6), pytest.param("fp32", 2048, 2e-6, marks=pytest.mark.examination)],
)
def test_long_episodes_teach_what_they_teach_one_process(
    path: Path, tmp_path: Path, compute: str, recompute_tokens: int, bound: float
):
    config = CONFIG.model_copy(update={"compute": compute, "recompute_tokens": recompute_tokens})
    learned_from = episodes(path, config, steps=2)
    one, two = PolicyTrainer(path, config), sharded(path, together(config))
    try:
        ended = []
        two.save(tmp_path / "start", cursor=0, keep=1)
        for _ in range(2):
            assert two.resume(tmp_path / "start")
            learned = two.step(learned_from[0])
            two.save(tmp_path / "two", cursor=1, keep=1)
            two.step(learned_from[1])
            ended.append(two.weights())
        alone = one.step(learned_from[0])
        one.save(tmp_path / "one", cursor=1, keep=1)
        assert alone.metrics["tokens_saved"] > alone.metrics["tokens"] > 300
        assert alone.metrics["largest_microbatch"] > 300  # the branched episode in one piece
        same = ("loss", "microbatches", "drift_k3", "ess", "tokens")
        assert {name: learned.metrics[name] for name in same} == {name: alone.metrics[name] for name in same}
        assert difference(gradients(tmp_path / "one"), gradients(tmp_path / "two")) < bound
        assert equal(*ended)
    finally:
        two.close()


@pytest.mark.examination
@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_layers_that_see_a_window_learn_alike(tmp_path: Path, architecture: str):
    path = tiny_of(tmp_path / "model", SUPPORTED[architecture]())
    config = CONFIG.model_copy(update={"compute": "fp32"})
    learned_from = episodes(path, config, steps=1)
    for name, trainer in (
        ("one", PolicyTrainer(path, config)),
        ("two", sharded(path, together(config))),
    ):
        trainer.step(learned_from[0])
        trainer.save(tmp_path / name, cursor=1, keep=1)
        trainer.close()
    assert difference(gradients(tmp_path / "one"), gradients(tmp_path / "two")) < 2e-6
