"""One HTTP request and its response: headers, the JSON body, and a response sent whole or streamed, each in bounded time.

`Endpoint`, the outermost layer of each route, checks the origin, turns exceptions into its dialect's errors, and counts statuses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ostinato.core.errors import BadRequest, NotFound, OstinatoError, Unavailable
from ostinato.core.json_shape import LONG_BYTES
from ostinato.serve.config import ServeConfig
from ostinato.serve.dialects.dialect import ErrorShape, printable
from ostinato.serve.dialects.openai_reply import error_body, json_bytes
from ostinato.serve.metrics import Metrics
from ostinato.serve.wire.body import content_type, parse_json, read_body
from ostinato.serve.wire.origins import CrossSite, Headers, Origins
from ostinato.serve.wire.watch import ClientGone, DisconnectWatch

MAX_HEADER_CHARS = 512
JSON = b"application/json"

_SESSION = "ostinato.session"  # a key of the scope


def strip_session(scope: Scope) -> Scope:
    """Strip `/s/SESSION` from a path and keep the session's name, for clients that can configure a URL but no header.

    Example: ``strip_session({"path": "/s/fix-login/v1/models"})["path"] == "/v1/models"``
    """
    path: str = scope["path"]
    if not path.startswith("/s/"):
        return scope
    name, slash, rest = path.removeprefix("/s/").partition("/")
    return {**scope, "path": f"/{rest}", _SESSION: name} if slash and rest.startswith("v1/") else scope


def normalised_path(scope: Scope) -> Scope:
    """Remove doubled and trailing slashes from a path below /v1; clients produce them when they join a base URL and a path.

    Example: ``normalised_path({"path": "//v1//models/"})["path"] == "/v1/models"``
    """
    path = "/" + "/".join(filter(None, scope["path"].split("/")))
    return strip_session({**scope, "path": path}) if path.startswith(("/v1/", "/s/")) else scope


def _checked(name: str, value: str) -> str:
    """Return a header's value if it has the characters that names in a body may have. Raises BadRequest."""
    with suppress(ValueError):
        if 0 < len(value) <= MAX_HEADER_CHARS:
            return printable(value)
    raise BadRequest(f"{name} must hold 1 to {MAX_HEADER_CHARS} printable characters.", field=name)


