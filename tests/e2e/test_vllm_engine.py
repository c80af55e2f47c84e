"""The engine over a real vLLM server: exact tokens in and out, each under the version that made it, across a swap under load.

Needs vLLM's environment: `python -m benchmarks.peers vllm`.
"""

import asyncio
import json
from itertools import pairwise

import pytest
from tests.e2e.test_vllm_follower import perturbed
from tests.fakes.vllm import ENGINE_OPTIONS, PYTHON, ROOT, VllmServer, usable

from ostinato.core.conversation import Conversation, Demand
from ostinato.core.generation import Generate
from ostinato.core.records import Finish, Sampling
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.engine.vllm.engine import open_vllm
from ostinato.model.response_constraints import grammar_of
from ostinato.weights.follow.drive import VllmFollower
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.store.directory import DirectoryStore

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "founded": {"type": "integer", "maximum": 2000}},
    "required": ["city", "founded"],
    "additionalProperties": False,
}
GRAMMAR = grammar_of(Conversation(messages=(), demand=Demand(schema=SCHEMA)), None, {}, thinks=False, opening="")
PROMPT = "The history of the city begins with a small settlement at the river, where"


pytestmark = [
    pytest.mark.examination,
    pytest.mark.skipif(not usable(), reason="needs vLLM's environment: python -m benchmarks.peers vllm"),
]


async def collect(engine, request):
    return [chunk async for chunk in engine.generate(request)]


def joined(chunks, index=0):
    mine = [chunk for chunk in chunks if chunk.index == index]
    return [i for chunk in mine for i in chunk.ids], [p for chunk in mine for p in chunk.logprobs], mine


async def told(work):
    """What the tests look at, from one server's life."""
    import torch

    from ostinato.model.load import load_model, resolve, weights_of
    from ostinato.model.renderer import HFRenderer

    path, root, story = resolve("smollm2", work / "cache"), work / "store", {}
    renderer, store = HFRenderer(path), DirectoryStore(work / "store")
    first = dict(weights_of(load_model(path, torch.bfloat16)))
    second = perturbed(first, 1)
    publisher, base, policies = VersionPublisher(store), None, []
    for number, weights in enumerate((first, second)):
        base = (await publisher.publish(number, weights, run="vllm", base=base)).policy
        policies.append(base)
    story["policies"] = policies

    def ask(seed, n=2, tops=0, **options):
        sampling = Sampling(**({"max_tokens": 24, "seed": seed} | options))
        return Generate(
            id=f"r{seed}",
            slot="live",
            prompt_ids=tuple(renderer.encode(PROMPT)),
            sampling=sampling,
            n=n,
            cache_salt="acme",
            tops=tops,
        )

    with VllmServer(PYTHON, path, source=ROOT, work=work, log=work / "vllm.log", options=ENGINE_OPTIONS) as server:
        await server.ready(1200)
        config = EngineConfig(kind="vllm", urls=(server.url,), silence_s=600)
        engine = await open_vllm(
            config, renderer, lambda url: VllmFollower(url, Follower(store), {"url": str(root)}, kv="keep")
        )
        try:
            story["can"] = engine.capabilities()
            await engine.start()
            await engine.load("live", Snapshot(policy=policies[0], weights=first))
            # alone: what is computed beside other rows may differ in the last bits
            story["twice"] = [await collect(engine, ask(7, n=1)) for _ in range(2)]
            story["warm"] = await collect(engine, ask(8, temperature=0.5))
            story["demanded"] = await collect(engine, ask(10, n=4, max_tokens=120, grammar=GRAMMAR, tops=3))
            story["biased"] = await collect(engine, ask(11, n=1, max_tokens=5, logit_bias=((260, 100.0),)))
            text = "".join(chunk.text for chunk in story["twice"][0] if chunk.index == 0)
            story["text"], story["stop"] = text, text[20:24]
            story["stopped"] = await collect(engine, ask(7, n=1, stop=(text[20:24],)))
            ids, logprobs, _ = joined(story["twice"][0])
            prompt = renderer.encode(PROMPT)
            story["scores"], story["logprobs"] = await engine.score("live", [*prompt, *ids], len(prompt)), logprobs
            streams = [asyncio.create_task(collect(engine, ask(seed, max_tokens=150))) for seed in range(3)]
            await asyncio.sleep(3.0)
            story["swap"] = await engine.load("live", Snapshot(policy=policies[1], weights=second))
            story["across"] = await asyncio.gather(*streams)
            stream = engine.generate(ask(9, max_tokens=400))
            await anext(stream)
            await stream.aclose()
            story["running"] = engine.stats()["running"]
        finally:
            await engine.close()
    return story


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    return asyncio.run(told(tmp_path_factory.mktemp("vllm-engine")))


def test_a_seed_repeats_and_differs_between_samples(story):
    first, again = story["twice"]
    assert joined(first)[:2] == joined(again)[:2]
    assert joined(story["warm"], 0)[0] != joined(story["warm"], 1)[0]
    assert all(chunk.policy == story["policies"][0] and chunk.seed == 7 for chunk in first)


def test_every_token_comes_with_its_logprob_and_the_budget_is_kept(story):
    for index in (0, 1):
        ids, logprobs, chunks = joined(story["warm"], index)
        assert len(ids) == len(logprobs) <= 24
        assert chunks[-1].finish in (Finish.STOP, Finish.LENGTH)
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_an_answer_follows_its_grammar_and_its_logprobs_are_under_the_mask(story):
    for index in range(4):
        _, logprobs, chunks = joined(story["demanded"], index)
        assert chunks[-1].finish is Finish.STOP
        value = json.loads("".join(chunk.text for chunk in chunks))
        assert {*value} == {"city", "founded"}
        assert logprobs[-1] == 0.0, "nothing but the end was allowed"
        tops = [each for chunk in chunks for each in chunk.tops]
        assert len(tops) == len(logprobs)
        assert all([value for _, value in each] == sorted((value for _, value in each), reverse=True) for each in tops)
        assert all(1 <= len(each) <= 3 for each in tops)
    ids, logprobs, _ = joined(story["biased"])
    assert ids == [260] * 5
    assert min(logprobs) > -1e-3


def test_a_stop_string_is_never_shown(story):
    _, _, chunks = joined(story["stopped"])
    text = story["text"]
    assert "".join(chunk.text for chunk in chunks) == text[: text.index(story["stop"])]
    assert chunks[-1].finish is Finish.STOP


def test_scores_are_near_what_sampling_told(story):
    """Not equal: a prompt is computed in other shapes, and bf16 knows logits of 16 to 32 in steps of 0.125 only."""
    apart = [abs(a - b) for a, b in zip(story["scores"], story["logprobs"], strict=True)]
    assert max(apart) <= 2 * 0.125
    assert sorted(apart)[len(apart) // 2] <= 0.05


def test_across_a_swap_every_stream_lives_and_the_server_confirms_each_tokens_version(story):
    """An answer whose versions are not those of the server's own account would end as an error."""
    assert story["swap"].streams == 6
    for chunks in story["across"]:
        for index in (0, 1):
            _, _, mine = joined(chunks, index)
            numbers = [chunk.policy.number for chunk in mine]
            assert mine[-1].finish in (Finish.LENGTH, Finish.STOP)
            assert all(b - a in (0, 1) for a, b in pairwise(numbers))
            assert numbers[0] == 0
    assert any(chunks[-1].policy.number == 1 for chunks in story["across"])


def test_what_is_closed_runs_no_more(story):
    assert story["running"] == 0
    assert (story["can"].context, story["can"].follows_grammars) == (2048, True)
