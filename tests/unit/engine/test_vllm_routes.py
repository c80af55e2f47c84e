"""The experts that vLLM's tokens went to: kept as the trainer replays them, or not at all."""

import base64
import json
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fakes.vllm_engine import vllm_engine
from tests.fakes.vllm_tokens import TokenVllm, npy

from ostinato.core import routes
from ostinato.core.errors import BadRoutes
from ostinato.core.generation import Generate
from ostinato.core.records import Finish, PolicyVersion, Sampling
from ostinato.core.weights import Snapshot, WeightArray
from ostinato.engine.vllm.server import WireChoice
from ostinato.model.checkpoint_validation import expert_count
from ostinato.testing.tiny import tiny_model, tiny_moe

EXPERTS, LAYERS, TOP = 8, 3, 2
PROMPT = b"some prompt"
VERSION = Snapshot(
    policy=PolicyVersion(number=1, hash="hash1"), weights={"w": WeightArray("F32", (4,), np.zeros(16, np.uint8))}
)


def drawn(index, tokens, layers=LAYERS):
    draw = np.random.default_rng(1000 * index + tokens)
    return draw.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (tokens, layers, 1)), axis=2)[..., :TOP]


def routed(script="an answer", told=drawn):
    fake = TokenVllm(script)
    fake.routes = told
    return fake


async def asked(fake, *, experts=EXPERTS, prompt=PROMPT, n=1, **sampling):
    sampling = Sampling(**({"max_tokens": 5} | sampling))
    async with vllm_engine(fake, experts=experts) as engine:
        await engine.load("live", VERSION)
        request = Generate(id="r", slot="live", prompt_ids=tuple(prompt), n=n, cache_salt="", sampling=sampling)
        return [chunk async for chunk in engine.generate(request)]


async def test_the_last_chunk_of_each_sample_has_the_experts_of_all_computed_tokens():
    chunks = await asked(routed(), n=2)
    assert [chunk.routes for chunk in chunks if chunk.finish is None] == [b""] * 8
    for chunk in chunks:
        if chunk.finish is not None:
            computed = len(PROMPT) + 5 - 1
            found = routes.decode(chunk.routes, experts=EXPERTS, layers=LAYERS, top_k=TOP, tokens=computed)
            assert np.array_equal(found, np.sort(drawn(chunk.index, computed), axis=-1))


async def test_an_answer_of_unknown_weights_has_no_routes():
    fake = routed()
    fake.lie = "another version"
    last = (await asked(fake))[-1]
    assert (last.finish, last.routes) == (Finish.ERROR, b"")


async def test_a_dense_model_has_none():
    assert (await asked(routed(), experts=0))[-1].routes == b""


async def test_the_routes_of_a_long_prompt_fit_into_one_event():
    layers, prompt = 4000, PROMPT * 40  # a line of 4.7 MB
    fake = routed(told=lambda index, tokens: drawn(index, tokens, layers))
    last = (await asked(fake, prompt=prompt, max_tokens=1))[-1]
    assert routes.decode(last.routes).shape == (len(prompt), layers, TOP)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("?", "not understood"),
        (base64.b64encode(b"no file").decode(), "not understood"),
        (npy(np.zeros((15, LAYERS, TOP), np.float32)), "not understood"),
        (npy(np.zeros((15, LAYERS, TOP), np.uint8)), "all zero"),
        (npy(drawn(0, 15) + EXPERTS), "does not exist"),
        (npy(drawn(0, 15)[0]), r"\[tokens, layers, top_k\]"),
        (npy(np.asfortranarray(drawn(0, 15))), "not understood"),
    ],
)
async def test_what_cannot_be_replayed_is_not_kept_and_the_answer_is_served(told, said, caplog):
    last = (await asked(routed(told=lambda index, tokens: told)))[-1]
    assert (last.finish, last.routes) == (Finish.LENGTH, b"")
    assert re.search(f"the routes of an answer are not kept: .*{said}", caplog.text)


async def test_a_server_that_does_not_say_is_told_of_at_the_start(caplog):
    await asked(TokenVllm("an answer"))
    assert "--enable-return-routed-experts" in caplog.text
    assert "train.router_replay" in caplog.text
    caplog.clear()
    await asked(routed())
    await asked(TokenVllm("an answer"), experts=0)
    assert "--enable-return-routed-experts" not in caplog.text


@given(st.binary(max_size=300))
@example(bytes(37) + b"[")  # no Python at all, and an open bracket
@example(b"(" * 300)
def test_no_bytes_raise_anything_else_or_take_memory(data):
    head = npy(drawn(0, 2))[:120]
    for text in (base64.b64encode(data).decode(), head + base64.b64encode(data).decode()):
        choice = WireChoice.model_validate({"index": 0, "routed_experts": text})
        try:
            choice.keep_routes(EXPERTS)
        except BadRoutes:
            continue
        assert routes.decode(choice.routes, experts=EXPERTS).ndim == 3


def test_a_file_that_claims_more_than_it_holds_is_refused_before_memory_is_taken():
    raw = base64.b64decode(npy(drawn(0, 2)))
    claimed = raw.replace(b"(2, 3, 2)", b"(2000000000000, 3, 2)").replace(b" " * 12 + b"\n", b"\n")
    assert len(claimed) == len(raw)
    with pytest.raises(BadRoutes, match="12 bytes for"):
        WireChoice(index=0, routed_experts=base64.b64encode(claimed).decode()).keep_routes(EXPERTS)


def test_the_number_of_experts_is_read_from_the_models_configuration(tmp_path):
    assert expert_count(tiny_model(tmp_path / "dense")) == 0
    for kind in ("qwen3_moe", "mixtral"):
        path = tiny_moe(tmp_path / kind, kind)
        config = json.loads((path / "config.json").read_text())
        assert expert_count(path) == (config.get("num_experts") or config["num_local_experts"]) > 0
