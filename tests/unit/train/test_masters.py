"""The masters: what decays, and in which dtype each tensor is published."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Glm4MoeConfig

from ostinato.model.load import build, load_model, weights_of
from ostinato.testing.records import a_sample, a_turn
from ostinato.testing.tiny import SUPPORTED, tiny_of
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
CONFIG = TrainConfig(compute="fp32", publish="fp32", learning_rate=0.01, warmup_steps=0)


def test_matrices_decay_and_norms_and_biases_do_not(tmp_path: Path):
    path = tiny_of(tmp_path / "model", SUPPORTED["llama-tied-bias"]())
    plain, decaying = (
        PolicyTrainer(path, CONFIG.model_copy(update={"weight_decay": decay}))._masters for decay in (0.0, 0.1)
    )
    start = {name: view.clone() for name, view in plain.weights.items()}
    draw = torch.Generator().manual_seed(0)
    gradient = torch.randn(len(plain.grads), generator=draw)
    for masters in (plain, decaying):
        masters.grads.copy_(gradient)
        masters.update(learning_rate=0.01, scale=1.0)
    kinds = {view.dim() for view in start.values()}
    assert kinds == {1, 2}
    for name, view in start.items():
        expected = -0.01 * 0.1 * view if view.dim() > 1 else torch.zeros_like(view)
        torch.testing.assert_close(
            decaying.weights[name] - plain.weights[name], expected, atol=1e-7, rtol=1e-4, msg=name
        )


def test_decay_is_adamws(tmp_path: Path):
    path = tiny_of(tmp_path / "model", SUPPORTED["llama"]())
    masters = PolicyTrainer(path, CONFIG.model_copy(update={"weight_decay": 0.1}))._masters
    name, view = next((name, view) for name, view in masters.weights.items() if view.dim() == 2)
    theirs = torch.nn.Parameter(view.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for seed in range(3):
        masters.grads.copy_(torch.randn(len(masters.grads), generator=torch.Generator().manual_seed(seed)))
        theirs.grad = masters.sums[name].clone()
        masters.update(learning_rate=0.01, scale=1.0)
        optimizer.step()
    torch.testing.assert_close(view, theirs.detach(), atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts whose router's correction the library keeps in fp32 in a bf16 model."""
    config = Glm4MoeConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_shared_experts=1,
        max_position_embeddings=128,
    )
    return tiny_of(tmp_path_factory.mktemp("model") / "glm", config)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_what_the_engine_keeps_in_fp32_is_published_in_fp32(glm: Path, compute: str):
    served = weights_of(load_model(glm, torch.bfloat16))
    assert {array.dtype for array in served.values()} == {"BF16", "F32"}
    trainer = PolicyTrainer(
        glm, CONFIG.model_copy(update={"compute": compute, "publish": "bf16", "router_replay": False})
    )
    turns = [a_turn("t:0", prompt=b"def f(", sampled=b"x):\n"), a_turn("u:0", prompt=b"def g(", sampled=b"y):\n")]
    drawn = [replace(turn, logprobs=logprobs) for turn, logprobs in zip(turns, trainer.score(turns), strict=True)]
    trainer.step([a_sample(turn, 1.0 - 2.0 * i) for i, turn in enumerate(drawn)])
    published = trainer.weights()
    assert {name: array.dtype for name, array in published.items()} == {
        name: array.dtype for name, array in served.items()
    }
    model = build(glm)(published)  # as the engine loads it: any other dtype is refused
    correction = next(name for name in published if name.endswith("e_score_correction_bias"))
    kept = model.state_dict()[correction]
    assert kept.dtype == torch.float32
    assert np.array_equal(kept.numpy(), served[correction].data.view(np.float32))


def test_a_master_of_an_fp32_tensor_is_not_rounded_to_bf16(glm: Path):
    """A parameter that the served model keeps in fp32: the compute model, which gradients are taken at, holds it as it is."""
    trainer = PolicyTrainer(glm, CONFIG.model_copy(update={"publish": "bf16", "router_replay": False}))
    masters, name = trainer._masters, "model.norm.weight"
    masters._served = {**masters._served, name: torch.float32}
    with torch.no_grad():
        masters.weights[name].fill_(1 + 2**-20)
    masters.round_into_model()
    assert trainer._policy.model.get_parameter(name)[0].item() == 1 + 2**-20
    assert trainer.weights()[name].dtype == "F32"
