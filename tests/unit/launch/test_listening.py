"""How long an idle connection lives: longer than clients keep theirs, so that none sends into one that is being closed."""

import asyncio
import contextlib
import inspect

from tests.virtual_time import advance, in_held_time

from ostinato.launch.placing.address import bind
from ostinato.launch.workers.http_server import KEEP_ALIVE_S, listen
from ostinato.serve.config import ServeConfig

CLIENTS = {"httpx": 5.0, "aiohttp": 15.0, "AWS's balancer": 60.0}
"""Seconds that they keep an idle connection by default."""


async def page(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@in_held_time
async def test_an_idle_connection_lives_as_long_as_is_set():
    stopping, urls = asyncio.Event(), []
    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(listen(page, listener, stopping, urls.append, lifespan=False, keep_alive_s=7))
        while not urls:
            await advance(0.01)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        with contextlib.closing(writer):
            for pause in (5.5, 6.9, 7.1):
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                await advance(pause)
            assert await reader.read() == b""
        stopping.set()
        while not serving.done():
            await advance(0.01)
        await serving


@in_held_time
async def test_a_server_that_is_cancelled_closes_its_connections_first():
    """The engine's end cancels it: what its answers are made of is closed next."""
    urls = []
    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(listen(page, listener, asyncio.Event(), urls.append, lifespan=False))
        while not urls:
            await advance(0.01)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        with contextlib.closing(writer):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            serving.cancel()
            while not serving.done():
                await advance(0.01)
            assert serving.cancelled()
            ended = asyncio.create_task(reader.read())
            await advance(0.01)
            assert ended.done()
            assert ended.result() == b""


@in_held_time
async def test_a_server_that_is_cancelled_is_not_waited_for_without_end():
    async def stuck(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.Event().wait()

    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(listen(stuck, listener, asyncio.Event(), lambda url: None))
        await advance(1.0)
        serving.cancel()
        for _ in range(90):
            await advance(0.1)
        assert not serving.done()
        for _ in range(20):
            await advance(0.1)
        assert serving.cancelled()


async def test_no_client_names_the_address_that_it_comes_from():
    """The audit trail has the address of who connected, and some proxies pass on what a client says of itself."""
    stopping, seen, urls = asyncio.Event(), [], []

    async def looks(scope, receive, send):
        seen.append((scope["client"][0], scope["scheme"]))
        await page(scope, receive, send)

    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(listen(looks, listener, stopping, urls.append, lifespan=False))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        with contextlib.closing(writer):
            writer.write(
                b"GET / HTTP/1.1\r\nhost: x\r\nx-forwarded-for: 203.0.113.9\r\nx-forwarded-proto: https\r\n\r\n"
            )
            await reader.readuntil(b"ok")
        stopping.set()
        await serving
    assert seen == [("127.0.0.1", "http")]


def test_no_client_keeps_its_connections_as_long_as_the_server():
    assert inspect.signature(listen).parameters["keep_alive_s"].default == KEEP_ALIVE_S
    assert min(KEEP_ALIVE_S, ServeConfig().keep_alive_s) > max(CLIENTS.values())
