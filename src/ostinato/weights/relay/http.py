"""Serves a relay over HTTP in a bucket's layout: ``/objects/ab/cdef...`` (with ranges), ``/refs/NAME``, ``/refs``, ``/healthz``."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ostinato.core.errors import NotFound, OstinatoError
from ostinato.weights.relay.cached_store import RelayStore
from ostinato.weights.version.content import check_hash

_FOREVER = "public, max-age=31536000, immutable"
_EPOCH = "Thu, 01 Jan 1970 00:00:00 GMT"


def relay_app(store: RelayStore) -> Starlette:
    """The ASGI app that serves a relay. An answer about a ref carries its `Age` in seconds, if it is known.

    Example: ``uvicorn.run(relay_app(RelayStore(upstream, DirectoryStore(Path("cache")))))``
    """

    async def get_object(request: Request) -> Response:
        return _Object(store, check_hash(request.path_params["start"] + request.path_params["rest"]))

    async def get_ref(request: Request) -> Response:
        ref = request.path_params["ref"]
        look = await store.look(ref)
        if look.value is None:
            raise NotFound(f"there is no ref {ref}", field="ref")
        headers = {"cache-control": "no-cache"} | ({} if look.age_s is None else {"age": f"{look.age_s:.0f}"})
        return PlainTextResponse(look.value + "\n", headers=headers)

    async def get_refs(request: Request) -> Response:
        return JSONResponse(await store.refs(), headers={"cache-control": "no-cache"})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", **store.figures()})

    return Starlette(
        routes=[
            Route("/objects/{start}/{rest}", get_object),
            Route("/refs", get_refs),
            Route("/refs/{ref:path}", get_ref),
            Route("/healthz", health),
        ],
        exception_handlers={OstinatoError: _refuse},
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, OstinatoError)
    return JSONResponse({"error": {"code": error.code, "message": str(error)}}, status_code=error.status)


class _File(FileResponse):
    chunk_size = 1 << 20  # each piece costs one call in a thread


class _Object(Response):
    """Sends an object from its file, which is not evicted meanwhile."""

    def __init__(self, store: RelayStore, hash: str) -> None:
        super().__init__()
        self._store, self._hash = store, hash

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"etag": f'"{self._hash}"', "last-modified": _EPOCH, "cache-control": _FOREVER}
        async with self._store.opened(self._hash) as path:
            await _File(path, headers=headers, media_type="application/octet-stream")(scope, receive, send)
