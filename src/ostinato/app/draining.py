"""The engine's draining servers, which get no new requests, as a file in the run's directory. `ostinato drain` writes it, the gateway
reads it.
"""

from __future__ import annotations

from pathlib import Path

from ostinato.core.errors import BadRequest
from ostinato.core.private import replace_text
from ostinato.engine.config import EngineConfig


def read_draining(path: Path) -> frozenset[str]:
    """The draining servers' URLs; empty if there is no file."""
    try:
        return frozenset(path.read_text(errors="replace").split())
    except FileNotFoundError:
        return frozenset()


def write_draining(path: Path, engine: EngineConfig, url: str, *, back: bool) -> frozenset[str]:
    """Add a server, or remove it again. Returns all servers that then drain. Raises BadRequest for one that the engine does not have."""
    known = {each.rstrip("/") for each in engine.urls}
    url = url.rstrip("/")
    if engine.kind != "vllm" or url not in known:
        raise BadRequest(f"{url} is none of engine.urls: {', '.join(sorted(known)) or 'there are none'}", field="url")
    left = (read_draining(path) - {url}) if back else read_draining(path) | {url}
    replace_text(path, "".join(f"{each}\n" for each in sorted(left)))
    return left
