"""Both kinds of master weights behave alike: whole in this process, and sharded by FSDP2 (here over one rank, so that they are comparable).

What several ranks add, rows and traffic, is tested with real processes in e2e.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.grids import covering

from ostinato.core.errors import BadConfig, BadWeights
from ostinato.core.records import PolicyVersion
from ostinato.core.samples import Sample
from ostinato.model.load import load_model, weights_of
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import SUPPORTED, tiny_model, tiny_of
from ostinato.train import checkpoint
from ostinato.train.config import TrainConfig
from ostinato.train.references import References
from ostinato.train.sharding.group import RankGroup
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.version.content import hash_chunks, part_of

torch.set_num_threads(1)
KINDS = ["whole", "divided"]
DTYPES = [("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    joined = RankGroup.join(
        rank=0, count=1, store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    )
    yield joined
    joined.close()


def a_trainer(kind: str, path: Path, group: RankGroup, **settings: object) -> PolicyTrainer:
    config = TrainConfig(
        compute="bf16", learning_rate=1e-3, warmup_steps=0, microbatch_tokens=24, kl_beta=0.01
    ).model_copy(update=settings)
    return PolicyTrainer(path, config, None, group if kind == "divided" else None)


def samples(path: Path, compute: str) -> list[Sample]:
    draw = np.random.default_rng(0)
    turns = [
        a_turn(f"{i}:0", prompt=draw.integers(0, 256, 3 + i).tolist(), sampled=draw.integers(0, 256, 5).tolist())
        for i in range(6)
    ]
    scored = PolicyTrainer(path, TrainConfig(compute=compute)).score(turns)
    return [
        Sample(turn=replace(turn, logprobs=own), reward=1.0, advantages=(1.0 if i % 2 else -0.6,) * 5)
        for i, (turn, own) in enumerate(zip(turns, scored, strict=True))
    ]


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """The norm of the difference, relative to the norm."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(one))


def gradient(trainer: PolicyTrainer) -> np.ndarray:
    """The first step's gradient, clipped and multiplied by 1 - beta1."""
    moments = trainer.state().moments
    if "exp_avg" in moments:
        return np.array(moments["exp_avg"])
    return np.concatenate([moments[f"exp_avg/{name}"].reshape(-1) for name in trainer.state().weights])


@pytest.mark.parametrize(("compute", "publish", "recompute_tokens"), covering(DTYPES, [0, 10_000]))
def test_a_step_is_the_same(path: Path, group: RankGroup, compute: str, publish: str, recompute_tokens: int):
    given = samples(path, compute)
    settings = {"compute": compute, "publish": publish, "recompute_tokens": recompute_tokens}
    whole, divided = (a_trainer(kind, path, group, **settings) for kind in KINDS)
    start = whole.weights()
    assert all(np.array_equal(start[k].data, v.data) for k, v in divided.weights().items())
    one, other = whole.step(given), divided.step(given)
    assert one.metrics["loss"] == other.metrics["loss"]  # the forward pass is the same, bit for bit
    tolerance = 1e-6 if compute == "fp32" else 4e-3
    assert apart(gradient(whole), gradient(divided)) < tolerance
    assert other.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=10 * tolerance)  # one sums in fp32
    assert not all(np.array_equal(start[k].data, v.data) for k, v in divided.weights().items())
    alone, part = part_of(one.weights), part_of(other.weights)
    assert alone.forms == part.forms
    assert alone.chunks.keys() == part.chunks.keys()
    assert hash_chunks(part) == hash_chunks(part_of(divided.weights()))


def test_what_a_token_learns_at_many_places_is_added_up_in_full(path: Path, group: RankGroup):
    """In bf16 a sum stops growing once it is 256 times the summand."""
    turns = [a_turn(f"{i}:0", prompt=[5, 6, 7] * 90, sampled=[7, 5, 6, 8]) for i in range(3)]
    given = [Sample(turn=turn, reward=1.0, advantages=(1.0,) * 4) for turn in turns]
    settings = {"microbatch_tokens": 1024, "max_k3": 1e6, "mean_weight": 1e6, "kl_beta": 0.0, "importance_cap": 1e6}
    whole, divided = (a_trainer(kind, path, group, **settings) for kind in KINDS)
    whole.step(given)
    divided.step(given)
    assert apart(gradient(whole), gradient(divided)) < 2e-3


DENSE = [
    "llama",
    "llama-tied-bias",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "gemma3",
    "mistral",
    "ministral3",
    "gpt2",
    "granite",
]


@pytest.mark.parametrize("architecture", DENSE)
def test_every_dense_architecture_learns_alike(tmp_path: Path, group: RankGroup, architecture: str):
    path = tiny_of(tmp_path / "model", SUPPORTED[architecture]())
    given = samples(path, "bf16")
    whole, divided = (a_trainer(kind, path, group) for kind in KINDS)
    assert whole.step(given).metrics["loss"] == divided.step(given).metrics["loss"]
    assert apart(gradient(whole), gradient(divided)) < 4e-3


