"""Log-probabilities of given tokens: the bits that sampling gives them, prefixes shared as samples share them, and nothing left behind."""

import asyncio
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.engine.paced_clock import PacedClock

from ostinato.core.errors import NotFound, Overloaded, TooLarge, Unavailable
from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.kv import BlockPool
from ostinato.engine.embedded.scheduler import Generation, Scheduler
from ostinato.model.backend import ComputeBackend
from ostinato.testing.tiny import tiny_moe
from ostinato.testing.tiny_engine import tiny_engine, tiny_snapshot

BLOCK, CHUNK = 16, 24
CONFIG = EngineConfig(kv_tokens=4096, block=BLOCK, prefill_chunk=CHUNK)
PROMPT = tuple(random.Random(3).choices(range(256), k=210))
ASK = Generate(
    id="r", slot="live", prompt_ids=PROMPT, sampling=Sampling(max_tokens=40, temperature=1.0, seed=3), cache_salt="ann"
)


async def sampled(engine, ask=ASK):
    chunks = [chunk async for chunk in engine.generate(ask)]
    return [i for each in chunks for i in each.ids], [p for each in chunks for p in each.logprobs], chunks[-1].routes


async def computed(engine, ids, start, salt):
    """Scores, and how many of the tokens that they follow were computed."""
    before = engine.stats()["prefix_hit_tokens"]
    scores = await engine.score("live", ids, start, salt)
    return scores, len(ids) - 1 - (engine.stats()["prefix_hit_tokens"] - before)


@pytest.mark.parametrize("write", [None, tiny_moe])
async def test_what_was_sampled_is_scored_with_the_same_bits_from_the_blocks_of_its_prompt(tmp_path, write):
    options = {} if write is None else {"write": write}
    async with (
        tiny_engine(tmp_path / "a", CONFIG, **options) as one,
        tiny_engine(tmp_path / "b", CONFIG, **options) as two,
    ):
        answer, logprobs, routes = await sampled(one.engine)
        ids = [*PROMPT, *answer]
        whole = len(ids) - 1
        assert await computed(one.engine, ids, len(PROMPT), "ann") == (logprobs, whole - len(PROMPT) // BLOCK * BLOCK)
        assert await computed(two.engine, ids, len(PROMPT), "ann") == (logprobs, whole), "and without a cache"
        assert await sampled(two.engine) == (answer, logprobs, routes), "sampling shares what a score computed"
        assert two.engine.stats()["prefix_hit_tokens"] == (len(PROMPT) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("kernels", ["own", "torch"])
async def test_every_start_gives_the_bits_of_all_tokens_scored_at_once(tmp_path, kernels):
    ids = PROMPT[: 3 * BLOCK + 2]
    async with tiny_engine(tmp_path, CONFIG, backend=ComputeBackend(kernels=kernels)) as tiny:
        (first, *rest), _ = await computed(tiny.engine, ids, 1, "")
        for start in range(2, len(ids) + 1):
            scores, count = await computed(tiny.engine, ids, start, "")
            assert scores == [first, *rest][start - 1 :] or kernels == "torch"
            assert scores == pytest.approx([first, *rest][start - 1 :], abs=1e-4)
            if start < len(ids):
                assert count == len(ids) - 1 - (start - 1) // BLOCK * BLOCK, (
                    "positions whose states are read are computed"
                )


async def test_prefixes_are_shared_under_one_salt_and_one_version_only(tmp_path):
    async with tiny_engine(tmp_path, CONFIG) as tiny:
        engine, ids, whole = tiny.engine, [*PROMPT, 7, 8], len(PROMPT) + 1
        await sampled(engine)
        scores, count = await computed(engine, ids, len(PROMPT), "eve")
        assert count == whole, "eve learns nothing of what ann asked"
        assert (await computed(engine, ids, len(PROMPT), "ann"))[0] == scores
        assert (await computed(engine, ids, len(PROMPT), "ann"))[1] < whole
        await engine.load("live", tiny_snapshot(tmp_path, 1, seed=1))
        other, count = await computed(engine, ids, len(PROMPT), "ann")
        assert other != scores
        assert count == whole


async def test_a_score_takes_turns_with_streams_and_leaves_no_block_held(tmp_path):
    async with tiny_engine(tmp_path, CONFIG) as tiny:
        engine = tiny.engine
        before = engine.stats()["steps"]
        scores, (_, logprobs, _) = await asyncio.gather(engine.score("live", PROMPT, 1), sampled(engine))
        assert engine.stats()["steps"] - before > len(PROMPT) // CHUNK
        assert len(logprobs) == 40
        assert scores == await engine.score("live", PROMPT, 1)
        stats = engine.stats()
        assert (stats["kv_blocks_used"], stats["running"], stats["waiting"]) == (0, 0, 0)


async def test_a_score_that_is_cancelled_computes_nothing_more_and_leaves_nothing(tmp_path):
    gate = threading.Event()

    def clock():  # read by the engine's thread before each step
        gate.wait()
        return 0.0

    async with tiny_engine(tmp_path, CONFIG.model_copy(update={"max_waiting": 1}), clock=clock) as tiny:
        engine = tiny.engine
        task = asyncio.create_task(engine.score("live", PROMPT, 100))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        scores = await engine.score("live", PROMPT, 100, "another")
        assert len(scores) == len(PROMPT) - 100, "its place is free"
        stats = engine.stats()
        assert stats["prefill_tokens"] <= CHUNK + len(PROMPT) - 1
        assert (stats["kv_blocks_used"], stats["running"], stats["waiting"]) == (0, 0, 0)


async def test_what_cannot_be_scored_is_refused(tmp_path):
    config = EngineConfig(kv_tokens=BLOCK * 8, block=BLOCK, max_waiting=1)
    clock = PacedClock()
    async with tiny_engine(tmp_path, config, clock=clock) as tiny:
        engine = tiny.engine
        assert await engine.score("live", PROMPT[:9], 9) == []
        assert len(await engine.score("live", PROMPT[: BLOCK * 8], 1)) == BLOCK * 8 - 1
        with pytest.raises(TooLarge, match="exceed the context: at most 128 can be scored"):
            await engine.score("live", PROMPT[: BLOCK * 8 + 1], 1)
        with pytest.raises(NotFound, match="nowhere"):
            await engine.score("nowhere", PROMPT[:9], 1)
        clock.held = True
        asked = [asyncio.create_task(engine.score("live", PROMPT[:9], 1)) for _ in range(2)]
        await asyncio.sleep(0)
        clock.go_on()
        both = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in both] == [list, Overloaded]


