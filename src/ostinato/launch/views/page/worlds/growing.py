"""Files of lines that another process appends to, read as they grow: what is new, a while at a time, and any line again by its place."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LONGEST_LOOK_S = 0.2
"""How long one look may read before the rest waits for the next one."""
LONGEST_LINE = 1 << 19
_CHUNK = 1 << 20
_NAME = 512  # bytes of its first line that a file is known by


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a line lies: in the file that begins so, from this byte on."""

    name: bytes
    at: int


class Growing:
    """The lines of a file and of the older part that is set aside, oldest first. Whoever asks does so from one thread at a time.

    A file is known by its first line: one that was set aside meanwhile is read to its end, and one that was written anew from its start.

    Args:
        parts: the file, after those that were set aside, oldest first.
        most_bytes: of a file that was never read before only so much is, its end.

    Example::

        lines = Growing([path])
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
        """Whole lines that are new, without their ends; a line that is longer than any record is passed over and counted."""
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
        """The line at a place; None if its file is gone."""
        for path in self._parts:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if _name(file) == spot.name:
                    file.seek(spot.at)
                    line = file.readline(LONGEST_LINE + 1)
                    return line[:-1] if line.endswith(b"\n") else None
        return None

    def _begin(self, file: BinaryIO, name: bytes, size: int) -> int:
        """Where to go on."""
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
        """Some whole lines with their places, and where the next one begins."""
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
        """Past a line that no chunk holds; not past one that is still being written."""
        if len(data) < _CHUNK:
            return [], at
        while data := file.read(_CHUNK):
            at_end = data.find(b"\n")
            if at_end >= 0:
                self.bad += 1
                return [], file.tell() - len(data) + at_end + 1
        return [], at


def _name(file: BinaryIO) -> bytes:
    """What a file is known by: its first line's beginning; b"" while that is not whole."""
    file.seek(0)
    first = file.readline(LONGEST_LINE)
    return first[:_NAME] if first.endswith(b"\n") or len(first) == LONGEST_LINE else b""