@pytest.mark.parametrize("architecture", sorted(SUPPORTED.keys() - set(DENSE)))
def test_a_mixture_of_experts_is_refused_by_name(tmp_path: Path, group: RankGroup, architecture: str):
    path = tiny_of(tmp_path / "model", SUPPORTED[architecture]())
    with pytest.raises(BadConfig, match="train it on one rank"):
        a_trainer("divided", path, group)


@pytest.mark.parametrize(("compute", "publish", "kind"), covering(DTYPES, KINDS))
def test_other_weights_stand_in_the_model_and_leave_no_trace(
    path: Path, group: RankGroup, tmp_path: Path, kind: str, compute: str, publish: str
):
    dtype = torch.bfloat16 if publish == "bf16" else torch.float32
    others = weights_of(load_model(tiny_model(tmp_path / "other", seed=5), dtype))
    given = samples(path, compute)
    alone, held = (a_trainer(kind, path, group, compute=compute, publish=publish, kl_beta=0.0) for _ in range(2))
    asked: list[PolicyVersion] = []

    def fetch(policy: PolicyVersion) -> dict:
        asked.append(policy)
        return dict(others)

    far = PolicyVersion(number=3, hash="far")
    references = References(anchor=far, fetch=fetch)
    held.config = held.config.model_copy(update={"anchor_limit": 100.0, "anchor_beta": 0.0})
    one, other = alone.step(given), held.step(given, references)
    assert asked == [far]
    assert other.metrics["anchor_kl"] > 0.1
    assert hash_chunks(part_of(one.weights)) == hash_chunks(part_of(other.weights))


@pytest.mark.parametrize(("compute", "publish", "kind"), covering(DTYPES, KINDS))
def test_going_back_makes_a_release_the_masters(
    path: Path, group: RankGroup, tmp_path: Path, kind: str, compute: str, publish: str
):
    dtype = torch.bfloat16 if publish == "bf16" else torch.float32
    others = weights_of(load_model(tiny_model(tmp_path / "other", seed=5), dtype))
    trainer = a_trainer(kind, path, group, compute=compute, publish=publish)
    trainer.step(samples(path, compute))
    trainer.go_back(others, 3)
    assert all(np.array_equal(others[k].data, v.data) for k, v in trainer.weights().items())
    assert not gradient(trainer).any()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_another_model_are_refused_and_nothing_is_changed(path: Path, group: RankGroup, kind: str):
    trainer = a_trainer(kind, path, group)
    before = {name: bytes(array.data) for name, array in trainer.weights().items()}
    wrong = dict(list(trainer.weights().items())[1:])
    with pytest.raises(BadWeights):
        trainer.go_back(wrong)
    assert {name: bytes(array.data) for name, array in trainer.weights().items()} == before


@pytest.mark.parametrize(("writer", "reader"), [("whole", "divided"), ("divided", "whole"), ("divided", "divided")])
def test_each_reads_what_the_other_wrote(path: Path, group: RankGroup, tmp_path: Path, writer: str, reader: str):
    given = samples(path, "bf16")
    first, second = a_trainer(writer, path, group), a_trainer(reader, path, group)
    first.step(given)
    first.save(tmp_path / "checkpoints", cursor=7, keep=2)
    assert second.resume(tmp_path / "checkpoints")
    assert second.step_count == 1
    written, read = first.weights(), second.weights()
    assert all(np.array_equal(written[k].data, v.data) for k, v in read.items())
    assert np.array_equal(gradient(first), gradient(second))
    one, other = first.step(given), second.step(given)
    assert apart(*(np.array(t.metrics["grad_norm"]).reshape(1) for t in (one, other))) < 4e-3
    found = checkpoint.load(tmp_path / "checkpoints")
    assert found is not None
    assert found.cursor == 7


@pytest.mark.parametrize("architecture", ["llama", "llama-tied-bias"])
def test_a_matrix_decays_and_a_norm_does_not(tmp_path: Path, group: RankGroup, architecture: str):
    path = tiny_of(tmp_path / "model", SUPPORTED[architecture]())
    given = samples(path, "fp32")
    moved: dict[str, dict[str, np.ndarray]] = {}
    for kind in KINDS:
        settings = {"compute": "fp32", "publish": "fp32", "weight_decay": 0.5, "learning_rate": 0.01}
        trainer = a_trainer(kind, path, group, **settings)
        trainer.step(given)
        moved[kind] = {name: np.array(array) for name, array in trainer.state().weights.items()}
    for name, whole in moved["whole"].items():
        np.testing.assert_allclose(moved["divided"][name], whole, atol=2e-3, err_msg=name)
    assert {array.ndim for array in moved["whole"].values()} == {1, 2}
