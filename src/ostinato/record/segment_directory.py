"""The directory of a log: segments named by their first row, one file for permanent rows, and a cache of open segments.

Bloom filters tell which closed segments may hold an identity, for all segments at once and before any file is opened. Each closed segment
stores a filter of its identities: an array of 64-bit words, in which every key sets the same three bits in two words. In memory, filters
of equal size are the columns of one table, so that a key's words in all of them form one row.
"""

from __future__ import annotations

import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadConfig, StorageFull
from ostinato.core.seams import Cursor
from ostinato.record.keys import KeyRing
from ostinato.record.segment import Segment, SegmentGone
from ostinato.record.sqlite import remove

# ---------------------------------------------------------------- Bloom filters of closed segments


BITS = 16
"""Bits of a filter per key: the false-positive rate is about one in a thousand."""

_MAX_EXPONENT = 20  # log2 of the words of the largest filter: the word index takes 20 bits of a key

Words = NDArray[np.uint64]


def build_filter(keys: Sequence[int]) -> bytes:
    """Return the filter of a segment with these keys in its stored form."""
    exponent = min(_MAX_EXPONENT, max(4, (len(keys) * BITS // 64).bit_length()))
    words = np.zeros(1 << exponent, np.uint64)
    one, two, mask = _word_bits(np.asarray(keys, np.uint64), exponent)
    np.bitwise_or.at(words, one, mask)
    np.bitwise_or.at(words, two, mask)
    return words.astype("<u8").tobytes()


def _word_bits(keys: Words, exponent: int) -> tuple[Words, Words, Words]:
    """Return the two word indices and the bit mask of each key. Keys are hashes, so their bits are used directly."""
    last = np.uint64((1 << exponent) - 1)
    bits = [np.uint64(1) << (keys >> np.uint64(shift) & np.uint64(63)) for shift in (40, 46, 52)]
    return keys & last, keys >> np.uint64(20) & last, bits[0] | bits[1] | bits[2]


class SegmentFilters:
    """The Bloom filters of all closed segments. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # log2(words) -> (word x segment, the segment of each column)
        self._sizes: dict[int, tuple[Words, list[Cursor | None]]] = {}
        self._known: set[Cursor] = set()

    def missing(self, firsts: Sequence[Cursor]) -> list[Cursor]:
        """Return those of these segments whose filters have not been added yet."""
        with self._lock:
            return [first for first in firsts if first not in self._known]

    def add(self, first: Cursor, stored: bytes) -> None:
        """Add the filter of a closed segment."""
        words = np.frombuffer(stored, "<u8")
        exponent = len(words).bit_length() - 1
        with self._lock:
            if first in self._known:
                return
            table, segments = self._sizes.get(exponent, (np.zeros((len(words), 4), np.uint64), []))
            column = segments.index(None) if None in segments else len(segments)
            if column == len(segments):
                segments.append(None)
            if column == table.shape[1]:
                table = np.concatenate([table, np.zeros_like(table)], axis=1)
            table[:, column] = words
            segments[column] = first
            self._sizes[exponent] = (table, segments)
            self._known.add(first)

    def drop_before(self, oldest: Cursor) -> None:
        """Remove the filters of dropped segments: all before the oldest that is left, because the oldest are dropped first."""
        with self._lock:
            gone = {first for first in self._known if first < oldest}
            self._known -= gone
            for table, segments in self._sizes.values() if gone else ():
                for column, first in enumerate(segments):
                    if first in gone:
                        table[:, column] = 0
                        segments[column] = None

    def holding(self, keys: Sequence[int]) -> Mapping[int, list[Cursor]]:
        """Return {key: segments that may hold it, newest first}, without keys that no closed segment can hold."""
        found: dict[int, list[Cursor]] = {}
        asked = np.asarray(keys, np.uint64)
        with self._lock:
            for exponent, (table, segments) in self._sizes.items():
                one, two, mask = _word_bits(asked, exponent)
                hit = table[one] & table[two] & mask[:, None] == mask[:, None]
                for row, column in zip(*np.nonzero(hit), strict=True):
                    first = segments[column] if column < len(segments) else None
                    if first is not None:
                        found.setdefault(keys[row], []).append(first)
        for firsts in found.values():
            firsts.sort(reverse=True)
        return found


# ---------------------------------------------------------------- directory


_NAME = re.compile(r"(\d{16})\.db")
_STRAY = re.compile(r"(\d{16}\.db)-(wal|shm)|\..+\.db\..+")
_STALE_S = 3600.0  # a file that was not finished within an hour counts as abandoned


@dataclass(frozen=True, slots=True)
class Listing:
    """The segments at one moment, by sequence number of their first row, oldest first. Empty before the log is created."""

    firsts: tuple[Cursor, ...]

    @property
    def horizon(self) -> Cursor:
        """The sequence number up to which rows were dropped, apart from permanent ones."""
        return self.firsts[0] - 1 if self.firsts else 0


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """The directory that holds the segments of one log.

    Example: ``LogDirectory(run / "log").segment(1)`` is ``run/log/0000000000000001.db``.
    """

    path: Path

    def prepare(self) -> None:
        """Create the directory with mode 0700. Raises BadConfig for a log in an earlier format, StorageFull."""
        earlier = self.path if self.path.is_file() else self.path.with_name(self.path.name + ".db")
        if earlier.is_file():
            raise BadConfig(
                f"{earlier} is a log in the single-file format of earlier Ostinato versions, which this version cannot read; "
                f"use the version that wrote it, or move {earlier.name} away to begin a new log"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if stat.S_IMODE(self.path.stat().st_mode) != 0o700:
                self.path.chmod(0o700)
        except OSError as error:
            raise StorageFull(f"cannot create {self.path}: {error}; make the run's directory writable") from error

    def segment(self, first: Cursor) -> Path:
        """Return the path of the segment that begins with row `first`."""
        return self.path / f"{first:016d}.db"

    @property
    def kept(self) -> Path:
        """The path of the file with the permanent rows of all dropped segments."""
        return self.path / "kept.db"

    def listing(self) -> Listing:
        """Return the segments that exist now."""
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir())
        return Listing(tuple(sorted(int(match[1]) for match in found if match)))

    def sweep(self) -> None:
        """Delete files that killed processes left behind: unfinished segments, and SQLite's side files of segments that are gone.

        Age is measured by the file system's clock, relative to the most recently written file.
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


# ---------------------------------------------------------------- open segments


_MAX_OPEN = 6  # segments open at once


class OpenSegments:
    """An LRU cache of segments opened for reading. Used by one thread at a time.

    `learn_filters` adds the filters of closed segments to `sealed`.
    """

    def __init__(self, directory: LogDirectory, ring: KeyRing | None, sealed: SegmentFilters) -> None:
        self.directory = directory
        self.sealed = sealed
        self._ring = ring
        self._open: OrderedDict[Cursor, Segment] = OrderedDict()
        self._kept: Segment | None = None
        self._listing = Listing(())

    def close(self) -> None:
        """Close all segments."""
        while self._open:
            self._open.popitem()[1].close()
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def listing(self, *, again: bool = False) -> Listing:
        """Return the segments found when the directory was last read; `again` reads it again."""
        if again or not self._listing.firsts:
            self._listing = self.directory.listing()
            for first in set(self._open).difference(self._listing.firsts):
                self._open.pop(first).close()
            self.sealed.drop_before(self._listing.horizon + 1)
        return self._listing

    def get(self, first: Cursor) -> Segment:
        """Return a segment by its first row. Raises SegmentGone, after reading the directory again."""
        segment = self._open.pop(first, None)
        if segment is None:
            try:
                segment = Segment(self.directory.segment(first), self._ring)
            except SegmentGone:
                self.listing(again=True)
                raise
        self._open[first] = segment
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        return segment

    def newest(self) -> Segment:
        """Return the newest segment: the open one, or a closed one that has no successor yet."""
        while True:
            with suppress(SegmentGone):
                segment = self.get(self.listing().firsts[-1])
                if segment.seal() is None or self.listing(again=True).firsts[-1] == segment.first:
                    return segment

    def kept(self) -> Segment | None:
        """Return the file of permanent rows; None if there is none yet."""
        if self._kept is None:
            with suppress(SegmentGone):
                self._kept = Segment(self.directory.kept, self._ring)
        return self._kept

    def learn_filters(self) -> None:
        """Read the filters of closed segments that are not in `sealed` yet."""
        for first in self.sealed.missing(self.listing().firsts[:-1]):
            try:
                segment = Segment(self.directory.segment(first), self._ring)
            except SegmentGone:
                self.listing(again=True)
                continue
            with closing(segment):
                self.sealed.add(first, segment.filter() or build_filter([]))
