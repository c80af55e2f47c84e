"""The log on SQLite: every turn, signal, reward, batch and release in one total order, durable when `append` returns.

The log is a directory of segments, each a database of its own (decision 0007). Readers never block a writer.

Any number of processes may append; within a process one thread commits for all callers (`rowlog.py`). A transaction takes SQLite's write
lock on the newest segment, skips rows that the log already holds, and seals the segment when it is full. Under the lock it checks whether
another process has sealed the segment meanwhile. If so, it moves on to the next segment, which the first process to get there creates.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from ostinato.core.clock import wall_clock
from ostinato.core.errors import OstinatoError, StorageFull, Unavailable
from ostinato.core.records import Row
from ostinato.core.seams import Clock, Cursor
from ostinato.record import sqlite
from ostinato.record.codec.kinds import KINDS
from ostinato.record.codec.turns import Ready
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.head import Head, TokenText
from ostinato.record.keys import KeyRing, assign_keys
from ostinato.record.reader import LogReader
from ostinato.record.retention import drop_segments, keep_rows
from ostinato.record.rowlog import RowLog
from ostinato.record.segment import KEYS, Segment, SegmentGone, create_segment
from ostinato.record.segment_directory import LogDirectory, OpenSegments, SegmentFilters, build_filter
from ostinato.record.sqlite import driver, is_busy, translate, translated

# ---------------------------------------------------------------- appending


class Appender:
    """Appends rows in transactions. Used by one thread.

    Its methods raise the driver's errors and OSError. After an error, the next transaction begins with fresh connections.
    """

    def __init__(
        self, directory: LogDirectory, config: RecordConfig, clock: Clock, ring: KeyRing | None, sealed: SegmentFilters
    ) -> None:
        self.name = str(directory.path)
        self.token_text: TokenText | None = None
        self._directory = directory
        self._config = config
        self._clock = clock
        self._ring = ring
        self._closed = OpenSegments(directory, ring, sealed)
        self._reader = LogReader(directory, ring, sealed)
        self._head: Head[Segment] | None = None
        self._texts: dict[int, str] = {}

    def close(self) -> None:
        """Close the database connections."""
        self._forget_head()
        self._closed.close()
        self._reader.close()

    def assign_keys(self, rows: Sequence[Ready]) -> None:
        """Assign an encryption key to each row's text. Called before the transaction; new keys are durable on return."""
        if self._ring is not None:
            assign_keys(rows, self._config.encrypt, self._ring, self._reader.owners)

    @contextmanager
    def transaction(self, rows: Sequence[Ready]) -> Generator[Head[Segment]]:
        """Yield the open segment under the write lock; commit at the end, roll back on an error. Full segments are sealed first.

        A busy error (`sqlite.is_busy`) is raised only before anything was written.
        """
        try:
            head = self._begin()
        except Exception as error:
            if not is_busy(error):
                self._forget_head()
            raise
        try:
            yield head
            head.segment.db.execute("COMMIT")
        except BaseException:
            self._forget_head()  # closes the connection, which rolls back, and drops caches that mention unwritten rows
            raise

    def write(self, head: Head[Segment], rows: Sequence[Ready]) -> Cursor:
        """Write the rows that the log does not hold yet and return the newest sequence number. Called inside the transaction."""
        newest = head.segment.newest()
        fresh = self._unseen(head, rows)
        if fresh:
            head.insert(fresh, newest, self.token_text)
        return newest + len(fresh)

    def waits(self, error: Exception) -> bool:
        """Return True if another process holds the lock."""
        return is_busy(error)

    def refusal(self, error: Exception) -> OstinatoError:
        """Translate an error of a transaction into an OstinatoError."""
        if isinstance(error, driver.Error):
            return translate(error, self._directory.path)
        if isinstance(error, OSError):
            return StorageFull(f"nothing was written to {self.name}: {error}; free space, then try again")
        return Unavailable(f"rows could not be written to {self.name}: {error!r}")

    # ------------------------------------------------------------ deduplication

    def _unseen(self, head: Head[Segment], rows: Sequence[Ready]) -> list[tuple[Ready, int]]:
        """Return the rows whose identity is neither in the log nor earlier in the list, each with an unused identity key."""
        keys = [row.key for row in rows]
        taken, closed = head.segment.known(keys), self._closed.sealed.holding(keys)
        fresh: dict[tuple[object, ...], tuple[Ready, int]] = {}
        used: set[int] = set()
        for row in rows:
            mark = (row.kind, *row.identity)
            if mark in fresh or self._in_closed_segment(row, closed) or self._in_permanent_rows(row):
                continue
            key = row.key
            if key in taken or key in used:
                place, key = head.segment.place(row.kind, row.identity, key)
                while key in used:
                    place, key = head.segment.place(row.kind, row.identity, (key + 1) & KEYS)
                if place is not None:
                    continue
            used.add(key)
            fresh[mark] = (row, key)
        return list(fresh.values())

    def _in_closed_segment(self, row: Ready, holding: Mapping[int, list[Cursor]]) -> bool:
        for first in holding.get(row.key, ()):
            with suppress(SegmentGone):  # its rows were dropped, or are now among the permanent rows
                if self._closed.get(first).place(row.kind, row.identity, row.key)[0] is not None:
                    return True
        return False

    def _in_permanent_rows(self, row: Ready) -> bool:
        kept = self._closed.kept() if row.kind.for_ever else None
        return kept is not None and kept.locate(row.kind, row.identity) is not None

    # ------------------------------------------------------------ the open segment

    def _begin(self) -> Head[Segment]:
        while True:
            try:
                head = self._head or self._open_newest()
            except SegmentGone:
                continue
            head.segment.db.execute("BEGIN IMMEDIATE")
            if head.segment.seal() is not None:
                head.segment.db.execute("ROLLBACK")
                self._leave(head)
            elif self._is_full(head):
                self._close(head)
            else:
                if not head.segment.is_current:  # empty, because an old format is full from its first row on
                    head.segment.upgrade()
                return head

    def _open_newest(self) -> Head[Segment]:
        listing = self._directory.listing()
        if not listing.firsts:
            create_segment(self._directory.segment(1), 1, self._clock())
            listing = self._directory.listing()
        self._closed.listing(again=True)
        self._closed.learn_filters()
        head = Head(Segment(self._directory.segment(listing.firsts[-1]), self._ring, write=True), self._texts)
        self._head = head
        return head

    def _is_full(self, head: Head[Segment]) -> bool:
        db = head.segment.db
        size = db.execute("PRAGMA page_count").fetchone()[0] * db.execute("PRAGMA page_size").fetchone()[0]
        return head.is_full(self._config, self._clock(), head.segment.newest(), size)

    def _close(self, head: Head[Segment]) -> None:
        """Seal the segment and move on to the next."""
        db, rows_of = head.segment.db, head.segment.rows_of
        tables = [kind.table for kind in KINDS if db.execute(f"SELECT 1 FROM {rows_of(kind)} LIMIT 1").fetchone()]
        keys = [key for (key,) in db.execute("SELECT key FROM identities")]
        seal = (head.segment.newest(), self._clock(), json.dumps(tables), build_filter(keys))
        db.execute("INSERT INTO seal VALUES (1, ?, ?, ?, ?)", seal)
        db.execute("COMMIT")
        with suppress(driver.Error):
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._leave(head)

    def _leave(self, head: Head[Segment]) -> None:
        """Move on from a sealed segment. Create the next one if there is none."""
        seal = head.segment.seal()
        assert seal is not None
        if self._directory.listing().firsts[-1] == head.segment.first:
            create_segment(self._directory.segment(seal.last + 1), seal.last + 1, self._clock())
        self._forget_head()

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.segment.close()
            self._head = None


