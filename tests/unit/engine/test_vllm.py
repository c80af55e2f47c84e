"""The engine over vLLM servers: which version made a token, who shares a cache, and what a failing server does to its streams."""

import asyncio
import contextlib
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.deadlines import PATIENT_S
from tests.fakes.vllm_engine import vllm_engine
from tests.fakes.vllm_tokens import TokenVllm, logprob

from ostinato.core.errors import BadConfig, BadRequest, Conflict, TooLarge, Unavailable
from ostinato.core.generation import Generate
from ostinato.core.records import Finish, PolicyVersion, Sampling
from ostinato.core.weights import Snapshot, WeightArray
from ostinato.engine.config import EngineConfig
from ostinato.engine.vllm.engine import open_vllm
from ostinato.engine.vllm.server import read_event, read_scores
from ostinato.testing.renderer import ByteRenderer

SCRIPT = "an answer of the script " * 8


def version(number):
    weights = {"w": WeightArray("F32", (4,), np.zeros(16, np.uint8))}
    return Snapshot(policy=PolicyVersion(number=number, hash=f"hash{number}"), weights=weights)


def ask(*, slot="live", salt="", n=1, tops=0, **sampling):
    return Generate(
        id="r",
        slot=slot,
        prompt_ids=tuple(b"some prompt"),
        n=n,
        cache_salt=salt,
        tops=tops,
        sampling=Sampling(**({"max_tokens": 100} | sampling)),
    )


async def collect(engine, request):
    return [chunk async for chunk in engine.generate(request)]


async def until_well(engine):
    """A server that failed is looked at before it is asked again."""
    async with asyncio.timeout(PATIENT_S):
        while engine.stats()["servers_well"] < engine.stats()["servers"]:
            await asyncio.sleep(0.002)


def runs(chunks):
    numbers = [chunk.policy.number for chunk in chunks if chunk.ids]
    return [numbers[0], *(b for a, b in pairwise(numbers) if a != b)]


async def test_a_stream_across_a_swap_names_both_versions_and_the_server_agrees():
    fake = TokenVllm(SCRIPT)
    fake.slow_s = 0.002
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        tasks = [asyncio.create_task(collect(engine, ask(n=2))) for _ in range(3)]
        while engine.stats()["steps"] < 12:
            await asyncio.sleep(0.002)
        swap = await engine.load("live", version(2))
        answers = await asyncio.gather(*tasks)
    assert (swap.streams, swap.pause_s > 0) == (6, True)
    assert [runs(chunks) for chunks in answers] == [[1, 2]] * 3
    assert all(chunk.finish in (None, Finish.LENGTH) for chunks in answers for chunk in chunks)


async def test_an_answer_whose_versions_the_server_tells_otherwise_ends_as_an_error(caplog):
    fake = TokenVllm(SCRIPT)
    fake.lie = "another version"
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        chunks = await collect(engine, ask(max_tokens=5))
    assert [chunk.finish for chunk in chunks] == [None] * 4 + [Finish.ERROR]
    assert "another version" in caplog.text


async def test_a_prefix_is_shared_within_a_salt_and_a_version_only():
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        found = []
        for salt in ("acme", "acme", "evil", ""):
            await collect(engine, ask(salt=salt, max_tokens=2))
            found.append(len(fake.cached))
        await engine.load("live", version(2))
        await collect(engine, ask(salt="acme", max_tokens=2))
        found.append(len(fake.cached))
    assert found == [0, 1, 1, 1, 1]


async def test_the_server_samples_as_asked_and_ends_where_the_renderer_says():
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        await collect(engine, ask(temperature=0.7, top_p=0.9, seed=5, max_tokens=3, n=2, stop=("zz",)))
    (body,) = fake.requests
    assert body["token_ids"] == list(b"some prompt")
    assert body["sampling_params"] == {
        "n": 2,
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 5,
        "stop": ["zz"],
        "stop_token_ids": sorted(ByteRenderer().stop_ids()),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": True,
    }


async def test_a_connection_that_breaks_ends_the_stream_as_an_error_and_the_next_one_works():
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        fake.cut_after = 6
        chunks = await collect(engine, ask(n=2))
        fake.cut_after = -1
        await until_well(engine)
        again = await collect(engine, ask(max_tokens=3))
    assert [chunk.finish for chunk in chunks if chunk.finish] == [Finish.ERROR] * 2
    assert len(chunks) > 2
    assert again[-1].finish is Finish.LENGTH


async def test_a_server_that_is_gone_is_unavailable_and_hurts_no_other():
    fakes = [TokenVllm(SCRIPT), TokenVllm(SCRIPT)]
    async with vllm_engine(*fakes) as engine:
        await engine.load("live", version(1))
        await engine.load("canary", version(2))
        engine._servers[0].url = "http://127.0.0.1:9"
        with pytest.raises(Unavailable, match="is the vLLM server up"):
            await collect(engine, ask())
        assert (await collect(engine, ask(slot="canary", max_tokens=2)))[-1].finish is Finish.LENGTH
        assert engine.stats()["running"] == 0


