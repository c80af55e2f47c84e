"""The torch engine on the tiny model: right tokens in any company, shared prompts, and nothing left behind."""

import asyncio
import sys
import time
from dataclasses import replace
from threading import get_ident

import pytest
import torch
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.step_gate import StepGate
from tests.unit.serve.gateway_world import world

from ostinato.core.errors import BadRequest, TooLarge, Unavailable
from ostinato.core.generation import Generate
from ostinato.core.records import Finish, PolicyVersion, Sampling
from ostinato.core.weights import Snapshot, WeightArray
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.paged import PagedAttend
from ostinato.testing.engine import CONTRACT
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.tiny_engine import tiny_engine, tiny_snapshot


def ask(text, *, n=1, **sampling):
    settings = {"max_tokens": 12, "temperature": 0.0} | sampling
    return Generate(id=text, slot="live", prompt_ids=tuple(text.encode()), n=n, sampling=Sampling(**settings))


async def answer(engine, request):
    """The ids of each sample."""
    return [[token for token, _ in sample] for sample in await drawn(engine, request)]


async def drawn(engine, request):
    """The ids of each sample, each with its logprob."""
    samples = [[] for _ in range(request.n)]
    async for chunk in engine.generate(request):
        samples[chunk.index] += zip(chunk.ids, chunk.logprobs, strict=True)
    return samples


def test_the_contract_is_the_one_it_was_given():
    engine = TorchEngine(lambda weights: pytest.fail("nothing is loaded"), ByteRenderer(), contract=CONTRACT)
    assert (engine.numerics(), engine.contract()) == (CONTRACT.id, CONTRACT)
    assert TorchEngine(lambda weights: pytest.fail("nothing is loaded"), ByteRenderer()).numerics() == ""


@torch.inference_mode()
def reference(model, request):
    """Greedy decoding by recomputing everything for every token."""
    ids = list(request.prompt_ids)
    for _ in range(request.sampling.max_tokens):
        states = hidden(model, torch.tensor(ids), torch.arange(len(ids)), CausalAttend([len(ids)]))
        ids.append(int(logits(model, states[-1:]).argmax()))
        if ids[-1] == 258:  # the end token
            break
    return ids[len(request.prompt_ids) :]


PROMPTS = ["a", "some words", "x" * 16, "y" * 17, "a prompt that is longer than one chunk " * 3, "some words too"]


async def test_greedy_equals_the_plain_loop_alone_and_in_company(tmp_path):
    config = EngineConfig(kv_tokens=4096, block=16, prefill_chunk=20)
    async with tiny_engine(tmp_path, config) as tiny:
        requests = [ask(text, n=1 + i % 3) for i, text in enumerate(PROMPTS)]
        expected = [reference(tiny.model, request) for request in requests]
        assert len({tuple(ids) for ids in expected}) > 3
        together = await asyncio.gather(*[answer(tiny.engine, request) for request in requests])
        for request, ids, samples in zip(requests, expected, together, strict=True):
            assert samples == [ids] * request.n
        for request, ids in zip(requests, expected, strict=True):
            assert (await answer(tiny.engine, request))[0] == ids  # now from cached prefixes


