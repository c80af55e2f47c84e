"""The page's static files, each under a name that contains its hash, so that browsers may cache it for ever."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parents[1] / "static"
_KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


class StaticFiles:
    """Everything in `web/static` that a browser asks for, read once."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in _KINDS}
        self._bodies = {name: path.read_bytes() for name, path in sorted(found.items())}
        self._hashes = {name: hashlib.sha256(body).hexdigest()[:8] for name, body in self._bodies.items()}

    def url(self, name: str) -> str:
        """A file's URL. Raises KeyError if there is no such file."""
        return f"/static/{self._hashes[name]}/{name}"

    def text(self, name: str) -> str:
        """A file's text. Raises KeyError if there is no such file."""
        return self._bodies[name].decode()

    async def serve(self, request: Request) -> Response:
        """`GET /static/{digest}/{name}`."""
        name, digest = request.path_params["name"], request.path_params["digest"]
        if self._hashes.get(name) != digest:
            return Response("There is no such file.", 404, media_type="text/plain")
        tag = f'"{digest}"'
        headers = {
            "etag": tag,
            "cache-control": "public, max-age=31536000, immutable",
            "x-content-type-options": "nosniff",
        }
        if is_known(request, tag):
            return Response(status_code=304, headers=headers)
        return Response(self._bodies[name], headers=headers, media_type=_KINDS[Path(name).suffix])


def is_known(request: Request, tag: str) -> bool:
    """Whether a browser says that it has this version."""
    bare = tag.removeprefix("W/")
    return bare in (each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(","))