async def test_slots_of_one_version_share_a_server_and_a_version_too_many_is_refused():
    fakes = [TokenVllm(SCRIPT), TokenVllm(SCRIPT)]
    async with vllm_engine(*fakes) as engine:
        for slot in ("live", "control", "canary"):
            await engine.load(slot, version(1))
        assert [fake.label for fake in fakes] == ["hash1", "default"]
        await engine.load("canary", version(2))
        assert [fake.label for fake in fakes] == ["hash1", "hash2"]
        with pytest.raises(Unavailable, match=r"add one to engine\.urls for 'live'"):
            await engine.load("live", version(3))
        assert {slot: policy.number for slot, policy in engine.slots().items()} == {
            "live": 1,
            "control": 1,
            "canary": 2,
        }
        await engine.load("live", version(2))
        await engine.load("control", version(2))
        await engine.load("live", version(3))  # nobody needs version 1 any more
        assert sorted(fake.label for fake in fakes) == ["hash2", "hash3"]


async def test_when_nobody_knows_what_a_server_holds_its_slots_are_empty():
    fake = TokenVllm(SCRIPT)
    fake.slow_s = 0.005
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        task = asyncio.create_task(collect(engine, ask()))
        await asyncio.sleep(0.05)
        fake.broken = "half of its weights are new"
        with pytest.raises(Conflict, match="left paused"):
            await engine.load("live", version(2))
        assert engine.slots() == {}
        assert (await task)[-1].finish is Finish.ERROR
        fake.broken = ""
        await engine.load("live", version(2))
        assert (await collect(engine, ask(max_tokens=2)))[-1].policy.number == 2


@pytest.mark.parametrize(("end", "finish"), [("close", Finish.ABORT), ("unload", Finish.ERROR)])
async def test_open_streams_end_with_the_engine_and_with_their_slot(end, finish):
    fake = TokenVllm(SCRIPT)
    fake.slow_s = 0.01
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        task = asyncio.create_task(collect(engine, ask(n=2)))
        while engine.stats()["steps"] < 4:
            await asyncio.sleep(0.002)
        await (engine.close() if end == "close" else engine.unload("live"))
        chunks = await task
    assert [chunk.finish for chunk in chunks if chunk.finish] == [finish] * 2


async def test_a_closed_stream_frees_the_server():
    fake = TokenVllm(SCRIPT)
    fake.slow_s = 0.005
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        stream = engine.generate(ask())
        await anext(stream)
        assert fake.open == 1
        await stream.aclose()
        async with asyncio.timeout(PATIENT_S):
            while fake.open:
                await asyncio.sleep(0.005)


async def test_a_server_that_reports_other_logprobs_is_refused_with_the_flag_to_set():
    with pytest.raises(BadConfig, match="--logprobs-mode processed_logprobs"):
        async with vllm_engine(TokenVllm(SCRIPT, mode="raw_logprobs")):
            pass


async def cut(engine, fake, after):
    """The chunks of a request whose server says nothing more after so many tokens, until its time is over."""
    for within_s in (1.0, 5.0, 25.0):  # a busy machine may not even begin in the first
        fake.slow_s = 0.001
        chunks = []
        async for chunk in engine.generate(replace(ask(n=2), within_s=within_s)):
            chunks.append(chunk)
            if len(chunks) == after:
                fake.slow_s = 60.0
        if len(chunks) > after:
            return chunks
    raise AssertionError("it never began")


async def test_at_a_deadline_the_server_is_let_go_and_what_came_is_kept():
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        chunks = await cut(engine, fake, 7)
        for index in (0, 1):
            mine = [chunk for chunk in chunks if chunk.index == index]
            said = "".join(chunk.text for chunk in mine)
            assert SCRIPT.startswith(said)
            assert len(said) == sum(len(chunk.ids) for chunk in mine) >= 3
            assert mine[-1].finish is Finish.DEADLINE
            assert {chunk.policy.number for chunk in mine} == {1}
        async with asyncio.timeout(PATIENT_S):
            while fake.open:
                await asyncio.sleep(0.002)
        assert engine.stats()["running"] == 0
        fake.slow_s = 0.0
        assert (await collect(engine, ask()))[-1].finish is Finish.LENGTH


async def test_at_a_deadline_after_a_swap_nobody_knows_who_made_which_token():
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        fake.slow_s = 0.01
        stream = engine.generate(ask(max_tokens=190))
        chunks = [await anext(stream) for _ in range(3)]
        await engine.load("live", version(2))
        while chunks[-1].policy.number == 1:
            chunks.append(await anext(stream))
        fake.slow_s = 60.0
        (open_,) = engine._streams
        engine._end(Finish.DEADLINE, (open_,))
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].finish is Finish.ERROR
        assert runs(chunks) == [1, 2]


async def test_a_server_that_a_long_prompt_with_a_seed_would_end_is_refused_with_the_flags_to_set():
    fake = TokenVllm(SCRIPT)
    fake.device = "cpu"
    with pytest.raises(BadConfig, match="--no-enable-chunked-prefill"):
        async with vllm_engine(fake):
            pass


