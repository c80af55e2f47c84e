"""Drops old segments of a log in Postgres. Their steps, releases, contracts and alarms are copied out in the same transaction."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import sql

from ostinato.core.records import Row
from ostinato.core.seams import Cursor
from ostinato.record.codec.kinds import FOR_EVER, Kind
from ostinato.record.codec.rows import prepare
from ostinato.record.postgres.kept import KeptRows
from ostinato.record.postgres.schema import NUMBERS, table_of
from ostinato.record.postgres.segment import PostgresSegment
from ostinato.record.postgres.server import Connection, Server, digest_of
from ostinato.record.reader import PAGE
from ostinato.record.retention import DAY_S, closed_at


def drop_tables(server: Server, now: float, retain_days: float, keep_after: Cursor) -> int:
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


def _drop_table(connection: Connection, server: Server, first: Cursor, last: Cursor) -> bool:
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


def keep_copied(server: Server, rows: Sequence[tuple[Cursor, Row]]) -> None:
    """Add permanent rows of a copied log, with their identities, each at its place. Raises StorageFull, Unavailable."""
    ready = [(prepare(row), seq) for seq, row in rows]
    places = [(digest_of(each.kind, each.identity), seq) for each, seq in ready]

    def keep(connection: Connection) -> None:
        with connection.transaction(), connection.cursor() as cursor:
            KeptRows(connection, server.name).keep([(each.kind, seq, each.body) for each, seq in ready])
            cursor.executemany("INSERT INTO identities VALUES (%s, %s) ON CONFLICT DO NOTHING", places)

    server.ask(keep)
