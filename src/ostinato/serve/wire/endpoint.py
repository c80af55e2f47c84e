"""The outermost layer of each route: checks the origin, turns exceptions into its dialect's errors, and reports statuses to the metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostinato.core.errors import NotFound, OstinatoError, Unavailable
from ostinato.serve.config import ServeConfig
from ostinato.serve.dialects.dialect import ErrorShape
from ostinato.serve.dialects.openai_reply import error_body, json_bytes
from ostinato.serve.metrics import Metrics
from ostinato.serve.wire.exchange import Exchange, Headers
from ostinato.serve.wire.origins import CrossSite, Origins
from ostinato.serve.wire.watch import ClientGone

_LOG = logging.getLogger(__name__)
_GONE = 499  # nginx' number for a client that closed the connection; never sent

Handler = Callable[[Exchange], Awaitable[None]]


class MethodNotAllowed(OstinatoError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class Endpoint:
    """An ASGI app for one route.

    Args:
        route: the path's pattern, a label of the metrics.
        handle: answers an exchange; may raise.
        errors: its dialect's shape of errors.
        origins: checks where requests come from.
        metrics: counts the status.
        config: the timeouts.
        answered: called with each request's scope, headers and status.
    """

    def __init__(
        self,
        route: str,
        handle: Handler,
        *,
        errors: ErrorShape,
        origins: Origins,
        metrics: Metrics,
        config: ServeConfig,
        answered: Callable[[Scope, Mapping[bytes, bytes], int], None],
    ) -> None:
        self._route = route
        self._handle = handle
        self._errors = errors
        self._origins = origins
        self._metrics = metrics
        self._config = config
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._config)
        status = _GONE
        try:
            try:
                self._origins.check(exchange.headers)
                exchange.shared = self._origins.sharing(exchange.headers)
                await self._handle(exchange)
            except OstinatoError as error:
                await self._fail(exchange, error)
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001  # the last resort: a fault of ours must not look like a dead connection
                _LOG.exception("%s failed", self._route)
                await self._fail(
                    exchange, OstinatoError(f"Internal error ({type(error).__name__}); the server's log has more.")
                )
            status = exchange.status
        except ClientGone:
            pass
        finally:
            self._metrics.answered(self._route, status)
            self._answered(scope, exchange.headers, exchange.status or status)

    async def _fail(self, exchange: Exchange, error: OstinatoError) -> None:
        if exchange.status:  # only streams fail after their start: the error is the last event
            await exchange.write(self._errors.event(error).encode(), last=True)
        else:
            await exchange.reply(self._errors.status(error), json_bytes(self._errors.body(error)), _headers(error))


async def preflight(methods: Collection[str], origins: Origins, exchange: Exchange) -> None:
    """Answer a browser that asks whether a page may send a request with one of these methods."""
    headers = exchange.headers
    if b"origin" not in headers or b"access-control-request-method" not in headers:
        raise MethodNotAllowed(f"OPTIONS is for pages that ask before a request; send {' or '.join(methods)}.")
    if not exchange.shared:
        raise CrossSite("Pages of this site may not read the answers; name the page's host in serve.allowed_hosts.")
    await exchange.start(204, origins.preflight(headers, methods))
    await exchange.write(b"", last=True)


async def on_http_exception(origins: Origins, request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in OpenAI's shape."""
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
    exact = str(math.ceil(wait_s * 1000)).encode()  # OpenAI's client reads milliseconds first
    return [(b"retry-after", str(math.ceil(wait_s)).encode()), (b"retry-after-ms", exact)]