def first_segment(directory: LogDirectory, clock: Clock, first: Cursor) -> None:
    """Create the log's first segment, beginning with row `first`, if there is none. Refuse a log that this code must not append to.

    Raises BadConfig, Corrupt, StorageFull, the driver's errors.
    """
    try:
        if not directory.listing().firsts:
            create_segment(directory.segment(first), first, clock())
        with suppress(SegmentGone):
            Segment(directory.segment(directory.listing().firsts[-1]), None).close()
    except OSError as error:
        raise StorageFull(f"cannot create {directory.path}: {error}; make the run's directory writable") from error


# ---------------------------------------------------------------- the log


class SqlLog(RowLog):
    """The `Log` seam on a directory of SQLite files. Create it with `open`; call `close` when done, or use it as a context manager.

    Example::

        with SqlLog.open(run / "log") as log:
            await log.append(turn, signal)
            async for seq, row in log.read(0, {Turn, Signal}):
                ...
    """

    def __init__(self, directory: LogDirectory, clock: Clock, config: RecordConfig) -> None:
        self._directory = directory
        ring, sealed = _open_ring(directory.path, config, clock), SegmentFilters()
        reader = LogReader(directory, ring, sealed)
        super().__init__(reader, Appender(directory, config, clock, ring, sealed), ring, config)

    @classmethod
    def open(
        cls, path: Path, clock: Clock = wall_clock, config: RecordConfig | None = None, *, first: Cursor = 1
    ) -> Self:
        """Open or create the log in the directory `path`. `first` is the sequence number of the first row if the log is created.

        `clock` measures the age of segments; the order of rows never depends on it. Encryption keys, if there are any, are stored beside
        the directory, in ``<path>-keys.db``, so that a copy of the log alone cannot be decrypted.

        Raises:
            BadConfig: this SQLite version can corrupt databases, the log's format is newer or older than this code reads, the directory
                belongs to another program, or the master key is wrong.
            Corrupt: a file is damaged or not a database.
            StorageFull: the disk has no room for an empty log.
        """
        sqlite.refuse_faulty(driver.sqlite_version)
        directory = LogDirectory(path)
        directory.prepare()
        with translated(path):
            first_segment(directory, clock, first)
            return cls(directory, clock, config or RecordConfig())

    # ------------------------------------------------------------ retention and deletion

    async def keep(self, rows: Sequence[tuple[Cursor, Row]]) -> None:
        await asyncio.to_thread(keep_rows, self._directory, rows)

    def _drop_older(self, now: float, days: float, keep_after: Cursor) -> int:
        return drop_segments(self._directory, now, days, keep_after)


def _open_ring(path: Path, config: RecordConfig, clock: Clock) -> KeyRing | None:
    keys = path.with_name(path.name + "-keys.db")
    if config.encrypt is Encrypt.NONE and not keys.exists():
        return None
    return KeyRing(keys, config.master_key, clock)
