"""The log on Postgres, for workers on several machines: rows have a single order and are durable when `append` returns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar

import psycopg
from psycopg import sql

from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.records import Row
from ostinato.core.seams import Clock, Cursor
from ostinato.record.codec.kinds import FOR_EVER, Kind
from ostinato.record.codec.rows import prepare
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.postgres.appender import PostgresAppender
from ostinato.record.postgres.kept import KeptRows
from ostinato.record.postgres.reader import PostgresReader
from ostinato.record.postgres.schema import NUMBERS, ready_schema, table_of
from ostinato.record.postgres.segment import PostgresSegment
from ostinato.record.postgres.server import Connection, LogServer, digest_of
from ostinato.record.reader import PAGE
from ostinato.record.retention import DAY_S, closed_at
from ostinato.record.retry import Patience
from ostinato.record.roles import FencingToken
from ostinato.record.rowlog import RowLog

# ---------------------------------------------------------------- retention


def drop_tables(server: LogServer, now: float, retain_days: float, keep_after: Cursor) -> int:
    """Drop the segments that were closed more than `retain_days` ago and have no row above `keep_after`; returns how many.

    Segments are dropped strictly oldest first. Safe alongside readers, writers, other callers and kill -9: each segment is dropped in one
    transaction. A segment that a reader uses is left for the next call. Raises StorageFull, Unavailable, Corrupt, LeaseLost.
    """
    dropped, before = 0, now - retain_days * DAY_S
    try:
        with server.dial() as connection:
            segments = connection.execute("SELECT first, last, at FROM segments ORDER BY first").fetchall()
            closed = closed_at([at for _, _, at in segments], now)
            for (first, last, _), at in zip(segments[:-1], closed, strict=False):
                if at is None or at >= before or last > keep_after or not _drop_table(connection, server, first, last):
                    break
                dropped += 1
    except psycopg.errors.LockNotAvailable:
        return dropped
    except psycopg.Error as error:
        raise server.refusal(error) from error
    return dropped


def _drop_table(connection: Connection, server: LogServer, first: Cursor, last: Cursor) -> bool:
    """Drop one segment; False if another process does so."""
    with connection.transaction():
        claimed = connection.execute("SELECT pg_try_advisory_xact_lock(%s)", (server.lock ^ 1,)).fetchone()
        still = connection.execute("SELECT 1 FROM segments WHERE first = %s", (first,)).fetchone()
        if claimed != (True,) or still is None:
            return False
        server.fence(connection)
        # deleting the identities of many rows may take long
        connection.execute("SET LOCAL statement_timeout = 0")
        _copy_out(PostgresSegment(connection, server.name, first, None), KeptRows(connection, server.name), last)
        gone = sql.SQL(
            "DELETE FROM identities USING {rows} AS old WHERE identities.identity = old.identity AND old.kind <> ALL(%s)"
        )
        stay = [NUMBERS[kind.table] for kind in FOR_EVER]
        connection.execute(gone.format(rows=table_of(first)), (stay,))
        for table in ("policies", "pieces", "dictionaries"):
            connection.execute(sql.SQL("DELETE FROM {} WHERE segment = %s").format(sql.Identifier(table)), (first,))
        connection.execute("DELETE FROM segments WHERE first = %s", (first,))
        connection.execute(sql.SQL("DROP TABLE {}").format(table_of(first)))
    return True


def _copy_out(segment: PostgresSegment, kept: KeptRows, last: Cursor) -> None:
    kinds: Sequence[Kind] = tuple(FOR_EVER)
    for kind in kinds:
        after = 0
        while rows := segment.fetch_kinds([kind], after, last, PAGE):
            after = rows[-1][1][0]
            kept.keep([(kind, stored[0], prepare(segment.decode(kind, stored)).body) for _, stored in rows])


def keep_copied(server: LogServer, rows: Sequence[tuple[Cursor, Row]]) -> None:
    """Add permanent rows of a copied log, with their identities, each at its place. Raises StorageFull, Unavailable."""
    ready = [(prepare(row), seq) for seq, row in rows]
    places = [(digest_of(each.kind, each.identity), seq) for each, seq in ready]

    def keep(connection: Connection) -> None:
        with connection.transaction(), connection.cursor() as cursor:
            KeptRows(connection, server.name).keep([(each.kind, seq, each.body) for each, seq in ready])
            cursor.executemany("INSERT INTO identities VALUES (%s, %s) ON CONFLICT DO NOTHING", places)

    server.ask(keep)


# ---------------------------------------------------------------- the log


T = TypeVar("T")


def server_of(config: RecordConfig) -> LogServer:
    """The server of the log with these settings. Raises BadConfig for settings that Postgres logs do not support; does not connect."""
    if config.encrypt is not Encrypt.NONE:
        raise BadConfig(
            "record.encrypt is not there for a log in Postgres; set it to 'none', or leave record.url empty"
        )
    return LogServer.of(config)


class PostgresLog(RowLog):
    """The `Log` seam on a schema of a Postgres database. Use `open`.

    Example::

        with PostgresLog.open(RecordConfig(url="postgresql://ann@db.example/loop?sslmode=verify-full")) as log:
            await log.append(turn, signal)
    """

    def __init__(
        self, server: LogServer, name: str, clock: Clock, config: RecordConfig, patience: Patience | None = None
    ) -> None:
        self.name = name
        self._server, self._patience = server, patience
        self._answers = PostgresReader(server, None)
        super().__init__(self._answers, PostgresAppender(server, config, clock, None), None, config)

    @classmethod
    def open(
        cls,
        config: RecordConfig,
        clock: Clock = wall_clock,
        *,
        first: Cursor = 1,
        token: FencingToken | None = None,
        patience: Patience | None = None,
    ) -> Self:
        """Open or create the log at `record.url`, in the schema `record.namespace`. Waits `record.append_s` for a server that starts.

        `first`: the place of the first row of a log that is created. `token`: the fencing token of a process with a role, checked with
        each write; once another process has that role, writes raise LeaseLost. `patience`: how to wait, once the log is open, for a
        server that is unavailable; None: calls raise Unavailable within `record.append_s`.

        Raises:
            BadConfig: the URL is not valid, the server is too old or not durable, or the schema is another program's or version's.
            Unavailable: no writable server answers.
        """
        server = server_of(config).fenced(token)
        name = server.ask(lambda connection: ready_schema(connection, server, clock(), first))
        return cls(server, name, clock, config, patience)

    async def append(self, *rows: Row) -> Cursor:
        append = super().append
        return await self._patiently(lambda: append(*rows)) if rows else await append()

    async def keep(self, rows: Sequence[tuple[Cursor, Row]]) -> None:
        await asyncio.to_thread(keep_copied, self._server, rows)

    async def drop_old(self, now: float, keep_after: Cursor) -> int:
        days = self._config.retain_days
        if days is None:
            return 0
        await self._writer.submit(())
        return await asyncio.to_thread(drop_tables, self._server, now, days, keep_after)

    async def _ask(self, question: Callable[[], T]) -> T:
        return await self._patiently(lambda: self._answered(question))

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        return await (ask() if self._patience is None else self._patience.until_there(ask))

    async def _answered(self, question: Callable[[], T]) -> T:
        """Run a query; queries run one at a time. Raises Unavailable after `record.append_s` without any answer from the server.

        A query that has not started by then is cancelled.
        """
        asked, wait_s = time.monotonic(), self._config.append_s
        answer = asyncio.get_running_loop().run_in_executor(self._asking, question)
        try:
            while not answer.done():
                left = max(asked, self._answers.heard) + wait_s - time.monotonic()
                if left <= 0:
                    raise Unavailable(
                        f"the log at {self._server.name} did not answer within {wait_s:g} s; see whether its server runs and try again"
                    )
                await asyncio.wait({answer}, timeout=left)
            return answer.result()
        finally:
            answer.cancel()
