"""A socket that listens, and a uvicorn that ends when the worker says so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.launch.placing.port import url_of
from ostinato.serve.wire.protocol import BoundedHttp


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the worker decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self):  # noqa: ANN201 (uvicorn's own signature)
        yield


async def listen(
    asgi: ASGIApp,
    listener: socket.socket,
    stopping: asyncio.Event,
    say: Callable[[str], None],
    *,
    lifespan: bool = True,
) -> None:
    """Serve on a bound socket until told to stop. `say` gets the URL when the socket accepts. Raises what its start-up raised."""
    failed: list[BaseException] = []

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asgi(scope, receive, send)
        except BaseException as error:
            if scope["type"] == "lifespan":  # uvicorn only logs it
                failed.append(error)
            raise

    settings = uvicorn.Config(
        watched,
        http=BoundedHttp,
        log_level="warning",
        lifespan="on" if lifespan else "off",
        timeout_graceful_shutdown=5,
    )
    server = Server(settings)
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    say(url_of(listener))
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    stop.cancel()
    await running
    if failed:
        raise failed[0]
