"""A socket that listens, and a uvicorn that ends when the worker says so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from ostinato.serve.wire.protocol import BoundedHttp


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the worker decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self):  # noqa: ANN201 (uvicorn's own signature)
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; the port may be 0. The protocol is named, or asyncio would leave Nagle's delay on."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(512)
    return listener


async def listen(
    asgi: ASGIApp,
    listener: socket.socket,
    stopping: asyncio.Event,
    say: Callable[[str], None],
    *,
    lifespan: bool = True,
) -> None:
    """Serve on a bound socket until told to stop. `say` gets the URL when the socket accepts."""
    host, port = listener.getsockname()[:2]
    settings = uvicorn.Config(
        asgi,
        http=BoundedHttp,
        log_level="warning",
        lifespan="on" if lifespan else "off",
        timeout_graceful_shutdown=5,
    )
    server = Server(settings)
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    say(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    stop.cancel()
    await running