class Exchange:
    """A request and its response, as handlers get it.

    `status` is 0 until the response's head is sent. `body_sent` is False until a part of the body is sent (heartbeats do not count).
    `watch` is set while a model call runs. `came_at` is when the request's head was read, by `time.monotonic`. `received` is the number
    of body bytes, decompressed. `shared` holds the CORS headers of every response. `failure` formats an error that ends a stream which
    has begun.

    Example: ``await exchange.reply(200, json_bytes({"object": "list"}))``
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: ServeConfig) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self._session: str | None = scope.get(_SESSION)
        self.receive = receive
        self.received = 0
        self.came_at = time.monotonic()
        self.status = 0
        self.body_sent = False
        self.shared: Headers = []
        self.failure: Callable[[OstinatoError], str] = str
        self.watch: DisconnectWatch | None = None
        self._send = send
        self._config = config

    def text(self, name: str) -> str | None:
        """Return a header's value as UTF-8, or as Latin-1 if it is not; None if it is absent. Raises BadRequest."""
        raw = self.headers.get(name.lower().encode())
        if raw is None:
            return None
        try:
            value = raw.decode()
        except UnicodeDecodeError:
            value = raw.decode("latin-1")
        return _checked(name, value)

    @property
    def session(self) -> str | None:
        """The session named in the path (`/s/SESSION/v1/...`); None if there is none. Raises BadRequest."""
        return None if self._session is None else _checked("The session in the address", self._session)

    async def json(self, charge: Callable[[int], None]) -> Any:
        """Read the body and return its JSON value; `charge` as in `read_body`. Raises BadRequest, TooLarge, ClientGone."""
        return await self.value(await self.body(charge))

    async def value(self, data: bytes) -> Any:
        """Return the JSON value of a body, parsed on a thread if it is long. Raises BadRequest, TooLarge."""
        return self.parsed(data) if len(data) <= LONG_BYTES else await asyncio.to_thread(self.parsed, data)

    def parsed(self, data: bytes, unread: Collection[str] = ()) -> Any:
        """Return the JSON value of a body; items of the lists in the fields `unread` stay text. Raises BadRequest, TooLarge."""
        return parse_json(data, depth=self._config.max_depth, values=self._config.max_values, unread=unread)

    async def body(self, charge: Callable[[int], None]) -> bytes:
        """Read the body, whose type must be JSON; `charge` as in `read_body`. Raises BadRequest, TooLarge, ClientGone."""
        kind = content_type(self.headers)
        if kind != "application/json":  # this also keeps a web page from posting here without a CORS preflight
            raise BadRequest(f"Content-Type is {kind or 'missing'!r}; send 'application/json'.")
        return await self.data(charge)

    async def data(self, charge: Callable[[int], None]) -> bytes:
        """Read the body of any type, decompressed; `charge` as in `read_body`. Raises BadRequest, TooLarge, ClientGone."""
        config = self._config

        def counted(size: int) -> None:
            charge(size)
            self.received += size

        return await read_body(
            self._body(),
            self.headers,
            limit=config.max_body_bytes,
            timeout_s=config.body_timeout_s,
            charge=counted,
        )

    async def reply(self, status: int, body: bytes, headers: Headers | None = None, kind: bytes = JSON) -> None:
        """Send the whole response at once."""
        length = str(len(body)).encode()
        await self.start(status, [(b"content-type", kind), (b"content-length", length), *(headers or [])])
        await self.write(body, last=True)

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of a response whose body follows in pieces."""
        self.status = status
        await self._put({"type": "http.response.start", "status": status, "headers": [*headers, *self.shared]})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a piece of the body. Raises ClientGone; for the last piece also if the client is known to have disconnected."""
        watch, self.body_sent = self.watch, True
        if not last or watch is None:
            await self._put({"type": "http.response.body", "body": data, "more_body": not last})
            return
        # The server silently discards bytes for a disconnected client: this lets a pending disconnect end the task here.
        await asyncio.sleep(0)
        await self._put({"type": "http.response.body", "body": data, "more_body": False})
        watch.answered = True

    async def aside(self, head: Headers, data: bytes) -> None:
        """Send a piece of a streamed body from outside the watched task, preceded by the head if that is not sent yet. Raises OSError."""
        async with asyncio.timeout(self._config.send_timeout_s):
            if not self.status:
                self.status = 200
                await self._send({"type": "http.response.start", "status": 200, "headers": [*head, *self.shared]})
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _put(self, message: Message) -> None:
        limit_s = self._config.send_timeout_s
        try:
            if self.watch is not None:
                self.watch.allow(limit_s, ClientGone)
                await self._send(message)
                return
            async with asyncio.timeout(limit_s):
                await self._send(message)
        except OSError:  # includes TimeoutError
            raise ClientGone from None

    async def _body(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            if body := message.get("body", b""):
                yield body


# ---------------------------------------------------------------- the endpoint


_LOG = logging.getLogger(__name__)
_GONE = 499  # nginx' status for a client that closed the connection; never sent

Handler = Callable[[Exchange], Awaitable[None]]


class MethodNotAllowed(OstinatoError):
    """The path exists, but not with this method."""

    status = 405
    code = "method_not_allowed"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Endpoint:
    """An ASGI app for one route.

    Attributes:
        route: the path's pattern, a label of the metrics.
        handle: answers an exchange; may raise.
        errors: its dialect's format of errors.
        origins: checks where requests come from.
        metrics: counts the status.
        config: the timeouts.
        answered: called with each request's scope, headers and status.
    """

    route: str
    handle: Handler
    errors: ErrorShape
    origins: Origins
    metrics: Metrics
    config: ServeConfig
    answered: Callable[[Scope, Mapping[bytes, bytes], int], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.config)
        status = _GONE
        try:
            try:
                self.origins.check(exchange.headers)
                exchange.shared = self.origins.sharing(exchange.headers)
                await self.handle(exchange)
            except OstinatoError as error:
                await self._fail(exchange, error)
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001  # the last resort, so that a bug does not look like a dead connection
                _LOG.exception("%s failed", self.route)
                await self._fail(
                    exchange, OstinatoError(f"Internal error ({type(error).__name__}); the server's log has more.")
                )
            status = exchange.status
        except ClientGone:
            pass
        finally:
            self.metrics.answered(self.route, status)
            self.answered(scope, exchange.headers, exchange.status or status)

    async def _fail(self, exchange: Exchange, error: OstinatoError) -> None:
        if exchange.status:  # only streams fail after their head: send the error as the last event
            await exchange.write(exchange.failure(error).encode(), last=True)
        else:
            await exchange.reply(self.errors.status(error), json_bytes(self.errors.body(error)), _headers(error))


async def preflight(methods: Collection[str], origins: Origins, exchange: Exchange) -> None:
    """Answer a CORS preflight request: a browser asks whether a page may send a request with one of these methods."""
    headers = exchange.headers
    if b"origin" not in headers or b"access-control-request-method" not in headers:
        raise MethodNotAllowed(f"OPTIONS is for CORS preflight requests; send {' or '.join(methods)}.")
    if not exchange.shared:
        raise CrossSite("Pages of this site may not read the answers; name the page's host in serve.allowed_hosts.")
    await exchange.start(204, origins.preflight(headers, methods))
    await exchange.write(b"", last=True)


async def on_http_exception(origins: Origins, request: Request, error: Exception) -> Response:
    """Return Starlette's own 404 and 405 in OpenAI's format."""
    failure: OstinatoError = NotFound(
        f"There is nothing at {request.url.path[:200]!r}; this server has OpenAI's /v1/chat/completions, /v1/responses, "
        "/v1/completions and /v1/models, "
        "Anthropic's /v1/messages, and takes /v1/feedback, /v1/logs and /v1/traces."
    )
    if isinstance(error, HTTPException) and error.status_code == 405:
        failure = MethodNotAllowed(f"{request.method} is not possible on {request.url.path[:200]}.")
    response = Response(json_bytes(error_body(failure)), failure.status, media_type="application/json")
    response.raw_headers += origins.sharing(dict(request.scope["headers"]))
    return response


def _headers(error: OstinatoError) -> Headers:
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    wait_s = getattr(error, "retry_after_s", 1.0 if isinstance(error, Unavailable) else 0.0)
    if not wait_s:
        return []
    exact = str(math.ceil(wait_s * 1000)).encode()  # OpenAI's client prefers the milliseconds
    return [(b"retry-after", str(math.ceil(wait_s)).encode()), (b"retry-after-ms", exact)]
