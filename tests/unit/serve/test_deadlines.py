"""Nothing waits for ever, and who waits hears so."""

import asyncio
import json
from functools import partial

import anthropic
import openai
import pytest
from gateway_world import ASK, V0, comments, events, eventually, world
from tests.deadlines import PATIENT_S
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import Corrupt
from ostinato.core.records import Finish
from ostinato.serve.wire.watch import ClientGone, DisconnectWatch
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog


class Slow(FakeEngine):
    """Waits before the first token: for tests in virtual time."""

    def __init__(self, wait_s):
        super().__init__(lambda r: "hello")
        self.wait_s = wait_s

    async def generate(self, request):
        await asyncio.sleep(self.wait_s)
        async for chunk in super().generate(request):
            yield chunk


COMMENT, PING = b": waiting\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'


class Patient(FakeEngine):
    """Says nothing before its first token until `first` signs of life were sent, nor before its third until one was."""

    def __init__(self, sign, first=1):
        super().__init__(lambda r: "hello")
        self.sign, self.first, self.signs = sign, first, asyncio.Semaphore(0)

    def wrap(self, app):
        async def watched(scope, receive, send):
            async def tell(message):
                await send(message)
                if message.get("body") == self.sign:
                    self.signs.release()

            await app(scope, receive, tell)

        return watched

    async def generate(self, request):
        self.signs = asyncio.Semaphore(0)
        for _ in range(self.first):
            await self.signs.acquire()
        async for chunk in super().generate(request):
            if chunk.ids == (108,):
                await self.signs.acquire()
            yield chunk


class Stuck:
    """A connection that takes the head of an answer, or nothing at all."""

    def __init__(self, app, takes):
        self.app, self.takes = app, takes
        self.ended = asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        left = self.takes

        async def some(message):
            nonlocal left
            if left == 0:
                await asyncio.sleep(60)
            left -= 1

        await self.app(scope, receive, some)
        self.ended.set()


async def test_a_stream_shows_signs_of_life_before_its_first_token():
    engine = Patient(COMMENT, first=10_000)
    async with world(engine=engine, heartbeat_s=0.02, real=True, wrap=engine.wrap) as w:
        reader, writer = await w.connect({**ASK, "stream": True})
        assert b" 200 " in await reader.readline()
        assert not engine.stats()["tokens"], "the head must not wait for the first token"
        writer.close()
        await eventually(w.log.turns)
        engine.first = 3
        _, headers, raw = await w.chat(stream=True)
        assert len(comments(raw)) >= 4
        got = events(raw)
        assert "".join(c["delta"].get("content", "") for e in got[:-1] for c in e["choices"]) == "hello"
        assert got[-2]["ostinato"]["spans"] == [[0, "fake0", 6]]
        assert headers["x-ostinato-turn"] == w.log.turns()[-1].id


@in_virtual_time
async def test_a_quick_stream_has_none_and_names_its_weights_in_the_head():
    async with world(heartbeat_s=0.05) as w:
        _, headers, raw = await w.chat(stream=True)
        assert not comments(raw)
        assert headers["x-ostinato-policy"] == "0"


@in_virtual_time
async def test_a_pause_in_the_middle_is_bridged():
    class Pausing(FakeEngine):
        async def generate(self, request):
            async for chunk in super().generate(request):
                if chunk.ids == (108,):
                    await asyncio.sleep(0.12)
                yield chunk

    async with world(engine=Pausing(lambda r: "hello"), heartbeat_s=0.05) as w:
        _, _, raw = await w.chat(stream=True)
        assert len(comments(raw)) >= 2
        assert events(raw)[-1] == b"[DONE]"


async def test_the_official_client_reads_over_signs_of_life():
    engine = Patient(COMMENT)
    async with (
        world(engine=engine, heartbeat_s=0.02, real=True, wrap=engine.wrap) as w,
        openai.AsyncOpenAI(base_url=w.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(**ASK, stream=True)
        assert "".join([event.choices[0].delta.content or "" async for event in stream]) == "hello"


async def test_anthropics_client_reads_over_pings_before_and_within_an_answer():
    """Anthropic's protocol has an event for it, which its clients skip and others count as a sign of life; the others have comments."""
    engine, body = Patient(PING), {**ASK, "max_tokens": 9}
    async with (
        world(engine=engine, heartbeat_s=0.02, real=True, wrap=engine.wrap) as w,
        anthropic.AsyncAnthropic(base_url=w.url, api_key="none", max_retries=0) as client,
    ):
        _, _, raw = await w.post("/v1/messages", {**body, "stream": True})
        before, _, within = raw.partition(b"event: content_block_delta")
        assert before.startswith(PING)
        assert PING in within
        assert not comments(raw)
        async with client.messages.stream(**body) as stream:
            assert [text async for text in stream.text_stream] == list("hello")


@in_virtual_time
async def test_an_error_after_signs_of_life_is_an_event():
    engine = Slow(0.12)
    engine.fail_after = 2
    async with world(engine=engine, heartbeat_s=0.05) as w:
        status, _, raw = await w.chat(stream=True)
        assert status == 200
        assert events(raw)[-1]["error"]["code"] == "engine_error"
        assert b"[DONE]" not in raw


async def test_a_client_that_does_not_even_read_signs_of_life_is_given_up():
    class Silent(FakeEngine):
        async def generate(self, request):
            self.running += 1
            try:
                await asyncio.sleep(60)
                yield
            finally:
                self.running -= 1

    engine = Silent()
    wrap = partial(Stuck, takes=0)
    async with world(engine=engine, heartbeat_s=0.02, send_timeout_s=0.1, real=True, wrap=wrap) as w:
        _, writer = await w.connect({**ASK, "stream": True})
        await eventually(w.log.turns)
        assert (w.log.turns()[0].finish, engine.running) == (Finish.ABORT, 0)
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_slow_engine_is_an_error_and_an_untrainable_turn(stream):
    async with world(engine=Slow(60), chunk_timeout_s=0.05) as w:
        status, _, body = await w.chat(stream=stream)
        assert (status, body["error"]["code"]) == (500, "engine_error")
        assert w.log.turns()[0].finish is Finish.ERROR


@pytest.mark.parametrize("takes", [0, 1])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback", "/v1/nothing-but-an-error"])
async def test_a_body_nobody_takes_is_given_up(takes, path):
    stuck = None

    def wrap(app):
        nonlocal stuck
        stuck = Stuck(app, takes)
        return stuck

    path = path.replace("/nothing-but-an-error", "/completions")
    body = ASK if "chat" in path else {"bad": 1}
    async with world(real=True, send_timeout_s=0.05, wrap=wrap) as w:
        _, writer = await asyncio.open_connection(*w.address())
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        )
        writer.write(f"{head}\r\n\r\n".encode() + data)
        async with asyncio.timeout(PATIENT_S):
            await stuck.ended.wait()
        writer.close()
    assert not w.delivered()


@in_virtual_time
async def test_a_call_waits_while_the_first_weights_load():
    engine = FakeEngine(lambda r: "hello", slots={})
    async with world(engine=engine, loading_wait_s=5.0) as w:
        call = asyncio.create_task(w.chat())
        await asyncio.sleep(0.1)
        assert not call.done()
        engine._slots["live"] = V0
        assert (await call)[0] == 200


@in_virtual_time
async def test_but_not_for_ever():
    async with world(engine=FakeEngine(slots={}), loading_wait_s=0.05) as w:
        assert (await w.get("/health"))[0] == 503
        status, headers, body = await w.chat()
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "unavailable", "10")
        assert not w.log.rows


