"""What a connection may hold is bounded, whoever opened it and whatever it sends, or leaves unsent and unread."""

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager
from functools import wraps

import pytest
import uvicorn
import uvloop
from gateway_world import ASK, World, eventually, world
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.virtual_time import advance, in_held_time, until

from ostinato.serve.config import ServeConfig
from ostinato.serve.wire.connections import Connections
from ostinato.serve.wire.protocol import _LEAST_READ_BYTES, MAX_HEAD_BYTES, MOST_PIPELINED, BoundedHttp
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


def as_the_worker_does(test):
    """Run on uvloop, whose transports close and report what lies unread in their own way."""

    @wraps(test)
    def run(**given):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(**given))

    return run


@asynccontextmanager
async def served(app=None, **bounds):
    """The address of a server, and the connections that it holds."""
    app = app or World(FakeEngine(), MemoryLog(), ServeConfig(), ByteRenderer()).app
    config = uvicorn.Config(app, log_config=None, lifespan="off")
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedHttp(config, state, {}, **bounds), "127.0.0.1", 0)
    try:
        async with asyncio.timeout(PATIENT_S):
            yield server.sockets[0].getsockname(), state.connections
    finally:
        for connection in list(state.connections):
            connection.transport.abort()
        server.close()


@asynccontextmanager
async def connected(app=None, **bounds):
    """A client's two ends, and the server's."""
    async with served(app, **bounds) as (address, connections):
        reader, writer = await asyncio.open_connection(*address)
        try:
            while not connections:
                await asyncio.sleep(0)
            yield reader, writer, next(iter(connections))
        finally:
            writer.transport.abort()


@asynccontextmanager
async def listening(app=None, **bounds):
    async with connected(app, **bounds) as (reader, writer, _):
        yield reader, writer


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


@pytest.mark.parametrize("cut", [None, 30, *range(72, 84), 0], ids=str)
async def test_a_client_that_asks_for_another_protocol_is_answered_in_this_one(cut):
    """As Java's HttpClient and `curl --http2` ask each plain address, with a body that is HTTP/1.1's all the same."""
    body = json.dumps({**ASK, "messages": [{"role": "user", "content": "a\r\nUpgrade: b"}]}, indent=1).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHost: localhost\r\n"
    head += b"HTTP2-Settings: AAEAAEAA\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    w = World(FakeEngine(lambda _: "hello"), MemoryLog(), ServeConfig(), ByteRenderer())
    async with listening(w.app) as (reader, writer):
        for _ in range(2):
            pieces = [head, body] if cut is None else [head[:cut], head[cut:] + body]
            if cut == 0:  # each byte by itself
                pieces = [*(head[i : i + 1] for i in range(len(head))), body]
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01 if cut != 0 else 0.001)
            status, told = await answer(reader)
            assert (status, json.loads(told)["choices"][0]["message"]["content"]) == (200, "hello")
            assert "a\r\nUpgrade: b" in decode(w.log.turns()[-1].prompt_ids)


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


@pytest.mark.parametrize("cut", [MAX_HEAD_BYTES - 2, 40_000, 2])
async def test_a_long_head_is_refused_though_its_end_is_there_at_once(cut):
    head = GET + b"x: " + b"y" * (MAX_HEAD_BYTES - len(GET) - 7) + b"\r\n\r\n"
    async with listening() as (reader, writer):
        writer.write(head[:cut])
        await writer.drain()
        await asyncio.sleep(0.05 if cut < len(head) else 0)
        writer.write(head[cut:])
        assert (await answer(reader))[0] in (200, 503), "as long as it may be"
    async with listening() as (reader, writer):
        writer.write(head.replace(b"y", b"y" * 6, 1) + b"z" * 10_000)
        assert (await answer(reader))[0] == 431


