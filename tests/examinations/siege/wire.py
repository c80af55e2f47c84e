"""Requests as bytes, each on a connection of its own, and what became of them."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

LATE_S = 120.0
"""Longest wait for an answer, in seconds: the attackers' own requests may wait for each other."""
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: chunked\r\n", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_KEPT = 300  # bytes of an answer that are kept, to be shown if it is not a right one


@dataclass(frozen=True, slots=True)
class Answer:
    """`outcome`: the status, or how the connection ended without a whole answer: closed, cut, refused, late, or an error of the system."""

    outcome: str
    said: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The gateway, the attacking tenant's key, and a turn of that tenant's own.

    Example: ``Target(host="127.0.0.1", port=8321, key="sk-...", turn="chatcmpl-...:0")``
    """

    host: str
    port: int
    key: str
    turn: str

    @asynccontextmanager
    async def connected(
        self, source: str, limit: int = 1 << 16
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection from this address of this machine, aborted at the end. At most twice `limit` bytes are read ahead."""
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        opened.setblocking(False)
        try:
            if limit < 1 << 16:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limit)
            opened.bind((source, 0))
            await asyncio.get_running_loop().sock_connect(opened, (self.host, self.port))
            reader, writer = await asyncio.open_connection(sock=opened, limit=limit)
        except BaseException:
            opened.close()
            raise
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def ask(self, data: bytes, source: str) -> Answer:
        """The answer to one request."""
        async with self.connected(source) as (reader, writer):
            writer.write(data)
            return await answer(reader)


async def answer(reader: asyncio.StreamReader) -> Answer:
    """The next answer on a connection, read to its end. Raises IncompleteReadError if none came."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, said = head.split(b" ", 2)[1].decode(), b""
    if found := _LENGTH.search(head):
        said = await reader.readexactly(int(found[1]))
    elif _CHUNKED.search(head):
        end = b"\r\n"
        while not end.endswith(_LAST_CHUNK):
            if not (piece := await reader.read(1 << 16)):
                return Answer("cut", said)
            said, end = said + piece[: _KEPT - len(said)], (end + piece)[-len(_LAST_CHUNK) :]
    return Answer(status, said[:_KEPT])


async def outcome(asking: Awaitable[Answer]) -> Answer:
    """The answer, or how the connection ended without one."""
    try:
        async with asyncio.timeout(LATE_S):
            return await asking
    except TimeoutError:
        return Answer("late")
    except ConnectionRefusedError:
        return Answer("refused")
    except (ConnectionError, asyncio.IncompleteReadError):
        return Answer("closed")
    except OSError as error:
        return Answer(errno.errorcode.get(error.errno or 0, type(error).__name__))


def request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a request with a JSON body, or with none."""
    lines = {"host": "127.0.0.1", "content-length": str(len(body)), "content-type": "application/json"}
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
