"""The outermost layer of each route: exceptions to OpenAI-shaped errors, statuses to metrics, and the watch for clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.core.errors import NotFound, OstinatoError, Unavailable
from ostinato.serve.dialects.openai_reply import error_body, json_bytes, sse
from ostinato.serve.metrics import Metrics

_LOG = logging.getLogger(__name__)
_GONE = 499  # nginx' number for a client that closed the connection; never sent
_T = TypeVar("_T")


class ClientGone(Exception):
    """The client closed the connection or stopped reading: there is nobody to answer."""


class MethodNotAllowed(OstinatoError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class Endpoint:
    """An ASGI app for one route.

    Args:
        route: the path's pattern, a label of the metrics.
        handle: request -> response; both may raise.
        metrics: hears the status.
    """

    def __init__(self, route: str, handle: Callable[[Request], Awaitable[ASGIApp]], metrics: Metrics) -> None:
        self._route = route
        self._handle = handle
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            response = await self._handle(Request(scope, receive))
            await response(scope, receive, watched)
        except ClientGone:
            status = _GONE
        except OstinatoError as error:
            await _fail(error, status > 0, scope, receive, watched)
        except Exception as error:  # noqa: BLE001  # the last resort: a fault of ours must not look like a dead connection
            _LOG.exception("%s failed", self._route)
            failure = OstinatoError(f"Internal error ({type(error).__name__}); the server's log has more.")
            await _fail(failure, status > 0, scope, receive, watched)
        finally:
            self._metrics.answered(self._route, status or _GONE)


def error_response(error: OstinatoError) -> Response:
    """An error as a response in OpenAI's shape."""
    headers = {"retry-after": "1"} if isinstance(error, Unavailable) else None
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return Response(json_bytes(error_body(error)), error.status, headers, "application/json")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in OpenAI's shape."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        return error_response(MethodNotAllowed(f"{request.method} is not possible on {request.url.path[:200]}."))
    return error_response(NotFound(f"There is nothing at {request.url.path[:200]!r}; the API lives under /v1/."))


async def until_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work`, cancel it if the client leaves. Raises ClientGone after `work` has cleaned up."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.wait({task, watcher})
        for ended in (task, watcher):
            if not ended.cancelled():
                ended.exception()  # seen: what matters was raised above


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _fail(error: OstinatoError, started: bool, scope: Scope, receive: Receive, send: Send) -> None:
    if not started:
        await error_response(error)(scope, receive, send)
        return
    # Only streams fail after their start: a last event with the error, and no [DONE].
    await send({"type": "http.response.body", "body": sse(error_body(error)), "more_body": False})
