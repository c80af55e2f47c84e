"""Closed-loop HTTP load: several connections, each of which sends its next call as soon as the last is answered.

Answers are only delimited, not parsed, because one core must be faster than any server on the other.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast


def request(path: str, body: bytes, key: str) -> bytes:
    """The bytes of a POST on a keep-alive connection."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


_ERROR = re.compile(rb'"error": ?[^n]')  # a response of `/v1/responses` has the field, and it is null

Source = Callable[[int], Iterator[bytes]]
"""The endless requests of a connection, given its number."""


@dataclass(slots=True)
class Tally:
    """The results of one load: seconds of each answered call, and the number of failed calls."""

    seconds: list[float] = field(default_factory=list)
    failures: int = 0
    first_failure: bytes = b""


class _Connection(asyncio.Protocol):
    """Sends a request, waits for the end of the answer, and goes on with the next one until the time is over."""

    def __init__(self, requests: Iterator[bytes], ends: float, tally: Tally) -> None:
        self._requests, self._ends, self._tally = requests, ends, tally
        self._answer = b""
        self._sent = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if not _complete(self._answer):
            return
        now = time.perf_counter()
        if self._answer.startswith(b"HTTP/1.1 200") and not _ERROR.search(self._answer, 0, 4096):
            self._tally.seconds.append(now - self._sent)
        else:
            self._tally.failures += 1
            self._tally.first_failure = self._tally.first_failure or self._answer[:1000]
        if now >= self._ends or self._tally.failures > 100:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def _send(self) -> None:
        self._answer = b""
        data = next(self._requests)
        self._sent = time.perf_counter()
        self._transport.write(data)


def _complete(answer: bytes) -> bool:
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        return False
    at = head.lower().find(b"content-length:")
    if at < 0:
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(head[at + 15 :].partition(b"\r\n")[0])


async def load(port: int, source: Source, *, connections: int, seconds: float) -> Tally:
    """Send load to a server for `seconds`."""
    loop = asyncio.get_running_loop()
    tally = Tally()
    ends = time.perf_counter() + seconds
    opened = [
        await loop.create_connection(partial(_Connection, source(number), ends, tally), "127.0.0.1", port)
        for number in range(connections)
    ]
    await asyncio.gather(*(protocol.done for _, protocol in opened))
    return tally
