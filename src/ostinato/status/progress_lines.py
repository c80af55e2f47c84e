"""JSON lines that workers write for people, read back: steps, publications, swaps, rounds. No worker reads them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from ostinato.core.files import older


class Lines:
    """Reads the lines added since the last look. A line that is still being written is left to the next look.

    A file is identified by its first line, so that a file rotated meanwhile is still read to its end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[bytes, int] = {}  # first line -> bytes read

    def new(self) -> list[dict[str, Any]]:
        """Complete new lines, oldest first. Half a line left by a full disk or a killed process is skipped."""
        found: list[dict[str, Any]] = []
        read: dict[bytes, int] = {}
        for path in (older(self._path), self._path):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                first = file.readline()
                file.seek(self._read.get(first, 0))
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                read[first] = self._read.get(first, 0) + len(whole)
                found += _parsed(whole)
        self._read = read
        return found


def last_lines(path: Path, most_bytes: int = 1 << 17) -> list[dict[str, Any]]:
    """The newest lines of a file, oldest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
            return _parsed(file.read())
    except FileNotFoundError:
        return []


def numerics_line(serve: Sequence[dict[str, Any]]) -> str:
    """The newest line about numerics among the serving worker's, if "auto" could not be exact; else ""."""
    found = next((line for line in reversed(serve) if line["kind"] == "numerics"), None)
    return str(found["line"]) if found is not None and found["why"] else ""


def _parsed(data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and "kind" in value:
                found.append(cast("dict[str, Any]", value))
    return found
