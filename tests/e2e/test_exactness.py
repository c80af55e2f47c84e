"""Engine and trainer are one function, to the bit, whatever happens to a request; and the checks that say so can fail.

`tests/examinations/exactness/run.py` is the same examination on a real model and at length.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.examinations.exactness.measures import Examination, Subject, gap, rescore, with_credit
from tests.examinations.exactness.traffic import LARGE, SMALL, Harvest, Traffic, ask, drive, running
from transformers import GraniteConfig

from ostinato.core import routes as codec
from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.core.weights import Snapshot
from ostinato.engine.embedded.sampler import Draw, draw
from ostinato.model import routing
from ostinato.model.attention import CausalAttend, hidden
from ostinato.model.linear import Linear
from ostinato.model.load import build, load_model, weights_of
from ostinato.model.paged import WholeAttend
from ostinato.testing.tiny import tiny_model, tiny_moe, tiny_of
from ostinato.train.trainer import PolicyTrainer


def tiny_granite(path):
    """A model that divides its logits."""
    sizes = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "pad_token_id": 259,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    return tiny_of(path, GraniteConfig(**sizes, **heads, max_position_embeddings=512, logits_scaling=3.0))


MODELS = {
    "llama": tiny_model,
    "qwen3_moe": tiny_moe,
    "olmoe": lambda path, **more: tiny_moe(path, "olmoe", **more),
    "granite": tiny_granite,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
V0 = PolicyVersion(number=0, hash="0" * 64)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def subject(tmp_path):
    """Makes a tiny model's subject."""

    def make(model="llama", dtype="fp32", **size):
        path = MODELS[model](tmp_path / model, **size)
        return Subject(
            path=path,
            dtype=DTYPES[dtype],
            tokens=400,
            clients=9,
            work=tmp_path / "run",
            learning_rate=1e-3,
        )

    return make


def weights(subject):
    return weights_of(load_model(subject.path, subject.dtype))


async def sampled(subject, *, tokens=250, clients=3, config=LARGE):
    """Turns of the weights in the subject's directory."""
    async with running(subject.path, config, Snapshot(policy=V0, weights=weights(subject)), subject.contract) as engine:
        return (await drive(engine, Traffic(tokens=tokens, clients=clients))).turns


def module(subject):
    return build(subject.path)(weights(subject))


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("qwen3_moe", "bf16"),  # routers, and the narrow dtype
        ("granite", "fp32"),  # Llama's layers, logits that are divided, and the wide dtype
        pytest.param("granite", "bf16", marks=pytest.mark.examination),
        pytest.param("llama", "fp32", marks=pytest.mark.examination),
        pytest.param("llama", "bf16", marks=pytest.mark.examination),
        pytest.param("qwen3_moe", "fp32", marks=pytest.mark.examination),
        pytest.param("olmoe", "bf16", marks=pytest.mark.examination),
    ],
)
async def test_no_bit_and_no_route_differs(subject, model, dtype):
    findings = await Examination(subject(model, dtype)).run()
    assert findings.prefix_hits > 1000
    assert findings.preemptions > 0
    assert findings.cancelled > 0
    wrong = {
        name: found
        for name, found in findings.stages.items()
        if "control" not in name and (found["differing"] or found.get("flips") or found.get("weights_differing"))
    }
    assert wrong == {}
    stages = findings.stages
    assert min(found["tokens"] for found in stages.values()) > 50
    assert stages["step"]["tokens"] == stages["micro"]["tokens"] == stages["recompute"]["tokens"] >= 400
    assert stages["swap"]["spans"] > stages["swap"]["turns"]  # streams met swaps
    assert stages["moved (control)"]["differing"] > 0.9 * stages["moved (control)"]["tokens"]
    assert stages["kept (control)"]["differing"] > 0  # what stood in the cache at a swap was of the old weights
    if "moe" in model:
        for name in ("alone", "padded", "step", "micro", "recompute", "after publish, padded"):
            assert stages[name]["routed"] > 500, name


