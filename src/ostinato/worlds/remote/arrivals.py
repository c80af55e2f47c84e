"""Connections to the door, from TCP through the TLS handshake to admission: each stage has its own bound, and a handshake a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

logger = logging.getLogger(__name__)

HANDSHAKES = 128
"""Handshakes at once. One more ends the oldest: an honest one takes milliseconds, so those that are held open give way."""
HANDSHAKE_S = 10.0
CONNECTIONS = 1024

Certificate = Mapping[str, Any] | None


class Arrivals:
    """A protocol factory for plain TCP connections. Admitted ones go on to the HTTP server, over TLS.

    Args:
        server: answers requests.
        context: TLS that demands certificates.
        name_of: the name that a certificate's connections are counted under; None refuses them.
        per_name: most open connections under one name.

    Example: ``await loop.create_server(Arrivals(server, context, name_of, per_name=256), sock=listener)``
    """

    def __init__(
        self,
        server: web.Server,
        context: ssl.SSLContext,
        name_of: Callable[[Certificate], str | None],
        *,
        per_name: int,
    ) -> None:
        self._server, self._context, self._name_of, self._per_name = server, context, name_of, per_name
        self._handshakes: dict[asyncio.Transport, asyncio.Task[None]] = {}  # oldest first
        self._names: dict[object, str] = {}  # of the server's connections, open or closed since the last admission

    def __call__(self) -> asyncio.Protocol:
        return _Plain(self)

    async def close(self) -> None:
        """End the handshakes in progress."""
        for transport, task in list(self._handshakes.items()):
            transport.abort()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def begin(self, transport: asyncio.Transport) -> None:
        """A TCP connection was made."""
        if len(self._handshakes) >= HANDSHAKES:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]  # now, since its task ends later, and many more may come before
            oldest.abort()
        self._handshakes[transport] = asyncio.get_running_loop().create_task(self._shake(transport))

    async def _shake(self, transport: asyncio.Transport) -> None:
        guest = _Guest()
        try:
            tls = await asyncio.get_running_loop().start_tls(
                transport, guest, self._context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError:  # every failure of TLS and every deadline is one
            return
        finally:
            self._handshakes.pop(transport, None)
        if tls is not None and not tls.is_closing():
            self._admit(tls, guest)

    def _admit(self, tls: asyncio.Transport, guest: _Guest) -> None:
        """Hand a connection to the server, or close it."""
        name = self._name_of(tls.get_extra_info("peercert"))
        self._names = {each: self._names[each] for each in self._server.connections}
        every, own = len(self._names), Counter(self._names.values())[name or ""]
        if name is None or every >= CONNECTIONS or own >= self._per_name:
            if name is not None:
                logger.info("worker %r: %d connections are open, %d of its own; one more is closed", name, every, own)
            tls.close()
            return
        handler = self._server()
        self._names[handler] = name
        tls.set_protocol(handler)
        handler.connection_made(tls)
        for part in guest.early:
            handler.data_received(part)
        if guest.ended:
            handler.eof_received()


class _Plain(asyncio.Protocol):
    """A connection before its handshake."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._arrivals.begin(transport)


class _Guest(asyncio.Protocol):
    """A connection between its handshake and its admission, which follows at once: keeps what arrives in the meantime."""

    def __init__(self) -> None:
        self.early: list[bytes] = []
        self.ended = False

    def data_received(self, data: bytes) -> None:
        self.early.append(data)

    def eof_received(self) -> None:
        self.ended = True
