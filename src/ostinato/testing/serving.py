"""`serving`: an ASGI app behind a real socket in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

_START_TIMEOUT_S = 300.0  # a busy machine may take long


class _Server(uvicorn.Server):
    """uvicorn that an event stops at once. It polls its own flag only ten times a second, which would slow down every test."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ended.wait()


@asynccontextmanager
async def serving(app: ASGIApp, *, lifespan: bool = True) -> AsyncGenerator[str, None]:
    """Serve `app` on a free loopback port; yields its base URL, for example "http://127.0.0.1:43127"."""
    # asyncio disables Nagle's algorithm only if the protocol is named
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on" if lifespan else "off",
        timeout_graceful_shutdown=3,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not server.started and not task.done():  # uvicorn signals its start by a flag, not by an event
                await asyncio.sleep(0.005)
        if task.done():
            task.result()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.ended.set()
        await task
        listener.close()
