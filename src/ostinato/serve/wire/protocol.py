"""uvicorn's fast HTTP parser with a bound that it lacks: the head of a request may not grow without end."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
_REFUSED = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 42\r\nconnection: close\r\n\r\nThe head of a request holds 64 KiB at most"
)


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose request head goes on for more than `MAX_HEAD_BYTES`."""

    _in_head = True
    _head_ended = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._head_ended = False
        super().data_received(data)
        self._head_bytes = 0 if self._head_ended or not self._in_head else self._head_bytes + len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_REFUSED)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_ended = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()
