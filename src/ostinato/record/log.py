"""The log on SQLite: every turn, signal, reward, holdback, batch, release and contract, in one order, durable when `append` returns.

Several processes may append to one file; within a process one thread commits for all callers (`writer.py`). Readers see
snapshots and never block a writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, cast

from sqlalchemy import Select, func, select, tuple_
from sqlalchemy.exc import DatabaseError

from ostinato.core.errors import StorageFull
from ostinato.core.records import Identity, Row, identity
from ostinato.core.seams import Clock, Cursor, R
from ostinato.record import schema
from ostinato.record.codec import Kind, decode, encode, kind_of
from ostinato.record.migrations import upgrade
from ostinato.record.sqlite import connect, translate
from ostinato.record.writer import LOOKUP, GroupWriter

PAGE = 256  # rows of each kind that a reader holds at once

_newest = select(func.coalesce(func.max(schema.entries.c.seq), 0))


class SqlLog:
    """The `Log` seam on one SQLite file. Use `open`; call `close` when done, or use it as a context manager.

    Example::

        with SqlLog.open(store / "log.sqlite") as log:
            await log.append(turn, signal)
            async for seq, row in log.read(0, {Turn, Signal}):
                ...
    """

    def __init__(self, path: Path, clock: Clock | None) -> None:
        self._path = path
        self._read_engine = connect(path, write=False)
        self._write_engine = connect(path, write=True)
        upgrade(self._write_engine, path)
        self._writer = GroupWriter(self._write_engine, path, clock)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-reader")

    @classmethod
    def open(cls, path: Path, clock: Clock | None = None) -> Self:
        """Open or create the log at `path` and bring its schema up to date.

        `clock` stamps entries with the time of their commit, for people who look into the file; order never depends on it.

        Raises:
            BadConfig: SQLite is in the corruption range, the file is newer than this code, or it is another program's.
            Corrupt: the file is damaged or no database.
            StorageFull: the disk has no room for an empty log.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path, clock)
        except DatabaseError as error:
            raise translate(error, path) from error
        except OSError as error:
            raise StorageFull(f"cannot create {path}: {error}; make the store writable") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Commit what is waiting and let go of the file."""
        self._writer.close()
        self._reader.shutdown()
        self._read_engine.dispose()
        self._write_engine.dispose()

    # ------------------------------------------------------------ the seam

    async def append(self, *rows: Row) -> Cursor:
        """Write all rows or none; durable when it returns the newest sequence number. A repeated identity is ignored.

        Raises:
            BadRequest: a field cannot be stored (NaN, a lone surrogate, a token id over 2^31); `field` names it.
            StorageFull: the disk refused; nothing of this call was kept, and the log works again once there is room.
            Unavailable: the log is closed, or another process has held the write lock for over 30 seconds.
        """
        return await self._writer.submit([encode(row) for row in rows])

    async def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """Rows of the given kinds above `after`, oldest first, up to what was committed when reading began."""
        loop = asyncio.get_running_loop()
        chosen = [kind_of(kind) for kind in kinds]
        end = await loop.run_in_executor(self._reader, self.newest)
        while after < end and chosen:
            page, after = await loop.run_in_executor(self._reader, self._page, chosen, after, end)
            for item in page:
                yield item

    async def find(self, kind: type[R], identities: Sequence[Identity]) -> list[R]:
        """The rows of one kind with these identities, in the order asked for; unknown ones are left out."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._reader, self._where, kind_of(kind), identities)
        by_identity = {identity(row): row for row in found}
        return [cast(R, by_identity[each]) for each in identities if each in by_identity]

    async def horizon(self) -> Cursor:
        """0: nothing is ever dropped."""
        return 0

    # ------------------------------------------------------------ queries

    def newest(self) -> Cursor:
        """The sequence number of the newest row; 0 for an empty log."""
        return self._all(_newest)[0][0]

    def tail(self, n: int, kinds: set[type]) -> list[tuple[Cursor, Row]]:
        """The newest `n` rows of the given kinds, oldest of them first."""
        rows: list[tuple[Cursor, Row]] = []
        for kind in (kind_of(each) for each in kinds):
            table = schema.metadata.tables[kind.table]
            rows += self._rows(kind, select(table).order_by(table.c.seq.desc()).limit(n))
        return sorted(rows, key=lambda item: item[0])[-n:] if n > 0 else []

    def _page(self, kinds: list[Kind], after: Cursor, end: Cursor) -> tuple[list[tuple[Cursor, Row]], Cursor]:
        """The next rows of all kinds in order, and how far they reach: no kind has an unread row up to there."""
        rows: list[tuple[Cursor, Row]] = []
        for kind in kinds:
            table = schema.metadata.tables[kind.table]
            query = select(table).where(table.c.seq > after, table.c.seq <= end).order_by(table.c.seq).limit(PAGE)
            found = self._rows(kind, query)
            if len(found) == PAGE:
                end = found[-1][0]
            rows += found
        return sorted((row for row in rows if row[0] <= end), key=lambda item: item[0]), end

    def _where(self, kind: Kind, identities: Sequence[Identity]) -> list[Row]:
        table = schema.metadata.tables[kind.table]
        columns = tuple_(*(table.c[name] for name in kind.identity))
        rows: list[Row] = []
        for start in range(0, len(identities), LOOKUP):
            query = select(table).where(columns.in_(identities[start : start + LOOKUP]))
            rows += [row for _, row in self._rows(kind, query)]
        return rows

    def _rows(self, kind: Kind, query: Select[Any]) -> list[tuple[Cursor, Row]]:
        return [(row.seq, decode(kind, row._mapping)) for row in self._all(query)]  # pyright: ignore[reportPrivateUsage]

    def _all(self, query: Select[Any]) -> Sequence[Any]:
        try:
            with self._read_engine.begin() as connection:
                return connection.execute(query).all()
        except DatabaseError as error:
            raise translate(error, self._path) from error
