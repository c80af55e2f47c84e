"""The HTTP server: uvicorn on a bound socket, stopped by the worker."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.launch.placing.address import url_of
from ostinato.serve.wire.connections import Connections
from ostinato.serve.wire.protocol import UNREAD_S, BoundedHttp

# longer than a client or load balancer keeps a connection (aiohttp 15, AWS 60), or a request could arrive on one that was just closed
KEEP_ALIVE_S = 75
_REQUESTS_S, _CANCELLED_S = 5, 10.0


class HttpServer(uvicorn.Server):
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
    connections: Connections | None = None,
    unread_s: float = UNREAD_S,
    keep_alive_s: int = KEEP_ALIVE_S,
) -> None:
    """Serve on a bound socket until told to stop. Raises what the app's lifespan raised.

    Open requests have `_REQUESTS_S` seconds to end. When cancelled, it ends the server first, for at most `_CANCELLED_S` seconds.

    Args:
        asgi: the app.
        listener: the bound socket.
        stopping: set when the server should end.
        say: called with the URL once the socket accepts connections.
        lifespan: whether the app has start-up and shutdown handlers.
        connections: limits the open connections; None for no limit.
        unread_s: seconds for which a client may leave an answer unread.
        keep_alive_s: seconds for which a connection without a request stays open.
    """
    failed: list[BaseException] = []

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asgi(scope, receive, send)
        except BaseException as error:
            if scope["type"] == "lifespan":  # uvicorn only logs it
                failed.append(error)
            raise

    protocol: Any = partial(BoundedHttp, connections=connections, unread_s=unread_s)  # uvicorn only calls it
    settings = uvicorn.Config(
        watched,
        http=protocol,
        ws="none",  # WebSocket connections would escape these limits
        proxy_headers=False,  # otherwise a client could forge its address in the audit trail
        log_level="warning",
        lifespan="on" if lifespan else "off",
        timeout_graceful_shutdown=_REQUESTS_S,
        timeout_keep_alive=keep_alive_s,
    )
    server = HttpServer(settings)
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    say(url_of(listener))
    await _serve_until(stopping, server, running)
    if failed:
        raise failed[0]


async def _serve_until(stopping: asyncio.Event, server: HttpServer, running: asyncio.Future[None]) -> None:
    """Wait until `stopping` is set or the server ends by itself, and end it. Raises what `running` raises."""
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:  # the caller closes next what the app needs
        server.should_exit = True
        await asyncio.wait({running}, timeout=_CANCELLED_S)
        running.cancel()
        raise
    finally:
        stop.cancel()
    server.should_exit = True
    await running
