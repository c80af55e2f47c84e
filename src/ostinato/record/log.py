"""The log on SQLite: every turn, signal, reward, batch and release, in one order, durable when `append` returns.

The log is a directory of segments, each its own database (decision 0007). Several processes may append to a log; within a process one
thread commits for all callers (`writer.py`). Readers never block a writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from ostinato.core.clock import wall_clock
from ostinato.core.records import Row
from ostinato.core.seams import Clock, Cursor
from ostinato.record import sqlite
from ostinato.record.appender import Appender, first_segment
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.keys import KeyRing
from ostinato.record.reader import LogReader
from ostinato.record.retention import drop_segments, keep_rows
from ostinato.record.rowlog import RowLog
from ostinato.record.segments.directory import LogDirectory
from ostinato.record.segments.filters import SealedKeys
from ostinato.record.sqlite import driver, translate


class SqlLog(RowLog):
    """The `Log` seam on a directory of SQLite files. Use `open`; call `close` when done, or use it as a context manager.

    Example::

        with SqlLog.open(run / "log") as log:
            await log.append(turn, signal)
            async for seq, row in log.read(0, {Turn, Signal}):
                ...
    """

    def __init__(self, directory: LogDirectory, clock: Clock, config: RecordConfig) -> None:
        self._directory = directory
        ring, sealed = _open_ring(directory.path, config, clock), SealedKeys()
        reader = LogReader(directory, ring, sealed)
        super().__init__(reader, Appender(directory, config, clock, ring, sealed), ring, config)

    @classmethod
    def open(
        cls, path: Path, clock: Clock = wall_clock, config: RecordConfig | None = None, *, first: Cursor = 1
    ) -> Self:
        """Open or create the log in the directory `path`. `first` is the first row's sequence number in a log that is created.

        `clock` measures the age of segments; order never depends on it. Keys, if there are any, are stored beside the directory, in
        ``<path>-keys.db``, so that a copy of the log alone cannot be decrypted.

        Raises:
            BadConfig: SQLite is in the corruption range, the log is newer or older than this code reads or belongs to another program,
                or the master key is the wrong one.
            Corrupt: a file is damaged or not a database.
            StorageFull: the disk has no room for an empty log.
        """
        sqlite.refuse_faulty(driver.sqlite_version)
        directory = LogDirectory(path)
        directory.prepare()
        try:
            first_segment(directory, clock, first)
            return cls(directory, clock, config or RecordConfig())
        except driver.Error as error:
            raise translate(error, path) from error

    # ------------------------------------------------------------ retention and deletion

    async def keep(self, rows: Sequence[tuple[Cursor, Row]]) -> None:
        await asyncio.to_thread(keep_rows, self._directory, rows)

    async def drop_old(self, now: float, keep_after: Cursor) -> int:
        """Drop whole segments that are older than `record.retain_days`; returns how many. A worker calls this from time to time.

        `keep_after` is the oldest cursor of any saved fold: nothing above it is dropped. An idle log's last segment is closed here when
        its time has come. Raises StorageFull, Unavailable, Corrupt.
        """
        days = self._config.retain_days
        if days is None:
            return 0
        await self._writer.submit(())
        return await asyncio.to_thread(drop_segments, self._directory, now, days, keep_after)


def _open_ring(path: Path, config: RecordConfig, clock: Clock) -> KeyRing | None:
    keys = path.with_name(path.name + "-keys.db")
    if config.encrypt is Encrypt.NONE and not keys.exists():
        return None
    return KeyRing(keys, config.master_key, clock)
