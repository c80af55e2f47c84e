"""A distant line to an HTTP server: round trips, a bandwidth cap, TCP's slow start, and requests that fail on the way.

    client ──▶ Link (127.0.0.1) ──▶ the server
               every request waits a round trip, a new connection some more; all bodies share one token bucket;
               each connection has a limit on bytes in flight; a seeded share of requests is refused or cut.

It does not lose packets (a lost packet shows as a shorter window), nor delay or cap uploads beyond the round trip.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass, field
from io import BytesIO
from types import TracebackType
from typing import Final, Literal, Self

import aiohttp
from aiohttp import web
from yarl import URL

Fate = Literal["whole", "damaged", "refused", "cut", "left"]
_PIECE: Final = 1 << 14
_BURST_S: Final = 0.025  # a sender that woke late may catch up by this much
_FIRST_WINDOW: Final = 14_600  # ten segments, RFC 6928
_IDLE_S: Final = 0.2  # plus a round trip: after that a connection is in slow start again, RFC 5681
_SLOW_DOWN: Final = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_OWN: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The distance, bandwidth and failure rate of a line.

    `round_trip_s` in seconds, `bytes_s` in bytes per second for all connections together, `window` the most bytes that one
    connection has in flight (a receiver's buffer), `handshakes` the round trips before a new connection carries a request (TCP and
    TLS 1.3: two). A share of `fail` requests fails: half are answered 503, half lose their connection in mid-body. A share of
    `damage` bodies arrives whole with one bit flipped.

    Example: ``Line(round_trip_s=0.145, bytes_s=12.5e6, fail=0.01, seed=3)``
    """

    round_trip_s: float
    bytes_s: float
    fail: float = 0.0
    damage: float = 0.0
    seed: int = 0
    window: int = 3 << 20
    handshakes: int = 2


@dataclass(slots=True, kw_only=True)
class Passed:
    """One request as the line saw it: times in `time.monotonic` seconds, `bytes` of body sent to the client.

    `start` is the first requested byte of the object. `fate`: whole, damaged, refused (503), cut, or left by the client.
    """

    method: str
    path: str
    start: int
    began: float
    fresh: bool
    first: float = 0.0
    ended: float = 0.0
    status: int = 0
    bytes: int = 0
    fate: Fate = "left"


@dataclass(slots=True)
class _Window:
    """The limit on one connection's bytes in flight: it doubles per round trip, up to the receiver's buffer."""

    size: int = _FIRST_WINDOW
    flying: int = 0
    last: float = 0.0
    flight: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    async def room(self, count: int, line: Line) -> None:
        now = time.monotonic()
        if not self.flight and now - self.last > _IDLE_S + line.round_trip_s:
            self.size = _FIRST_WINDOW
        while True:
            while self.flight and self.flight[0][0] <= now:
                acknowledged = self.flight.popleft()[1]
                self.flying -= acknowledged
                self.size = min(self.size + acknowledged, line.window)
            if not self.flight or self.flying + count <= self.size:
                return
            await asyncio.sleep(self.flight[0][0] - now)
            now = time.monotonic()

    def sent(self, count: int, line: Line) -> None:
        self.last = time.monotonic()
        self.flying += count
        self.flight.append((self.last + line.round_trip_s, count))


class Link:
    """A proxy on 127.0.0.1 that makes a server look as far away as `line` says. `passed` lists every request.

    Example::

        async with Link("http://127.0.0.1:5000", Line(round_trip_s=0.3, bytes_s=25e6)) as link:
            store = BucketStore(BucketConfig(url="s3://weights/run", options={"aws_endpoint": link.url, ...}))
    """

    def __init__(self, server: str, line: Line) -> None:
        self.line = line
        self.passed: list[Passed] = []
        self.url = ""
        self._server = server.rstrip("/")
        self._draw = random.Random(line.seed)
        self._free = 0.0  # when the line will have carried all data given to it so far
        self._windows: dict[asyncio.BaseTransport | None, _Window] = {}

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)  # pyright: ignore[reportArgumentType]
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._client.close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        fresh = request.transport not in self._windows
        window = self._windows.setdefault(request.transport, _Window())
        passed = Passed(
            method=request.method,
            path=request.path,
            start=request.http_range.start or 0,
            began=time.monotonic(),
            fresh=fresh,
        )
        self.passed.append(passed)
        failing, refused, at, damaged = (self._draw.random() for _ in range(4))
        try:
            await asyncio.sleep(self.line.round_trip_s * (1 + (self.line.handshakes if fresh else 0)))
            if failing < self.line.fail and refused < 0.5:
                passed.status, passed.fate = 503, "refused"
                return web.Response(status=503, body=_SLOW_DOWN, content_type="application/xml")
            cut_at = at if failing < self.line.fail else None
            return await self._pass(request, passed, window, cut_at, at if damaged < self.line.damage else None)
        except ConnectionError:  # the client went away
            return web.Response(status=499)
        finally:
            passed.ended = time.monotonic()
            passed.first = passed.first or passed.ended

    async def _pass(
        self,
        request: web.BaseRequest,
        passed: Passed,
        window: _Window,
        cut_at: float | None,
        flip_at: float | None,
    ) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN}
        headers["Host"] = request.headers["Host"]  # it is part of what the client signed
        url = URL(self._server + request.raw_path, encoded=True)
        body = await request.content.read()
        async with self._client.request(
            request.method, url, headers=headers, data=BytesIO(body) if body else None
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN}
            response = web.StreamResponse(status=answer.status, headers=kept)
            response.content_length = answer.content_length
            length = 0 if request.method == "HEAD" else answer.content_length or 0
            stop = None if cut_at is None else int(cut_at * length)
            flip = None if flip_at is None else int(flip_at * length)
            passed.status, passed.first = answer.status, time.monotonic()
            if stop != 0:  # if the cut is at byte 0, not even the head is sent
                await response.prepare(request)
                async for piece in answer.content.iter_chunked(_PIECE):
                    sound = piece if stop is None else piece[: stop - passed.bytes]
                    await self._carry(response, passed, window, _flipped(sound, flip, passed.bytes))
                    if passed.bytes == stop:
                        break
        if stop is None:
            await response.write_eof()
            passed.fate = "whole" if flip is None else "damaged"
        elif request.transport is not None:
            request.transport.abort()
            passed.fate = "cut"
        return response

    async def _carry(self, response: web.StreamResponse, passed: Passed, window: _Window, piece: bytes) -> None:
        await window.room(len(piece), self.line)
        now = time.monotonic()
        self._free = max(self._free, now - _BURST_S) + len(piece) / self.line.bytes_s
        if self._free > now:
            await asyncio.sleep(self._free - now)
        await response.write(piece)
        passed.bytes += len(piece)
        window.sent(len(piece), self.line)


def _flipped(piece: bytes, flip: int | None, start: int) -> bytes:
    """The piece that starts at byte `start`, with a bit of byte `flip` flipped if the piece holds that byte."""
    if flip is None or not 0 <= flip - start < len(piece):
        return piece
    damaged = bytearray(piece)
    damaged[flip - start] ^= 1
    return bytes(damaged)
