"""Samples whose time is over: they end at the next step, wherever they stand, with what was sampled, and leave nothing behind."""

import asyncio
from dataclasses import replace

from tests.unit.engine.paced_clock import PacedClock

from ostinato.core.generation import Generate
from ostinato.core.records import Finish, Sampling
from ostinato.engine.config import EngineConfig
from ostinato.testing.tiny import tiny_moe
from ostinato.testing.tiny_engine import tiny_engine

LONG = Generate(
    id="r", slot="live", prompt_ids=tuple(b"some prompt"), sampling=Sampling(max_tokens=400, temperature=1.0, seed=3)
)


async def collect(engine, request):
    return [chunk async for chunk in engine.generate(request)]


def ids(chunks):
    return [token for chunk in chunks for token in chunk.ids]


async def test_what_was_sampled_is_kept_to_the_bit(tmp_path):
    clock = PacedClock()
    async with tiny_engine(tmp_path, clock=clock) as tiny:
        whole = await collect(tiny.engine, LONG)
        stream, clock.held = tiny.engine.generate(replace(LONG, within_s=5.0)), True
        chunks = [await clock.first(stream) for _ in range(5)]
        clock.now += 5.0
        clock.go_on()
        chunks += [chunk async for chunk in stream]
        assert 5 <= len(ids(chunks)) < len(ids(whole)), "it ended early"
        assert ids(chunks) == ids(whole)[: len(ids(chunks))]
        assert [x for c in chunks for x in c.logprobs] == [x for c in whole for x in c.logprobs][: len(ids(chunks))]
        assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [Finish.DEADLINE]
        assert "".join(chunk.text for chunk in chunks) == tiny.renderer.decode(ids(chunks)), "nothing is withheld"
        assert tiny.engine.stats()["kv_blocks_used"] == 0


async def test_a_sample_that_still_waits_is_freed_and_who_runs_goes_on(tmp_path):
    clock = PacedClock()
    config = EngineConfig(kv_tokens=4096, block=16, max_batch=1)
    async with tiny_engine(tmp_path, config, clock=clock) as tiny:
        whole = ids(await collect(tiny.engine, LONG))
        running, clock.held = tiny.engine.generate(LONG), True
        first = [await clock.first(running)]
        queued = asyncio.create_task(collect(tiny.engine, replace(LONG, id="q", within_s=5.0)))
        await clock.until(lambda: tiny.engine.stats()["waiting"])
        clock.now += 6.0
        clock.go_on()
        (last,) = await queued
        assert (last.ids, last.finish) == ((), Finish.DEADLINE)
        assert tiny.engine.stats()["waiting"] == 0
        assert ids(first + [chunk async for chunk in running]) == whole


async def test_many_that_end_in_one_step_leave_nothing_and_hurt_nobody(tmp_path):
    clock = PacedClock()
    config = EngineConfig(kv_tokens=4096, block=16, max_batch=4)
    async with tiny_engine(tmp_path, config, clock=clock) as tiny:
        engine = tiny.engine
        whole = ids(await collect(engine, LONG))
        bystander, clock.held = engine.generate(LONG), True
        first = [await clock.first(bystander)]
        several = replace(LONG, id="several", n=8, within_s=5.0)  # seven wait for the prompt of the first
        tasks = [asyncio.create_task(collect(engine, several)) for _ in range(20)]
        tasks += [asyncio.create_task(collect(engine, replace(LONG, id=f"{n}", within_s=5.0))) for n in range(100)]
        await clock.until(lambda: not engine.stats()["orders_open"] and engine.stats()["waiting"] >= 200)
        clock.now += 6.0
        clock.go_on()
        ends = [[chunk.finish for chunk in chunks if chunk.finish] for chunks in await asyncio.gather(*tasks)]
        assert all(set(each) <= {Finish.DEADLINE, Finish.STOP, Finish.LENGTH} for each in ends)
        assert sum(each.count(Finish.DEADLINE) for each in ends) >= 200
        assert [len(each) for each in ends] == [8] * 20 + [1] * 100
        assert ids(first + [chunk async for chunk in bystander]) == whole
        assert (engine.stats()["waiting"], engine.stats()["running"], engine.stats()["kv_blocks_used"]) == (0, 0, 0)
        assert ids(await collect(engine, LONG)) == whole


async def test_a_clock_that_goes_back_gives_nobody_less(tmp_path):
    clock = PacedClock()
    async with tiny_engine(tmp_path, clock=clock) as tiny:
        whole = ids(await collect(tiny.engine, LONG))
        stream, clock.held = tiny.engine.generate(replace(LONG, within_s=5.0)), True
        first = [await clock.first(stream)]
        clock.now -= 1e6
        clock.go_on()
        assert ids(first + [chunk async for chunk in stream]) == whole


async def test_a_prompt_of_one_token_that_is_over_at_once_ends_alone(tmp_path):
    """Of a mixture of experts, whose choices nobody made: an error here would end the engine."""
    async with tiny_engine(tmp_path, write=tiny_moe) as tiny:
        (last,) = await collect(tiny.engine, replace(LONG, prompt_ids=(65,), within_s=0.0))
        assert (last.ids, last.routes, last.finish) == ((), b"", Finish.DEADLINE)
        chunks = await collect(tiny.engine, replace(LONG, prompt_ids=(65,)))
        assert (chunks[-1].finish in (Finish.STOP, Finish.LENGTH), chunks[-1].routes != b"") == (True, True)