async def test_a_prompt_is_computed_once_for_its_samples(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        request = ask("forty characters make two blocks and more", n=8, temperature=1.0, seed=1)
        samples = await answer(tiny.engine, request)
        assert len({tuple(ids) for ids in samples}) == 8
        stats = tiny.engine.stats()
        assert stats["prefill_tokens"] == len(request.prompt_ids)
        assert stats["kv_blocks_used"] == 0


async def test_sampling_does_not_depend_on_the_company(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        request = ask("the same question", n=2, temperature=1.0, top_p=0.9, seed=11)
        alone = await answer(tiny.engine, request)
        others = [answer(tiny.engine, ask(text, temperature=1.0)) for text in PROMPTS]
        in_company, *_ = await asyncio.gather(answer(tiny.engine, request), *others)
        assert in_company == alone


async def test_a_cached_prefix_saves_work_and_changes_nothing(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        first = ask("a common beginning of some length. Then this.")
        second = ask("a common beginning of some length. Then that!")
        await answer(tiny.engine, first)
        before = tiny.engine.stats()
        assert (await answer(tiny.engine, second))[0] == reference(tiny.model, second)
        after = tiny.engine.stats()
        assert after["prefix_hit_tokens"] - before["prefix_hit_tokens"] == 32
        assert after["prefill_tokens"] - before["prefill_tokens"] == len(second.prompt_ids) - 32


async def test_new_weights_do_not_read_the_old_prefixes(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        request = ask("a common beginning of some length. Then this.")
        old = await answer(tiny.engine, request)
        hits = tiny.engine.stats()["prefix_hit_tokens"]
        await tiny.engine.load("live", tiny_snapshot(tmp_path, 1, seed=1))
        assert await answer(tiny.engine, request) != old
        assert tiny.engine.stats()["prefix_hit_tokens"] == hits


async def test_more_than_the_pool_holds_is_served_in_turn(tmp_path):
    config = EngineConfig(kv_tokens=160, block=16, prefill_chunk=32)
    async with tiny_engine(tmp_path, config) as tiny:
        requests = [ask(f"{i} " * 12, n=2, max_tokens=50) for i in range(10)]
        expected = [reference(tiny.model, request) for request in requests]
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            with StepGate(tiny.engine):  # all are there before one has ended
                asking = asyncio.gather(*[answer(tiny.engine, request) for request in requests])
                await asyncio.sleep(0)
            answers = await asking
        assert answers == [[ids] * 2 for ids in expected]
        assert tiny.engine.stats()["preemptions"] > 0
        assert tiny.engine.stats()["kv_blocks_used"] == 0
        assert tiny.engine.capabilities().context == 160
        with pytest.raises(BadRequest, match="ask for at most 60"):
            await answer(tiny.engine, ask("z" * 100, max_tokens=61))


async def test_another_tenants_call_gets_a_row_and_changes_no_bit(tmp_path):
    config = EngineConfig(kv_tokens=4096, block=16, max_batch=4)
    async with tiny_engine(tmp_path, config) as tiny:
        sampling = {"temperature": 1.0, "seed": 1}  # with this seed each of the four has 100 tokens and more
        many = replace(ask("many answers, please", n=4, max_tokens=200, **sampling), cache_salt="acme")
        few = replace(ask("one", max_tokens=8, **sampling), cache_salt="bolt")
        expected = [await drawn(tiny.engine, request) for request in (many, few)]
        assert tiny.engine.stats()["preemptions"] == 0
        with StepGate(tiny.engine, steps=2):  # the flood has a token of each sample when the other call comes
            async with asyncio.timeout(WHOLE_PROGRAM_S):
                flood = asyncio.create_task(drawn(tiny.engine, many))
                while tiny.engine.stats()["running"] < 4:
                    await asyncio.sleep(0)
                asked = asyncio.create_task(drawn(tiny.engine, few))
                while not tiny.engine.stats()["waiting"] and not tiny.engine.stats()["preemptions"]:
                    await asyncio.sleep(0)
        assert await asked == expected[1]
        assert not flood.done(), "it was not the end of the others that made room"
        assert await flood == expected[0]
        assert tiny.engine.stats()["preemptions"] == 1


async def test_too_many_open_samples_are_refused(tmp_path):
    async with tiny_engine(tmp_path, EngineConfig(kv_tokens=4096, block=16, max_waiting=4)) as tiny:
        with StepGate(tiny.engine):
            stream = tiny.engine.generate(ask("first", n=4, max_tokens=300))
            await anext(stream)
            with pytest.raises(Unavailable):
                await answer(tiny.engine, ask("second"))
            await stream.aclose()
        assert await answer(tiny.engine, ask("third"))
        with pytest.raises(TooLarge, match=r"engine\.max_waiting lets 4"):  # and no number of tries would help
            await answer(tiny.engine, ask("fourth", n=5))


async def test_slots_with_the_same_weights_share_a_module(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        same = Snapshot(policy=PolicyVersion(number=5, hash="seed0"), weights={})  # never read: the module exists
        await tiny.engine.load("control", same)
        request = ask("hello")
        theirs = Generate(id="c", slot="control", prompt_ids=request.prompt_ids, sampling=request.sampling)
        mine, others = await asyncio.gather(answer(tiny.engine, request), answer(tiny.engine, theirs))
        assert mine == others
        assert tiny.engine.slots()["control"].number == 5


async def test_unloading_ends_open_streams_with_an_error(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        with StepGate(tiny.engine):
            stream = tiny.engine.generate(ask("hello", max_tokens=400))
            await anext(stream)
            await tiny.engine.unload("live")
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish is Finish.ERROR


async def test_closing_aborts_open_streams(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        with StepGate(tiny.engine):
            stream = tiny.engine.generate(ask("hello", max_tokens=400))
            await anext(stream)
            await tiny.engine.close()
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish is Finish.ABORT


async def test_threads_take_short_turns_while_a_version_is_built_and_long_ones_again_afterwards(tmp_path, monkeypatch):
    before, during = sys.getswitchinterval(), []
    async with tiny_engine(tmp_path) as tiny:
        make = tiny.engine._make

        def watched(weights):
            during.append(sys.getswitchinterval())
            return make(weights)

        monkeypatch.setattr(tiny.engine, "_make", watched)
        await tiny.engine.load("live", tiny_snapshot(tmp_path, 1, seed=1))
        monkeypatch.setattr(tiny.engine, "_make", None)
        with pytest.raises(TypeError):
            await tiny.engine.load("live", tiny_snapshot(tmp_path, 2, seed=2))
    assert during[0] < before / 10
    assert sys.getswitchinterval() == before


async def test_one_thread_builds_all_versions_whatever_else_threads_do(tmp_path, monkeypatch):
    """Memory that one thread's versions had is no use to another's: a gateway held one model for each thread that had built."""
    builders = set()
    async with tiny_engine(tmp_path) as tiny:
        make = tiny.engine._make
        monkeypatch.setattr(tiny.engine, "_make", lambda weights: builders.add(get_ident()) or make(weights))
        for number in range(1, 4):
            await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(3)))
            await tiny.engine.load("live", tiny_snapshot(tmp_path, number, seed=number))
    assert len(builders) == 1


async def test_a_crash_fails_all_streams_and_then_refuses(tmp_path, monkeypatch):
    async with tiny_engine(tmp_path) as tiny:
        with StepGate(tiny.engine, steps=8):
            streams = [tiny.engine.generate(ask(text, max_tokens=400)) for text in ("one", "two")]
            for stream in streams:
                await anext(stream)

            def broken(*_):
                raise RuntimeError("planted")

            for way in ("__call__", "pages"):  # of one layer, and of all at once
                monkeypatch.setattr(PagedAttend, way, broken)
        for stream in streams:
            assert [chunk async for chunk in stream][-1].finish is Finish.ERROR
        with pytest.raises(Unavailable) as caught:
            await answer(tiny.engine, ask("three"))
        assert str(caught.value.__cause__) == "planted"


async def test_weights_that_overflow_end_their_streams_only(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        snapshot = tiny_snapshot(tmp_path, 1, seed=1)
        huge = dict(snapshot.weights)
        name = "model.norm.weight"
        array = huge[name]
        data = torch.full(array.shape, 3e38).view(torch.uint8).numpy().reshape(-1)
        huge[name] = WeightArray(array.dtype, array.shape, data)
        await tiny.engine.load("canary", Snapshot(policy=PolicyVersion(number=1, hash="huge"), weights=huge))
        bad = Generate(id="b", slot="canary", prompt_ids=(1, 2), sampling=Sampling(max_tokens=5))
        assert [chunk.finish async for chunk in tiny.engine.generate(bad)] == [Finish.ERROR]
        request = ask("still well")
        assert (await answer(tiny.engine, request))[0] == reference(tiny.model, request)


async def test_a_tenants_branch_answers_it_with_its_own_weights_and_swaps_beside_live(tmp_path):
    acme, bolt = "sk-acme-0123456789abcdef", "sk-bolt-0123456789abcdef"
    keys = {"api_keys": [f"acme:{acme}", f"bolt:{bolt}"], "branches": ["acme"]}
    async with (
        tiny_engine(tmp_path) as tiny,
        world(engine=tiny.engine, renderer=ByteRenderer(), **keys) as w,
    ):

        async def sampled(key):
            status, _, _ = await w.chat({"x-api-key": key}, user="ann", seed=5, max_tokens=8, temperature=1.0)
            assert status == 200
            turn = w.log.turns()[-1]
            return [version.hash for version in turn.versions], turn.sampled_ids, turn.logprobs

        shared = await sampled(bolt)
        assert await sampled(acme) == shared
        for number, seed in ((7, 1), (8, 2)):
            snapshot = tiny_snapshot(tmp_path, number, seed=seed)
            await tiny.engine.load("branch/acme", snapshot)
            own = await sampled(acme)
            assert own[0] == [snapshot.policy.hash]
            assert own[2] != shared[2]
            assert await sampled(bolt) == shared
        await tiny.engine.load("live", snapshot)
        assert await sampled(bolt) == own, "the branch's answers were those of its weights"