async def test_what_edits_the_logits_is_asked_of_the_server():
    fake = TokenVllm(SCRIPT)
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        await collect(engine, ask(max_tokens=3))
        edits = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": ((7, -100.0),)}
        await collect(engine, ask(max_tokens=3, grammar='start: "x"', **edits))
    plain, edited = (body["sampling_params"] for body in fake.requests)
    asked = {name: value for name, value in edited.items() if plain.get(name) != value and name != "seed"}
    bias = {"logit_bias": {"7": -100.0}}
    assert asked == {**edits, **bias, "structured_outputs": {"grammar": 'start: "x"'}}


async def test_what_the_server_refuses_is_the_callers_fault_and_not_an_outage():
    async with vllm_engine(TokenVllm(SCRIPT)) as engine:
        await engine.load("live", version(1))
        with pytest.raises(BadRequest, match="Invalid grammar"):
            await collect(engine, ask(grammar="no grammar"))


class OneSentence(ByteRenderer):
    """Its only grammar wants a sentence with a full stop."""

    def fulfils(self, grammar, ids):
        return self.decode(ids).endswith(".")


@pytest.mark.parametrize(
    ("script", "sampling", "finish"),
    [
        ("Yes.", {}, Finish.STOP),
        ("Yes, but", {}, Finish.ERROR),
        ("Yes, but", {"grammar": ""}, Finish.STOP),
        ("Yes, but", {"stop": (",",)}, Finish.STOP),
        ("Yes, but", {"max_tokens": 3}, Finish.LENGTH),
    ],
)
async def test_a_server_whose_grammar_fails_in_an_answer_does_not_end_it_well(script, sampling, finish, caplog):
    async with vllm_engine(TokenVllm(script), renderer=OneSentence()) as engine:
        await engine.load("live", version(1))
        chunks = await collect(engine, ask(n=2, **{"grammar": "start: sentence"} | sampling))
    assert [chunk.finish for chunk in chunks if chunk.finish] == [finish] * 2
    assert ("let the answer end before its grammar did" in caplog.text) == (finish is Finish.ERROR)


async def test_the_likeliest_tokens_are_told_best_first_wherever_the_sampled_one_stands():
    async with vllm_engine(TokenVllm("az")) as engine:
        await engine.load("live", version(1))
        told = [top for chunk in await collect(engine, ask(tops=2)) for top in chunk.tops]
        assert [[token for token, _ in top] for top in told[:2]] == [[99, 98], [124, 123]]
        assert told[0] == ((99, logprob(97) / 3), (98, logprob(97) / 2))
        assert [chunk.tops for chunk in await collect(engine, ask())] == [()] * 3


@pytest.mark.parametrize(("backend", "follows"), [("guidance", True), ("auto", False), ("xgrammar", False)])
async def test_grammars_are_followed_where_llguidance_reads_them(backend, follows):
    async with vllm_engine(TokenVllm(SCRIPT, backend=backend)) as engine:
        assert engine.capabilities().follows_grammars is follows


async def test_a_server_that_never_answers_is_named():
    config = EngineConfig(kind="vllm", urls=("http://127.0.0.1:9",), connect_s=0.01)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await open_vllm(config, ByteRenderer(), lambda url: None)


def test_the_context_is_the_smallest_of_all():
    async def context(*sizes):
        async with vllm_engine(*(TokenVllm(SCRIPT, context=size) for size in sizes)) as engine:
            return engine.capabilities().context

    assert asyncio.run(context(600, 300)) == 300


async def test_a_score_leaves_the_server_room_for_the_token_that_it_samples_and_says_the_smaller_context():
    async with vllm_engine(TokenVllm(SCRIPT, context=300), renderer=ByteRenderer(context=100)) as engine:
        await engine.load("live", version(1))
        assert len(await engine.score("live", [1] * 99, 1)) == 98
        with pytest.raises(TooLarge, match="at most 99 can be scored"):
            await engine.score("live", [1] * 100, 1)


@pytest.mark.parametrize("settings", [{"kind": "vllm"}, {"urls": ("x",)}, {"urls": ("http://a", "http://a")}])
def test_urls_are_checked(settings):
    with pytest.raises(ValueError, match=r"engine\.urls"):
        EngineConfig(**settings)


NAMES = st.sampled_from(["choices", "index", "token_ids", "error", "logprobs", "prompt_logprobs"])
NESTED = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=80) | NESTED.map(lambda value: json.dumps(value).encode()))
def test_nonsense_from_a_server_is_an_error_with_words(body):
    """Or nothing at all: what else is raised fails here."""
    with contextlib.suppress(Unavailable):
        read_event(b"data: " + body)
    with pytest.raises(Unavailable, match="vLLM server"):
        read_scores(body, [1, 2], 1)


def test_a_token_id_below_zero_is_the_servers_error_and_not_the_tokenizers():
    event = {"choices": [{"index": 0, "token_ids": [-1], "logprobs": {"content": [{"logprob": -1.0}]}}]}
    with pytest.raises(Unavailable, match=r"vLLM server's answer is not understood: choices\.0\.token_ids\.0"):
        read_event(b"data: " + json.dumps(event).encode())
