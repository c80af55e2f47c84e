"""Saved folds of the log in a directory: one file per name, compressed JSON with its hash, replaced atomically."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zstandard
from blake3 import blake3

from ostinato.core.errors import BadConfig, StorageFull, Unavailable
from ostinato.core.files import EXHAUSTED, write_atomic
from ostinato.core.seams import Cursor
from ostinato.record.codec.shrink import decompress

logger = logging.getLogger(__name__)

_FORMAT = "ostinato-fold@1"
_MAX_BYTES = 1 << 30  # of a decompressed fold


def pack_fold(cursor: Cursor, state: Mapping[str, Any]) -> bytes:
    """Return a fold in its stored form: the hash of its JSON, then the JSON compressed."""
    plain = json.dumps({"format": _FORMAT, "cursor": cursor, "state": state}, separators=(",", ":")).encode()
    return blake3(plain).digest() + zstandard.ZstdCompressor(level=3).compress(plain)


def unpack_fold(data: bytes) -> tuple[Cursor, dict[str, Any]]:
    """The inverse of `pack_fold`. Raises ValueError for damaged bytes or another format version."""
    try:
        plain = decompress(data[32:], _MAX_BYTES)
        if blake3(plain).digest() != data[:32]:
            raise ValueError("it does not have its promised hash")
        found = json.loads(plain)
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']!r}, not {_FORMAT!r}")
        return int(found["cursor"]), dict(found["state"])
    except (KeyError, TypeError) as error:
        raise ValueError(str(error)) from error


def check_fold_name(name: str) -> None:
    """Raise BadConfig unless `name` is a plain lower-case name."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", name):
        raise BadConfig(f"fold {name!r} must be a plain lower-case name")


class FileFolds:
    """`core.seams.Folds` in a directory. Each name may have one writer.

    Example: ``await FileFolds(run / "folds").save("desk", 812, {"open": []})``
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def save(self, name: str, cursor: Cursor, state: Mapping[str, Any]) -> None:
        """Save a fold, durably on return. Raises StorageFull; the previous fold is then untouched."""
        await asyncio.to_thread(self._write, self._path(name), pack_fold(cursor, state))

    async def load(self, name: str) -> tuple[Cursor, dict[str, Any]] | None:
        """Return the fold saved last; None if there is none.

        A file that is damaged or has another format version is logged and counts as none. Raises Unavailable if too many files are open:
        that must not count as none, because rows that retention dropped cannot be folded again.
        """
        path = self._path(name)
        try:
            data = await asyncio.to_thread(path.read_bytes)
            return unpack_fold(data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                raise Unavailable(
                    f"{path} cannot be read now: {error}. Raise the limit (ulimit -n), or free memory"
                ) from error
            logger.warning("%s cannot be used, the log is read instead: %s", path, error)
            return None

    def _path(self, name: str) -> Path:
        check_fold_name(name)
        return self._directory / f"{name}.fold"

    def _write(self, path: Path, packed: bytes) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, packed, durable=True)
        except OSError as error:
            raise StorageFull(
                f"{path} was not written: {error}; free space. What it held before is untouched"
            ) from error