async def test_a_sample_that_is_ended_early_has_the_routes_of_its_tokens(subject):
    given = subject("qwen3_moe")
    request = Generate(
        id="r",
        slot="live",
        prompt_ids=tuple(range(3, 40)),
        n=2,
        sampling=Sampling(max_tokens=30, seed=7, logit_bias=((258, -100.0),)),
    )
    snapshot = Snapshot(policy=V0, weights=weights(given))
    async with running(given.path, LARGE, snapshot, given.contract) as engine:
        whole = [chunk async for chunk in engine.generate(request)]
        (last,) = [chunk for chunk in whole if chunk.index == 1 and chunk.finish]
        stream, taken = engine.generate(request), list[int]()
        while len(taken) < 5:
            chunk = await anext(stream)
            taken += chunk.ids if chunk.index == 1 else ()
        ended = await engine.end_sample("r", 1, len(taken))
        rest = [chunk async for chunk in stream if chunk.index == 0 or chunk.finish]
        await stream.aclose()
    assert codec.decode(ended).shape[0] == len(request.prompt_ids) + 5 - 1
    np.testing.assert_array_equal(codec.decode(ended), codec.decode(last.routes)[: len(codec.decode(ended))])
    assert {chunk.index for chunk in rest} == {0}, "nothing follows of the sample that was ended"


async def test_two_threads_keep_the_promise_too(subject):
    given = replace(subject("llama", "bf16"), threads=2, tokens=200)
    turns = await sampled(given, config=LARGE.model_copy(update={"threads": 2}))
    torch.set_num_threads(2)
    trainer = PolicyTrainer(given.path, given.train(), given.contract)
    assert gap(turns, trainer.score(turns)).differing == 0
    assert trainer.step(with_credit(turns)).metrics["mismatch_differing"] == 0


async def test_weights_stored_in_bf16_are_computed_with_in_fp32_alike(subject):
    """The default on a CPU without bf16 instructions: engine and trainer widen the same stored weights."""
    given = subject("llama", "fp32")
    stored = weights_of(load_model(given.path, torch.bfloat16))
    async with running(given.path, LARGE, Snapshot(policy=V0, weights=stored), given.contract) as engine:
        turns = (await drive(engine, Traffic(tokens=150, clients=3))).turns
    trainer = PolicyTrainer(given.path, given.train(compute="fp32", publish="bf16"), given.contract)
    assert gap(turns, trainer.score(turns)).differing == 0
    learned = trainer.step(with_credit(turns))
    assert learned.metrics["mismatch_differing"] == 0
    assert {array.dtype for array in learned.weights.values()} == {"BF16"}


async def test_a_prompt_that_meets_a_swap_half_way_is_the_new_weights_own(subject):
    """Nothing was sampled yet, so the turn names one version only: no key of the old one may be under it."""
    given, other = subject(), tiny_model(subject().path.parent / "other", seed=1)
    new = Snapshot(policy=PolicyVersion(number=1, hash="1" * 64), weights=weights_of(load_model(other, torch.float32)))
    slow = LARGE.model_copy(update={"prefill_chunk": 16})
    old = Snapshot(policy=V0, weights=weights(given))
    request = Generate(id="r", slot="live", prompt_ids=tuple(range(250)), sampling=Sampling(max_tokens=8, seed=1), n=2)
    harvest = Harvest()
    async with running(given.path, slow, old, given.contract) as engine:
        asking = asyncio.create_task(ask(engine, request, None, harvest))
        while engine.stats()["prefill_tokens"] == 0:
            await asyncio.sleep(0)
        await engine.load("live", new)
        await asking
    trainer = PolicyTrainer(given.path, given.train(), given.contract)
    for snapshot in (old, new):
        trainer.go_back(snapshot.weights, snapshot.policy.number)
        mine = [turn for turn in harvest.turns if turn.spans[0].policy == snapshot.policy]
        first = gap(mine, trainer.score(mine), lambda turn: [at < turn.spans[0].tokens for at in range(8)])
        assert first.differing == 0
    assert len(harvest.turns) == 2


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name == "qwen3_moe" else pytest.mark.examination) for name in MODELS]
)
async def test_the_default_dtype_of_the_process_changes_no_bit(subject, model):
    """The library sets it while it builds a model, which an engine does on another thread during a hot swap."""
    given = subject(model, "bf16")
    logits_MV = torch.randn(9, 1003, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = [Draw(temperature=0.7, top_p=(1.0, 0.9)[i % 2], u=i / 9) for i in range(9)]
    turns, loaded, drawn = await sampled(given, tokens=100), module(given), draw(logits_MV.clone(), rows)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found, again = rescore(loaded, turns), draw(logits_MV.clone(), rows)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (gap(turns, found.scores).differing, found.flips) == (0, 0)
    assert again == drawn


# ---------------------------------------------------------------- controls: what must fail


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.examination)])
async def test_stock_attention_in_the_trainer_fails(subject, model):
    given = subject(model, "bf16", hidden=128, layers=4)
    turns = await sampled(given)
    ours = rescore(module(given), turns, attend=WholeAttend)
    stock = rescore(module(given), turns, attend=CausalAttend)
    assert (gap(turns, ours.scores).differing, ours.flips) == (0, 0)
    found = gap(turns, stock.scores)
    assert found.differing > 0.5 * found.tokens
    assert found.k3 > 1e-5
    if model != "llama":
        assert stock.flips > 0


