"""JSON lines that workers write for people: steps, publications, swaps. `status` and the demo read them; no worker does."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.files import private
from ostinato.core.weights import Learned, Swap
from ostinato.launch.placing.output import KEPT_BYTES, older

if TYPE_CHECKING:
    from ostinato.app.numerics import NumericsMode
    from ostinato.app.server_loans import Lent
    from ostinato.release.pace import Pace
    from ostinato.weights.publish.publisher import Published

logger = logging.getLogger(__name__)


def kept_bytes(config: Config) -> int:
    """The bytes that a progress file may reach before it is rotated."""
    return int(1e6 * config.housekeeping.log_mb)


class Progress:
    """Appends lines to one file. On a full disk a line is lost, but never work. A file beyond `most_bytes` is rotated to `older`."""

    def __init__(self, path: Path, most_bytes: int = KEPT_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._torn = True  # an earlier process, or a disk that filled up, may have left half a line at the end

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line with the kind, the time and the fields."""
        self.append(json.dumps({"kind": kind, "at": wall_clock(), **fields}))

    def append(self, line: str) -> None:
        """Append `line`, which has no line break, as it is."""
        try:
            with open(self._path, "a", encoding="utf-8", opener=private) as file:
                torn, self._torn = self._torn and file.tell() > 0, True
                file.write("\n" * torn + line + "\n")
                full = file.tell() > self._most_bytes
            self._torn = False
            if full:
                self._path.replace(older(self._path))
        except OSError as error:
            logger.warning("progress line lost: %s", error)

    def learned(self, learned: Learned) -> None:
        """Record an optimizer step's metrics."""
        self.write("step", step=learned.step, **learned.metrics)

    def paced(self, pace: Pace) -> None:
        """Record how many releases the traffic can carry."""
        self.write("pace", **asdict(pace))

    def published(self, done: Published) -> None:
        """Record a publication and its cost."""
        size = f"{done.bytes / 1e6:.2f} MB, {done.ratio:.0f}x smaller than full"
        logger.info("published %s (%s, %s) in %.2f s", done.policy, done.kind, size, done.seconds)
        self.write(
            "published",
            number=done.policy.number,
            hash=done.policy.hash,
            form=done.kind,
            bytes=done.bytes,
            full_bytes=done.full_bytes,
            changed=done.changed,
            seconds=done.seconds,
        )

    def computing(self, mode: NumericsMode) -> None:
        """Record the mode in which the engine computes, and why."""
        self.write("numerics", mode=mode.mode, why=mode.why, line=str(mode))

    def lent(self, lent: Lent) -> None:
        """Record how many of the people's servers are lent to rollouts."""
        if lent.why:
            logger.info("to rollouts: %s", lent.why)
        self.write("lent", **asdict(lent))

    def swapped(self, swap: Swap) -> None:
        """Record a hot swap and its cost."""
        logger.info("%s is now %s: pause %.2f ms, %d streams", swap.slot, swap.policy, 1e3 * swap.pause_s, swap.streams)
        self.write(
            "swapped",
            slot=swap.slot,
            number=swap.policy.number,
            hash=swap.policy.hash,
            pause_s=swap.pause_s,
            streams=swap.streams,
        )


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
