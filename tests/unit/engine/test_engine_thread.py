"""The engine's thread: whatever fails on it, no stream is left hanging."""

import asyncio

from tests.deadlines import PATIENT_S
from tests.unit.engine.paced_clock import PacedClock

from ostinato.core.generation import Generate
from ostinato.core.records import Finish, Sampling
from ostinato.testing.tiny_engine import tiny_engine

LONG = Generate(id="r", slot="live", prompt_ids=tuple(b"some prompt"), sampling=Sampling(max_tokens=400, seed=3))


async def test_an_order_that_fails_while_the_thread_ends_leaves_no_stream_hanging(tmp_path):
    clock = PacedClock()
    async with tiny_engine(tmp_path, clock=clock) as tiny:
        stream, clock.held = tiny.engine.generate(LONG), True
        chunks = [await clock.first(stream)]
        for _ in range(2):  # the first one ends the thread, the second one is carried out while it ends
            tiny.engine._worker.post(lambda: 1 / 0)
        clock.go_on()
        async with asyncio.timeout(PATIENT_S):
            chunks += [chunk async for chunk in stream]
    assert [chunk.finish for chunk in chunks if chunk.finish] == [Finish.ERROR]
