"""The head of a request is bounded, whoever sends it and however."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import uvicorn
from gateway_world import ASK, World, world

from ostinato.serve.config import ServeConfig
from ostinato.serve.wire.protocol import MAX_HEAD_BYTES, BoundedHttp
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@asynccontextmanager
async def listening(app=None):
    app = app or World(FakeEngine(), MemoryLog(), ServeConfig(), ByteRenderer()).app
    config = uvicorn.Config(app, log_config=None, lifespan="off")
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedHttp(config, state, {}), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.transport.abort()
        for connection in list(state.connections):
            connection.transport.abort()
        server.close()


async def answer(reader):
    status = await reader.readline()
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(status.split()[1]), await reader.readexactly(length)


async def test_many_requests_on_one_connection_are_not_one_long_head():
    async with listening() as (reader, writer):
        for _ in range(60):
            writer.write(GET + b"x-more: " + b"y" * 4000 + b"\r\n\r\n")
            assert (await answer(reader))[0] == 200


async def test_pieces_of_heads_count_together_only_within_one():
    async with listening() as (reader, writer):
        for _ in range(3):
            for piece in (GET, *[b"x-more: " + b"y" * 1000 + b"\r\n"] * 30, b"\r\n"):
                writer.write(piece)
                await asyncio.sleep(0)
            assert (await answer(reader))[0] == 200


async def test_the_end_of_a_long_body_is_no_long_head():
    async with listening() as (reader, writer):
        event = {"id": "s1", "target": "t:0", "name": "accepted", "value": True, "source": "human"}
        many = json.dumps([{**event, "comment": "x" * 900} for _ in range(1000)]).encode()
        head = b"POST /v1/feedback HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        for _ in range(3):
            writer.write(head + b"content-length: %d\r\n\r\n" % len(many))
            writer.write(many)
            status, body = await answer(reader)
            assert (status, len(json.loads(body))) == (202, 1000)


async def flood(piece):
    async with listening() as (_, writer):
        writer.write(GET)
        sent = 0
        try:
            while sent < 20 * MAX_HEAD_BYTES:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
                sent += len(piece)
        except ConnectionError:
            pass
        return sent


async def test_an_endless_head_is_cut_off():
    for piece in (b"x: " + b"y" * 1000 + b"\r\n", b"y" * 1000):
        assert await flood(b"x-long: " + piece) < 10 * MAX_HEAD_BYTES


async def test_the_refusal_says_why():
    async with listening() as (reader, writer):
        writer.write(GET + b"x-long: " + b"y" * (MAX_HEAD_BYTES + 1000))
        status, body = await answer(reader)
        assert (status, body) == (431, b"The head of a request holds 64 KiB at most")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("ostinato.serve.wire.protocol.HEAD_S", 0.1)


async def test_a_head_that_comes_too_slowly_is_refused_however_many_requests_came_before(impatient):
    for earlier in (0, 2):
        async with listening() as (reader, writer):
            for _ in range(earlier):
                writer.write(GET + b"\r\n")
                assert (await answer(reader))[0] == 200
            writer.write(GET)
            status, body = await asyncio.wait_for(answer(reader), 2)
            assert (status, body) == (408, b"The head of a request must come within 10 s")
            assert await reader.read() == b""


async def test_trickling_bytes_buys_no_time(impatient):
    async with listening() as (reader, writer):
        closed = asyncio.ensure_future(reader.read())
        for byte in GET * 2:
            if closed.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        assert (await closed).startswith(b"HTTP/1.1 408 ")


async def test_a_connection_that_says_nothing_is_closed(impatient):
    async with listening() as (reader, _):
        assert await asyncio.wait_for(reader.read(), 2) == b""


async def test_a_quick_head_may_be_followed_by_a_pause(impatient):
    async with listening() as (reader, writer):
        for _ in range(2):
            writer.write(GET + b"\r\n")
            assert (await answer(reader))[0] == 200
            await asyncio.sleep(0.25)


async def test_a_next_request_begun_during_an_answer_does_not_cut_the_answer(impatient):
    async with world(engine=FakeEngine(lambda r: "x" * 40, delay_s=0.01), real=False) as w:
        async with listening(w.app) as (reader, writer):
            data = json.dumps({**ASK, "stream": True}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(data) + data)
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.write(GET)
            answered = await asyncio.wait_for(reader.read(), 5)
        assert b"data: [DONE]" in answered
        assert b"HTTP/1.1 408 " in answered
