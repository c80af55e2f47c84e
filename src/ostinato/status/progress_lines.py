"""Follows line files that another process appends to, within a time limit; also the progress lines (JSON) that workers write for people:
steps, publications, hot swaps, rounds. No worker reads these.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from ostinato.core.files import older

# ---------------------------------------------------------------- following a file


LONGEST_LOOK_S = 0.2
"""How long one call of `new` may read before leaving the rest to the next."""
LONGEST_LINE = 1 << 19
_CHUNK = 1 << 20
_NAME_BYTES = 512  # bytes of its first line that identify a file


@dataclass(frozen=True, slots=True)
class Spot:
    """A line's position: the file, identified by the start of its first line, and the line's byte offset."""

    name: bytes
    at: int


class FileTail:
    """Follows a file and its rotated parts, oldest first (like tail -F). Used by one thread at a time.

    A file is identified by its first line. A file that is rotated in the meantime is read to its end; a rewritten file is read from its
    start.

    Args:
        parts: the rotated parts, oldest first, then the file.
        most_bytes: only this many bytes at the end of a file are read when it is first seen.

    Example::

        lines = FileTail([path])
        for spot, line in lines.new():
            ...
        lines.line(spot)  # the same line again
    """

    def __init__(
        self,
        parts: list[Path],
        most_bytes: int = 64 << 20,
        *,
        look_s: float = LONGEST_LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts, self._most, self._look_s, self._clock = parts, most_bytes, look_s, clock
        self._read: dict[bytes, int] = {}  # first line -> bytes read
        self.skipped = 0
        self.behind = 0
        self.bad = 0
        self.at: float | None = None

    def new(self) -> Iterator[tuple[Spot, bytes]]:
        """Yield new complete lines without their line breaks. A line longer than any record is skipped and counted in `bad`."""
        until, read, self.behind, self.at = self._clock() + self._look_s, {}, 0, None
        for path in self._parts:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                name = _name(file)
                if not name:
                    continue
                found = os.fstat(file.fileno())
                self.at = found.st_mtime
                at = read[name] = self._begin(file, name, found.st_size)
                while at < found.st_size and self._clock() < until:
                    lines, at_next = self._chunk(file, at)
                    if at_next == at:
                        break
                    yield from ((Spot(name, place), line) for place, line in lines)
                    at = read[name] = at_next
                self.behind += found.st_size - at
        self._read = read

    def line(self, spot: Spot) -> bytes | None:
        """Return the line at a position; None if its file is gone."""
        for path in self._parts:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if _name(file) == spot.name:
                    file.seek(spot.at)
                    line = file.readline(LONGEST_LINE + 1)
                    return line[:-1] if line.endswith(b"\n") else None
        return None

    def _begin(self, file: BinaryIO, name: bytes, size: int) -> int:
        """Return the offset at which to continue."""
        known = self._read.get(name)
        if known is not None and known <= size:
            return known
        if size <= self._most:
            return 0
        file.seek(size - self._most)
        at = size - self._most + len(file.readline(LONGEST_LINE))
        self.skipped += at
        return at

    def _chunk(self, file: BinaryIO, at: int) -> tuple[list[tuple[int, bytes]], int]:
        """Return some complete lines with their offsets, and the offset of the next line."""
        file.seek(at)
        data = file.read(_CHUNK)
        whole = data.rfind(b"\n") + 1
        if not whole:
            return self._overlong(file, at, data)
        lines: list[tuple[int, bytes]] = []
        start = 0
        while start < whole:
            end = data.index(b"\n", start)
            if 0 < end - start <= LONGEST_LINE:
                lines.append((at + start, data[start:end]))
            elif end > start:
                self.bad += 1
            start = end + 1
        return lines, at + whole

    def _overlong(self, file: BinaryIO, at: int, data: bytes) -> tuple[list[tuple[int, bytes]], int]:
        """Skip a line that is longer than a chunk, unless it is still being written."""
        if len(data) < _CHUNK:
            return [], at
        while data := file.read(_CHUNK):
            at_end = data.find(b"\n")
            if at_end >= 0:
                self.bad += 1
                return [], file.tell() - len(data) + at_end + 1
        return [], at


def _name(file: BinaryIO) -> bytes:
    """Return a file's identity, the start of its first line; b"" while that line is incomplete."""
    file.seek(0)
    first = file.readline(LONGEST_LINE)
    return first[:_NAME_BYTES] if first.endswith(b"\n") or len(first) == LONGEST_LINE else b""


# ---------------------------------------------------------------- workers' progress lines


class Lines:
    """Reads the lines added since the last call, also across a rotation of the file. A line that is still being written is left to the
    next call.
    """

    def __init__(self, path: Path) -> None:
        self._lines = FileTail([older(path), path], most_bytes=sys.maxsize, look_s=math.inf)

    def new(self) -> list[dict[str, Any]]:
        """Return the new complete lines, oldest first. Half a line left by a full disk or a killed process is skipped."""
        return _parsed(line for _, line in self._lines.new())


def last_lines(path: Path, most_bytes: int = 1 << 17) -> list[dict[str, Any]]:
    """Return the newest lines of a file and its rotated part, oldest first."""
    newest, read = b"", -1
    for part in (path, older(path)):
        with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number == read or len(newest) >= most_bytes:  # the same file, which was rotated between the two opens
                continue
            read = number
            file.seek(max(0, file.seek(0, os.SEEK_END) - (most_bytes - len(newest))))
            newest = file.read() + newest
    return _parsed(newest.splitlines())


def newest_line(lines: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    """Return the last of these lines of a kind; None if there is none."""
    return next((line for line in reversed(lines) if line["kind"] == kind), None)


def numerics_line(serve: Sequence[Mapping[str, Any]]) -> str:
    """Return the serving worker's newest line about numerics if "auto" could not be exact; else ""."""
    found = newest_line(serve, "numerics")
    return str(found["line"]) if found is not None and found["why"] else ""


def _parsed(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and "kind" in value:
                found.append(cast("dict[str, Any]", value))
    return found
