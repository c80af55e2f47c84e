"""Only an answer that was handed over whole is noted as delivered."""

import asyncio

import pytest
from gateway_world import ASK, Gone, HeldLog, all_sampled, events, eventually, world
from tests.deadlines import PATIENT_S
from tests.virtual_time import in_virtual_time

from ostinato.core.records import Delivered, Finish
from ostinato.serve.calls.answer import MAX_TURNS_PER_ROW, Deliveries
from ostinato.serve.writes import Writes
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_whole_answer_is_delivered_in_batches_beside_the_calls(stream):
    async with world() as w:
        await asyncio.gather(*(w.chat(stream=stream, n=2) for _ in range(10)))
        assert len(w.delivered()) < 20, "not on the request's path"
        await eventually(lambda: len(w.delivered()) == 20)
        assert set(w.delivered()) == {turn.id for turn in w.log.turns()}
        assert sum(isinstance(row, Delivered) for row in w.log.rows) < 10


async def test_what_is_noted_is_written_at_the_end():
    async with world() as w:
        await w.chat()
        assert not w.delivered()
    assert w.delivered() == [w.log.turns()[0].id]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_the_durable_write_got_nothing(stream):
    log, gone = HeldLog(), Gone()
    async with world(log=log, real=True, wrap=gone.wrap) as w:
        _, writer = await w.connect({**ASK, "stream": stream})
        await all_sampled(w)
        await asyncio.wait_for(log.asked.wait(), PATIENT_S)
        writer.transport.abort()
        await asyncio.wait_for(gone.left.wait(), PATIENT_S)
        log.go.set()
        await eventually(w.log.turns)
        await w.chat()
    left, stayed = w.log.turns()
    assert left.finish is Finish.STOP, "what was sampled is recorded as it was"
    assert w.delivered() == [stayed.id]


@pytest.mark.parametrize("stream", [False, True])
async def test_neither_did_one_that_left_while_tokens_were_made(stream):
    engine = FakeEngine(lambda r: "x" * 500, delay_s=0.005)
    async with world(engine=engine, default_max_tokens=1000, real=True) as w:
        _, writer = await w.connect({**ASK, "stream": stream})
        await eventually(lambda: engine.stats()["tokens"] > 3)
        writer.close()
        await eventually(w.log.turns)
    assert w.log.turns()[0].finish is (Finish.LEFT if stream else Finish.ABORT), "without a stream nothing was seen"
    assert not w.delivered()


class LeavesAtTheEnd:
    """A server that has seen the client go, and takes the rest of the answer in silence, as servers do."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        gone = asyncio.Event()

        async def left():
            message = await receive() if not self.asked else None
            self.asked = True
            if message is not None:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def swallow(message):
            if message["type"] == "http.response.start":
                gone.set()
            await send(message)

        self.asked = False
        await self.app(scope, left, swallow)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_known_before_the_last_byte_counts(stream):
    async with world("x", real=True, wrap=LeavesAtTheEnd) as w:
        _, writer = await w.connect({**ASK, "stream": stream})
        await eventually(w.log.turns)
        writer.close()
    assert not w.delivered()


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_an_answer_that_was_not_confirmed_or_failed_is_not_delivered(stream):
    async with world(engine=FakeEngine(lambda r: "hello", fail_after=2)) as w:
        await w.chat(stream=stream)
    assert not w.delivered()
    async with world(log=MemoryLog(delay_s=0.2), store_timeout_s=0.05) as w:
        status, headers, body = await w.chat(stream=stream)
        error = events(body)[-1]["error"] if stream else body["error"]
        assert error["code"] == "store_slow"
        assert "may or may not be stored" in error["message"]
        if not stream:
            assert (status, headers["retry-after"]) == (503, "1")
        await eventually(w.log.turns)
    assert not w.delivered()


async def test_a_repeat_of_an_undelivered_answer_delivers_it():
    log, gone = HeldLog(), Gone()
    async with world(log=log, real=True, wrap=gone.wrap) as w:
        _, writer = await w.connect(ASK, "idempotency-key: k")
        await asyncio.wait_for(log.asked.wait(), PATIENT_S)
        writer.transport.abort()
        await asyncio.wait_for(gone.left.wait(), PATIENT_S)
        log.go.set()
        await eventually(w.log.turns)
        assert (await w.chat(headers={"idempotency-key": "k"}))[1]["idempotent-replayed"] == "true"
    assert w.delivered() == [w.log.turns()[0].id]


@in_virtual_time
async def test_many_at_once_are_written_at_once_and_a_full_log_is_tried_again(monkeypatch):
    monkeypatch.setattr("ostinato.serve.calls.answer._RETRY_S", 0.05)
    log = MemoryLog()
    deliveries = Deliveries(log, lambda: 1.0, Writes(lambda: 1.0, slow_s=1.0))
    log.full = True
    deliveries.note([f"t{i}" for i in range(MAX_TURNS_PER_ROW + 1)])
    await asyncio.sleep(0.02)
    assert not log.rows
    log.full = False
    await eventually(lambda: len(log.rows) == 2)
    assert [len(row.turns) for row in log.rows] == [MAX_TURNS_PER_ROW, 1]
    await deliveries.close()