async def test_the_official_clients_own_retries_outlast_the_loading():
    engine = FakeEngine(lambda r: "hello", slots={})
    async with world(engine=engine, real=True, loading_wait_s=0.2) as w:
        asyncio.get_running_loop().call_later(0.3, engine._slots.__setitem__, "live", V0)
        async with openai.AsyncOpenAI(base_url=w.url + "/v1", api_key="none", timeout=PATIENT_S) as client:
            client._calculate_retry_timeout = lambda *_: 0.05  # ten seconds in truth
            answer = await client.chat.completions.create(**ASK)
        assert answer.choices[0].message.content == "hello"


class HangingLog(MemoryLog):
    """Answers nothing while `hangs`; `released` is set at the end of a test, so that no write is left behind."""

    def __init__(self, *, hangs):
        super().__init__()
        self.hangs = hangs
        self.released = asyncio.Event()

    async def append(self, *rows):
        if self.hangs:
            await self.released.wait()
        return await super().append(*rows)


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_log_that_hangs_while_a_call_is_given_up_holds_nobody(stream):
    log = HangingLog(hangs=True)
    async with asyncio.timeout(2):  # the start, the call and the end of the server
        async with world(engine=FakeEngine(lambda r: "hello", fail_after=1), log=log, store_timeout_s=0.05) as w:
            status, _, body = await w.chat(stream=stream)
            error = events(body)[-1]["error"] if stream else body["error"]
            assert (status, error["code"]) == (200 if stream else 500, "engine_error")
    log.released.set()
    await eventually(w.log.turns)


@in_virtual_time
async def test_a_log_that_hangs_from_the_first_note_of_a_delivery_on_holds_up_no_end(caplog):
    log = HangingLog(hangs=False)
    async with asyncio.timeout(2):
        async with world(log=log, store_timeout_s=0.05) as w:
            assert (await w.chat())[0] == 200
            log.hangs = True
    assert not w.delivered()
    assert "did not confirm the last writes" in caplog.text


@in_virtual_time
async def test_a_log_that_hangs_at_the_start_costs_conversations_only(caplog):
    log = HangingLog(hangs=True)
    async with asyncio.timeout(2), world(log=log, store_timeout_s=0.05) as w:
        assert "conversations start over" in caplog.text
        assert (await w.chat())[2]["error"]["code"] == "store_slow"
        log.hangs = False
        assert (await w.chat())[0] == 200
        log.released.set()


@pytest.mark.parametrize("readable", [0, 1])
async def test_a_log_that_cannot_be_read_at_the_start_costs_conversations_only(caplog, readable):
    class Damaged(MemoryLog):
        async def read(self, after, kinds):
            rows = [each async for each in super().read(after, kinds)]
            for each in rows[:readable]:
                yield each
            raise Corrupt("row 2 of log.db cannot be read; restore it from a copy")

    log = Damaged()
    async with world(log=MemoryLog()) as w:
        await w.chat()
        await w.chat()
        await log.append(*w.log.turns())
    async with world(log=log) as w:
        assert "row 2 of log.db cannot be read" in caplog.text
        assert "conversations start over" in caplog.text
        assert (await w.chat())[0] == 200


@in_virtual_time
async def test_a_watch_tells_its_reason_from_a_cancellation_from_outside():
    async def never():
        await asyncio.sleep(60)

    async def watched(seconds):
        async with DisconnectWatch(never) as watch:
            watch.allow(60.0, ClientGone)
            watch.allow(seconds, lambda: ValueError("late"))
            await asyncio.sleep(60)

    with pytest.raises(ValueError, match="late"):
        await watched(0.01)
    task = asyncio.create_task(watched(60.0))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@in_virtual_time
async def test_a_watch_ends_when_the_client_leaves():
    async def leaves():
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        async with DisconnectWatch(leaves):
            await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
