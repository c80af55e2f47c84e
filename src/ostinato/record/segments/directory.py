"""The directory of a log: segments named by their first row, and one file for the rows that stay when a segment goes."""

from __future__ import annotations

import re
import stat
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ostinato.core.errors import BadConfig, StorageFull
from ostinato.core.seams import Cursor
from ostinato.record.sqlite import remove

_NAME = re.compile(r"(\d{16})\.db")
_STRAY = re.compile(r"(\d{16}\.db)-(wal|shm)|\..+\.db\..+")
_STALE_S = 3600.0  # what nobody finished in an hour nobody will


@dataclass(frozen=True, slots=True)
class Listing:
    """The segments at one moment, by their first row, oldest first. Empty before the log is made."""

    firsts: tuple[Cursor, ...]

    def holding(self, seq: Cursor) -> int | None:
        """The index of the segment that a row lies in; None if it is older than all of them."""
        index = bisect_right(self.firsts, seq) - 1
        return index if index >= 0 else None

    @property
    def horizon(self) -> Cursor:
        """Rows up to here were dropped, but for those that stay for ever."""
        return self.firsts[0] - 1 if self.firsts else 0


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """Where the segments of one log lie.

    Example: ``LogDirectory(run / "log").segment(1)`` is ``run/log/0000000000000001.db``.
    """

    path: Path

    def prepare(self) -> None:
        """Make the directory, open to its owner only. Raises BadConfig for a log of an earlier form, StorageFull."""
        earlier = self.path if self.path.is_file() else self.path.with_name(self.path.name + ".db")
        if earlier.is_file():
            raise BadConfig(
                f"{earlier} is a log as earlier versions of Ostinato wrote it, one file, which this one does not read; "
                f"go on with the version that wrote it, or move {earlier.name} out of the way to begin a new log"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if stat.S_IMODE(self.path.stat().st_mode) != 0o700:
                self.path.chmod(0o700)
        except OSError as error:
            raise StorageFull(f"cannot create {self.path}: {error}; make the run's directory writable") from error

    def segment(self, first: Cursor) -> Path:
        """The file of the segment that begins with this row."""
        return self.path / f"{first:016d}.db"

    @property
    def kept(self) -> Path:
        """The file of the rows that stay for ever, of all segments that were dropped."""
        return self.path / "kept.db"

    def listing(self) -> Listing:
        """The segments that are there now."""
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir())
        return Listing(tuple(sorted(int(match[1]) for match in found if match)))

    def sweep(self) -> None:
        """Delete what killed processes left behind: segments never finished, and what lay beside segments that are gone.

        Age is measured by the file system's own clock, against whatever was written last.
        """
        written: dict[Path, float] = {}
        for entry in list(self.path.iterdir()):
            with suppress(FileNotFoundError):
                written[entry] = entry.stat().st_mtime
        stale = max(written.values(), default=0.0) - _STALE_S
        for entry, at in written.items():
            match = _STRAY.fullmatch(entry.name)
            if match and (at < stale if match[1] is None else not (self.path / match[1]).exists()):
                entry.unlink(missing_ok=True)

    def drop(self, first: Cursor) -> None:
        """Delete a segment. Raises OSError."""
        remove(self.segment(first))