async def test_weights_that_give_no_numbers_end_a_score_and_spoil_no_block(tmp_path):
    async with tiny_engine(tmp_path, CONFIG) as tiny:
        engine, good = tiny.engine, tiny_snapshot(tmp_path, 1, seed=0)
        wanted = await engine.score("live", PROMPT, 200)
        norm = good.weights["model.norm.weight"]
        far = np.full(norm.shape, 3e38, np.float32).view(np.uint8)
        large = {**good.weights, "model.norm.weight": replace(norm, data=far)}
        await engine.load("live", Snapshot(policy=PolicyVersion(number=2, hash="large"), weights=large))
        with pytest.raises(Unavailable, match="not finite"):
            await engine.score("live", PROMPT, 200)
        assert engine.stats()["kv_blocks_used"] == 0
        await engine.load("live", good)
        assert await engine.score("live", PROMPT, 200) == wanted


async def test_weights_that_give_no_numbers_leave_none_in_the_blocks_of_others(tmp_path):
    """Values that no number can hold, of a prompt that was computed in part: 0 times one of them is no number, either."""
    config = CONFIG.model_copy(
        update={"prefill_chunk": 20}
    )  # two of them fill no whole block, so that the last is anybody's
    clock, short = PacedClock(), replace(ASK, prompt_ids=PROMPT[-5:], sampling=Sampling(max_tokens=2, seed=3))
    async with tiny_engine(tmp_path, config, clock=clock) as tiny:
        engine, good = tiny.engine, tiny_snapshot(tmp_path, 1, seed=0)
        wanted = await sampled(engine, short)
        name = "model.layers.0.self_attn.v_proj.weight"
        far = np.full(good.weights[name].shape, 3e38, np.float32).view(np.uint8)
        large = {**good.weights, name: replace(good.weights[name], data=far)}
        await engine.load("canary", Snapshot(policy=PolicyVersion(number=2, hash="large"), weights=large))
        before, clock.held = engine.stats()["prefill_tokens"], True
        task = asyncio.create_task(sampled(engine, replace(ASK, id="large", slot="canary")))
        await clock.until(lambda: engine.stats()["prefill_tokens"] == before + 20)
        task.cancel()
        clock.go_on()
        await asyncio.gather(task, return_exceptions=True)
        assert await sampled(engine, short) == wanted
        assert engine.stats()["kv_blocks_used"] == 0


def test_new_weights_and_preemption_begin_a_score_anew():
    pool = BlockPool(8)
    scheduler = Scheduler(pool, block=4, rows=4, chunk=4)
    request = Generate(id="s", slot="live", prompt_ids=(1,) * 12, sampling=Sampling(max_tokens=1))
    sample = Generation(
        request=request,
        index=0,
        seed=0,
        ids=[1] * 12,
        policy=PolicyVersion(number=1, hash="v1"),
        targets=(2,) * 10,
    )
    scheduler.add([sample])
    (piece,) = scheduler.plan()
    scheduler.advance(piece)
    sample.logprobs += [-0.5, -0.25]
    assert scheduler.swap("live", PolicyVersion(number=2, hash="v2"), recompute=False) == 1
    assert (sample.computed, sample.logprobs, pool.held) == (0, [], 0), "no score is of two versions"
    assert scheduler.plan()[0].start == 0