async def differing_tokens(given):
    """Tokens of three clients that the trainer scores otherwise: the engine often decodes a row or two, which the trainer never does."""
    turns = await sampled(given, config=SMALL)
    return gap(turns, PolicyTrainer(given.path, given.train(), given.contract).score(turns)).differing


async def test_a_product_that_depends_on_the_row_count_is_seen(subject, monkeypatch):
    """Planted on any CPU: layers that give other bits where the row count is no multiple of eight."""
    honest = Linear.forward

    def odd(self, x):
        y = honest(self, x)
        return y + y.abs() * 1e-6 if x.numel() // x.shape[-1] % 8 else y

    monkeypatch.setattr("ostinato.engine.embedded.engine.prepack", lambda *_: 0)
    assert await differing_tokens(subject("llama", "fp32")) == 0
    monkeypatch.setattr(Linear, "forward", odd)
    assert await differing_tokens(subject("llama", "fp32")) > 0


# ---------------------------------------------------------------- routers: from the engine through the log's form to the trainer
# (gradients against a dense gather: tests/e2e/test_model_routing.py)


def with_noise(subject, scale=0.05):
    """The subject's weights with noise on every router's, as bytes."""
    model, source = load_model(subject.path, subject.dtype), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight += (scale * torch.randn(layer.mlp.gate.weight.shape, generator=source)).to(
                model.dtype
            )
    return weights_of(model)


def router_gradients(trainer):
    """Adam's mean of the gradient after the first step, per router."""
    state, at, found = trainer.state(), 0, {}
    for name, array in state.weights.items():
        if name.endswith("mlp.gate.weight"):
            found[name] = state.moments["exp_avg"][at : at + array.size].copy()
        at += array.size
    return found


@pytest.mark.parametrize("model", ["qwen3_moe", pytest.param("olmoe", marks=pytest.mark.examination)])
async def test_a_perturbed_router_flips_and_replay_follows_the_engine(subject, model):
    given = subject(model, "bf16")
    turns, noisy = await sampled(given), with_noise(given)
    gradients = {}
    for name, changes in {"replay": {}, "again": {"recompute_tokens": 0}, "live": {"router_replay": False}}.items():
        trainer = PolicyTrainer(given.path, given.train(**changes), given.contract)
        trainer.go_back(noisy, 5)
        metrics = trainer.step(with_credit(turns)).metrics
        assert metrics["router_refused"] == 0
        if name == "live":
            assert "router_flips" not in metrics
        else:
            assert (
                0 < metrics["router_flips"] < metrics["router_routed"]
            )  # what live routing would have chosen otherwise
            assert metrics["router_disagreements"] == 0  # turns with a common prefix were routed alike
        gradients[name] = router_gradients(trainer)
    assert all(np.abs(gradient).max() > 0 for gradient in gradients["replay"].values())
    assert all((gradients["again"][name] == gradient).all() for name, gradient in gradients["replay"].items())
    assert any((gradients["live"][name] != gradient).any() for name, gradient in gradients["replay"].items())
    live = rescore(build(given.path)(noisy), turns)
    assert live.flips > 0
    assert flips_under_replay(build(given.path)(noisy), turns) == 0


def flips_under_replay(model, turns):
    """Pairs of token and layer in which the experts in use are not those that the engine recorded."""
    flips = 0
    for turn in turns:
        ids, known = torch.tensor([*turn.prompt_ids, *turn.sampled_ids[:-1]]), codec.decode(turn.routes)
        with torch.inference_mode(), routing.of(model).replay(known) as replay:
            hidden(model, ids, torch.arange(len(ids)), WholeAttend([len(ids)]))
        flips += int((replay.ids_NLk().numpy() != known).any(-1).sum())
    return flips