async def test_chunks_that_are_all_extension_are_cut_off():
    chunk = b"1;" + b"x" * 15_000 + b"\r\ny\r\n"
    async with listening() as (reader, writer):
        writer.write(b"POST /v1/feedback HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 100 and not reader.at_eof():
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(0.01)
                sent += 1
        assert sent < 50


async def test_a_body_in_many_small_chunks_is_taken():
    body = json.dumps(ASK).encode()
    async with listening() as (reader, writer):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        body += b" " * 20_000
        for at in range(len(body)):
            writer.write(b"1\r\n" + body[at : at + 1] + b"\r\n")
        writer.write(b"0\r\n\r\n")
        assert (await answer(reader))[0] == 200


async def test_the_refusal_says_why():
    async with listening() as (reader, writer):
        writer.write(GET + b"x-long: " + b"y" * (MAX_HEAD_BYTES + 1000))
        status, body = await answer(reader)
        assert (status, body) == (431, b"The request line and headers may take at most 64 KiB")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("ostinato.serve.wire.protocol.HEAD_S", 0.1)


@in_held_time
async def test_a_head_that_comes_too_slowly_is_refused_however_many_requests_came_before(impatient):
    for earlier in (0, 2):
        async with connected() as (reader, writer, server):
            for _ in range(earlier):
                writer.write(GET + b"\r\n")
                assert (await answer(reader))[0] == 200
            writer.write(GET)
            await until(lambda server=server: server._head_bytes)
            await advance(0.11)
            status, body = await answer(reader)
            assert (status, body) == (408, b"The request line and headers must arrive within 10 s")
            assert await reader.read() == b""


@in_held_time
async def test_trickling_bytes_buys_no_time(impatient):
    async with connected() as (reader, writer, server):
        closed = asyncio.ensure_future(reader.read())
        for count, byte in enumerate(GET * 2, 1):
            writer.write(bytes([byte]))
            await until(lambda count=count: server._head_bytes == count or server.transport.is_closing())
            await advance(0.02)
            if server.transport.is_closing():
                break
        assert count < 10
        with contextlib.suppress(ConnectionResetError):  # a byte that came too late can cost the answer
            assert (await closed).startswith(b"HTTP/1.1 408 ")


@in_held_time
async def test_a_connection_that_says_nothing_is_closed(impatient):
    async with listening() as (reader, _):
        await advance(0.11)
        assert await reader.read() == b""


@in_held_time
async def test_a_quick_head_may_be_followed_by_a_pause(impatient):
    async with listening() as (reader, writer):
        for _ in range(2):
            writer.write(GET + b"\r\n")
            assert (await answer(reader))[0] == 200
            await advance(0.25)


async def meanwhile(reading):
    """What is read while time passes."""
    task = asyncio.ensure_future(reading)
    while not task.done():
        await advance(0.01)
    return await task


@in_held_time
async def test_a_next_request_begun_during_an_answer_does_not_cut_the_answer(impatient):
    async with world(engine=FakeEngine(lambda r: "x" * 40, delay_s=0.01), real=False) as w:
        async with connected(w.app) as (reader, writer, server):
            data = json.dumps({**ASK, "stream": True}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(data) + data)
            assert await meanwhile(reader.readline()) == b"HTTP/1.1 200 OK\r\n"
            writer.write(GET)
            await until(lambda: server._head_bytes)
            answered = await meanwhile(reader.read())
        assert b"data: [DONE]" in answered
        assert b"HTTP/1.1 408 " in answered


# ------------------------------------------------------------ after an answer that came before the end of its question

HALF = b"POST /v1/feedback HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n"  # refused without its body


@in_held_time
async def test_the_rest_of_a_body_that_nobody_waits_for_holds_no_connection(impatient):
    async with connected() as (reader, writer, server):
        writer.write(HALF)
        assert (await answer(reader))[0] == 400
        writer.write(b"x")
        await until(lambda: server._body == 1)
        await advance(0.11)
        assert await reader.read() == b""


@in_held_time
async def test_silence_after_the_rest_of_a_body_holds_no_connection(impatient):
    async with connected() as (reader, writer, server):
        writer.write(HALF)
        assert (await answer(reader))[0] == 400
        writer.write(b"x" * 10)
        await until(lambda: server._in_head)
        await advance(0.11)
        assert await reader.read() == b""


@in_held_time
async def test_who_sends_the_rest_of_a_body_may_go_on(impatient):
    async with listening() as (reader, writer):
        for _ in range(3):
            writer.write(HALF)
            assert (await answer(reader))[0] == 400
            writer.write(b"x" * 10 + GET + b"\r\n")
            assert (await answer(reader))[0] == 200
            await advance(0.2)


async def test_what_follows_a_body_is_bounded_like_a_head():
    async with connected() as (reader, writer, server):
        head = b"POST /v1/feedback HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        while not server._body:  # it reads this first: what comes in one piece with a body's end is not counted
            await asyncio.sleep(0.001)
        for _ in range(2 * MAX_HEAD_BYTES // 1000):
            writer.write(b"x-more: " + b"y" * 990 + b"\r\n")
        assert (await answer(reader))[0] == 431


# ------------------------------------------------------------ answers that nobody reads

PAGE = b"x" * 16 * 2**20


async def page(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(PAGE))]})
    await send({"type": "http.response.body", "body": PAGE})


