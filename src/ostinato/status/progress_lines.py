"""JSON lines that workers write for people, read back: steps, publications, swaps, rounds. No worker reads them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from ostinato.core.files import older
from ostinato.status.file_tail import FileTail


class Lines:
    """Reads the lines added since the last look, through a rotation of the file too. A line that is still being written is left to the
    next look.
    """

    def __init__(self, path: Path) -> None:
        self._lines = FileTail([older(path), path], most_bytes=sys.maxsize, look_s=math.inf)

    def new(self) -> list[dict[str, Any]]:
        """Complete new lines, oldest first. Half a line left by a full disk or a killed process is skipped."""
        return _parsed(line for _, line in self._lines.new())


def last_lines(path: Path, most_bytes: int = 1 << 17) -> list[dict[str, Any]]:
    """The newest lines of a file, oldest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
            return _parsed(file.read().splitlines())
    except FileNotFoundError:
        return []


def numerics_line(serve: Sequence[dict[str, Any]]) -> str:
    """The newest line about numerics among the serving worker's, if "auto" could not be exact; else ""."""
    found = next((line for line in reversed(serve) if line["kind"] == "numerics"), None)
    return str(found["line"]) if found is not None and found["why"] else ""


def _parsed(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and "kind" in value:
                found.append(cast("dict[str, Any]", value))
    return found
