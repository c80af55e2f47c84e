"""uvicorn's fast HTTP parser with two bounds that it lacks: the head of a request may grow only so long, and take only so long."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
HEAD_S = 10.0


def _refusal(status: bytes, why: bytes) -> bytes:
    head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close" % len(why)
    return b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (status, head, why)


_TOO_LONG = _refusal(b"431 Request Header Fields Too Large", b"The head of a request holds 64 KiB at most")
_TOO_SLOW = _refusal(b"408 Request Timeout", b"The head of a request must come within 10 s")


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose request head goes on for more than `MAX_HEAD_BYTES`, or is not whole after `HEAD_S`.

    A connection that sends nothing at all after it was opened counts as one that is slow.
    """

    _in_head = True
    _passed = False  # a head or a body ended in these bytes: what is left of them cannot be long
    _head_bytes = 0
    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._head_due = self.loop.call_later(HEAD_S, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._passed = False
        super().data_received(data)
        self._head_bytes = 0 if self._passed or not self._in_head else self._head_bytes + len(data)
        if not self._head_bytes:
            return
        if self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_S, self._late)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LONG)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._passed = True
        self._in_time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._passed = True
        super().on_message_complete()

    def _in_time(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _late(self) -> None:
        self._head_due = None
        if self.cycle and not self.cycle.response_complete:
            # the head of a next request, come in part while an answer is being sent: the answer goes first
            self._head_due = self.loop.call_later(HEAD_S, self._late)
        else:  # who has said nothing is told nothing
            self._refuse(_TOO_SLOW if self._head_bytes else b"")

    def _refuse(self, why: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(why)
            self.transport.close()