@pytest.mark.parametrize("more", [b"", b"connection: close\r\n"])
@as_the_worker_does
async def test_an_answer_that_nobody_reads_holds_no_connection(more):
    async with served(page, unread_s=0.1) as (address, connections):
        reader, writer = await asyncio.open_connection(*address, limit=1024)
        writer.write(GET + more + b"\r\n")
        await eventually(lambda: connections)
        await eventually(lambda: not connections)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(len(PAGE))
        writer.transport.abort()


@as_the_worker_does
async def test_an_answer_may_be_read_slowly():
    async with connected(page, unread_s=WHOLE_PROGRAM_S) as (reader, writer, server):
        writer.write(GET + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(4):  # more often than a reader may be found to have read nothing
            unread = server.transport.get_write_buffer_size()
            await reader.readexactly(len(PAGE) // 4)
            await eventually(
                lambda unread=unread: server.transport.get_write_buffer_size() <= max(0, unread - _LEAST_READ_BYTES)
            )
            server._look_at_unread()


@as_the_worker_does
async def test_only_so_many_requests_wait_for_an_earlier_one():
    async with listening() as (reader, writer):
        writer.write((GET + b"\r\n") * MOST_PIPELINED)
        assert [(await answer(reader))[0] for _ in range(MOST_PIPELINED)] == [200] * MOST_PIPELINED
        writer.write((GET + b"\r\n") * 4 * MOST_PIPELINED)
        with contextlib.suppress(ConnectionError):
            assert (await reader.read()).count(b"HTTP/1.1 ") < 4 * MOST_PIPELINED


# ------------------------------------------------------------ many connections


@pytest.mark.parametrize("bounds", [{"most": 2}, {"per_address": 2}])
@as_the_worker_does
async def test_one_connection_too_many_is_closed_at_once_and_one_that_ends_makes_room(bounds):
    async with served(connections=Connections(**bounds)) as (address, connections):
        opened = [await asyncio.open_connection(*address) for _ in range(3)]
        for number, (reader, writer) in enumerate(opened):
            writer.write(GET + b"\r\n")
            if number < 2:
                assert (await answer(reader))[0] == 200
            else:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError, IndexError)):
                    await answer(reader)
        opened[0][1].close()
        await eventually(lambda: len(connections) == 1)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(GET + b"\r\n")
        assert (await answer(reader))[0] == 200
        for _, each in (*opened, (reader, writer)):
            each.transport.abort()


def test_connections_are_counted_by_host_and_network():
    open_ = Connections(per_address=1, most=4)
    assert [open_.enter(each) for each in ("10.0.0.1", "10.0.0.1", "10.0.0.2")] == [True, False, True]
    assert [open_.enter(each) for each in ("2001:db8::1", "2001:db8::2:1", "2001:db8:0:1::1")] == [True, False, True]
    assert not open_.enter("10.0.0.3"), "there are four"
    open_.leave("2001:db8::1")
    assert open_.enter("::ffff:10.0.0.3")
    assert not open_.enter("10.0.0.3")
    for each in ("10.0.0.1", "10.0.0.2", "2001:db8:0:1::1", "::ffff:10.0.0.3"):
        open_.leave(each)
    assert not open_._open
    assert all(Connections().enter("10.0.0.1") for _ in range(100))


async def asked_in_1_0(path, body, *headers):
    """The head and the body of the answer to an HTTP/1.0 request, read until the connection ends."""
    async with listening() as (reader, writer):
        data = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.0", "content-type: application/json", "host: localhost", *headers]
        writer.write("\r\n".join([*head, f"content-length: {len(data)}", "", ""]).encode() + data)
        top, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        return top.lower(), rest


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"])
@pytest.mark.parametrize("headers", [(), ("connection: keep-alive",)])
async def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(path, headers):
    most = {"max_tokens": 8}
    prompt = {"/v1/responses": {"input": "hi"}, "/v1/completions": {"prompt": "hi", **most}}
    asked = prompt.get(path, {"messages": ASK["messages"], **most})
    top, rest = await asked_in_1_0(path, {"model": "m", "stream": True, **asked}, *headers)
    assert b" 200 " in top
    assert b"chunked" not in top
    assert b"connection: close" in top
    assert rest.startswith((b"data: ", b"event: ", b": "))
    assert rest.endswith(b"\n\n")
    lines = rest.split(b"\n")
    assert all(line == b"" or line.split(b":")[0] in (b"data", b"event", b"") for line in lines)


async def test_a_whole_answer_and_an_error_over_http_1_0_keep_their_length():
    for body, status in (ASK, b" 200 "), ({**ASK, "messages": 1}, b" 400 "):
        top, rest = await asked_in_1_0("/v1/chat/completions", body)
        assert status in top
        assert b"chunked" not in top
        assert f"content-length: {len(rest)}".encode() in top
        json.loads(rest)
