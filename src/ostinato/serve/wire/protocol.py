"""uvicorn's fast HTTP parser, with the limits that it lacks: on the size and duration of each part of a request, on how long a response may
stay unread, and on the number of open connections and pipelined requests. No client can hold an idle connection forever.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ostinato.serve.wire.connections import Connections

MAX_HEAD_BYTES = 65_536
HEAD_S = 10.0
UNREAD_S = 30.0
MOST_PIPELINED = 64
_MOST_FRAMING, _FRAMED = 65_536, 16  # bytes of framing per body, and more per byte of it: the smallest chunk takes five
_UPGRADE = re.compile(rb"(\n)upgrade(?=[ \t]*(?::|\Z))", re.IGNORECASE)  # the colon may come with the next read
_LEAST_READ_BYTES = 16_384  # a client that reads less than this per `UNREAD_S` counts as not reading


def _refusal(status: bytes, why: bytes) -> bytes:
    head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close" % len(why)
    return b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (status, head, why)


_TOO_LONG = _refusal(b"431 Request Header Fields Too Large", b"The request line and headers may take at most 64 KiB")
_TOO_SLOW = _refusal(b"408 Request Timeout", b"The request line and headers must arrive within 10 s")


class BoundedHttp(HttpToolsProtocol):
    """An HTTP protocol that closes connections which are held without need.

    It answers HTTP/1.0 without chunked encoding, and ignores requests to upgrade to another protocol (Java's HttpClient asks every
    plain-text server for HTTP/2). It closes a connection in any of these cases:

    - A request's head is longer than `MAX_HEAD_BYTES` or incomplete after `HEAD_S`. Trailers after a body count as a head, and a
      connection that sends nothing after it was opened counts as slow.
    - The framing of a body takes many times as much as the body, as with long chunk extensions.
    - A request was answered before its end, and the rest does not arrive within `HEAD_S`.
    - Written data stays unread for `unread_s` to twice that; only a reset frees such a connection.
    - More than `MOST_PIPELINED` requests wait for the response to an earlier one.
    - There are more connections than `connections` admits.
    """

    _in_head = True
    # the current data ended a head, a body or a part of one, so the bytes after that are few
    _passed = False
    _head_bytes = 0
    _last = b""  # the last ten bytes received, across reads
    _raw = _body = 0  # bytes received of the current request, and of its body
    # deadline for a head, or for the rest of a request that is already answered
    _due: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _unread = 0  # unread bytes at the last check
    _entered = False

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections | None = None,
        unread_s: float = UNREAD_S,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._open = connections or Connections()
        self._unread_s = unread_s
        self._paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._entered = self._open.enter(self._address)
        if not self._entered:
            transport.abort()
            return
        self._start_deadline()
        self._look = self.loop.call_later(self._unread_s, self._look_at_unread)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self._look is not None:
            self._look.cancel()
        if self._entered:
            self._open.leave(self._address)
        super().connection_lost(exc)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    # ------------------------------------------------------------ receiving

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_bytes + len(data) > MAX_HEAD_BYTES and self._is_long_head(data):
            self._refuse(_TOO_LONG)
            return
        if self._in_head:
            data = self._without_upgrade(data)
        self._passed = False
        self._raw += len(data)
        self._last = (self._last + data)[-10:]
        super().data_received(data)
        if self._raw > MAX_HEAD_BYTES + _MOST_FRAMING + _FRAMED * self._body:
            self._refuse(b"")
            return
        self._head_bytes = 0 if self._passed else self._head_bytes + len(data)
        if not self._head_bytes:
            return
        if self._due is None and self._in_head:
            self._start_deadline()
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LONG)

    def _without_upgrade(self, data: bytes) -> bytes:
        """Return the data without an Upgrade header, which would make the parser leave everything after the head to another protocol."""
        head = data.partition(b"\r\n\r\n")[0]
        kept = _UPGRADE.sub(rb"\1ignored", self._last + head)[len(self._last) :]  # the length does not change
        return kept + data[len(head) :]

    def _is_long_head(self, data: bytes) -> bool:
        """True if the head that continues in this data is too long, even if it ends there."""
        last = self._last[-3:]  # not more, since that could include the end of the previous head
        end = (last + data).find(b"\r\n\r\n")
        return self._head_bytes + (len(data) if end < 0 else end - len(last)) > MAX_HEAD_BYTES

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers after a body are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._passed = True
        self._cancel_deadline()
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.abort()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._passed = True
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._raw = self._body = 0
        self._passed = True
        super().on_message_complete()
        # uvicorn's timer for the next head was cancelled when the rest of this request came
        if self.cycle.response_complete:
            self._cancel_deadline()
            self._start_deadline()

    # ------------------------------------------------------------ sending

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        framed: Any = _UnchunkedApp(app, cycle) if cycle.scope["http_version"] == "1.0" else app
        super()._start_asgi_task(cycle, framed)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # the rest of the body will cancel uvicorn's timer, and nothing starts another
        if not self._in_head and self.cycle.response_complete:
            self._start_deadline()

    def pause_writing(self) -> None:
        self._paused = True
        super().pause_writing()

    def resume_writing(self) -> None:
        self._paused = False
        self._unread = 0
        super().resume_writing()

    # ------------------------------------------------------------ deadlines

    def _start_deadline(self) -> None:
        self._due = self.loop.call_later(HEAD_S, self._deadline_passed)

    def _cancel_deadline(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _deadline_passed(self) -> None:
        self._due = None
        if self.cycle and not self.cycle.response_complete:
            # a part of the next request's head arrived while a response is sent: let the response finish
            self._start_deadline()
        else:  # a client that has sent nothing is closed without a message
            self._refuse(_TOO_SLOW if self._in_head and self._head_bytes else b"")

    def _look_at_unread(self) -> None:
        before = self._unread
        # otherwise the buffer may hold only data written since the last check
        stuck = self._paused or self.transport.is_closing()
        self._unread = self.transport.get_write_buffer_size() if stuck else 0
        if 0 < before < self._unread + _LEAST_READ_BYTES:
            self.transport.abort()
        else:
            self._look = self.loop.call_later(self._unread_s, self._look_at_unread)

    def _refuse(self, why: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(why)
            self.transport.close()


class _UnchunkedApp:
    """An app whose responses of unknown length end when the connection closes, for HTTP/1.0."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app, self._cycle = app, cycle
        self._turn, self._unknown = asyncio.Lock(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(message: Message) -> None:
            async with self._turn:  # uvicorn must see the announced length of one piece at a time
                if message["type"] == "http.response.start":
                    known = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                    self._cycle.chunked_encoding = None if known else False
                    self._unknown = not known
                elif self._unknown:
                    self._cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

        await self._app(scope, receive, put)
