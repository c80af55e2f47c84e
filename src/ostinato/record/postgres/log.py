"""The log on Postgres, for workers on several machines: rows have one total order and are durable when `append` returns.

Writers exclude each other over the whole log, and sequence numbers have no gaps. Every writer holds one advisory lock from before it reads
the newest sequence number until its rows are committed. Numbers are therefore assigned in commit order, and a reader never misses a row
that is committed later with a lower number. If the connection is lost, even in the middle of COMMIT, the rows are tried again; rows that
were committed are recognised by their identities.

Saved folds are stored in the same schema.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, LiteralString, Self, TypeVar
from uuid import UUID

import psycopg
from psycopg import sql

from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, Conflict, OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion, Row, Turn
from ostinato.core.retry import Patience
from ostinato.core.seams import Clock, Cursor
from ostinato.record.codec.kinds import FOR_EVER, TURNS
from ostinato.record.codec.turns import Ready, prepare
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.folds import check_fold_name, pack_fold, unpack_fold
from ostinato.record.head import Head, TokenText
from ostinato.record.postgres.schema import LAYOUT, NUMBERS, add_segment, check_layout, ready_schema, table_of
from ostinato.record.postgres.segment import KeptRows, PostgresReader, PostgresSegment
from ostinato.record.postgres.server import Connection, LogServer, ask_at_once, digest_of, passes
from ostinato.record.reader import PAGE
from ostinato.record.retention import DAY_S, closed_at
from ostinato.record.roles import FencingToken
from ostinato.record.rowlog import RowLog

# ---------------------------------------------------------------- appending


Open = Head[PostgresSegment]
_LOCK_AND_READ: LiteralString = (
    "BEGIN; SELECT pg_advisory_xact_lock({lock}); {fencing}; SELECT max(first), (SELECT layout FROM log) FROM segments; "
    "SELECT coalesce(max(seq), {first} - 1), pg_total_relation_size({name}::regclass) FROM {rows}; "
    "SELECT max(id) FROM dictionaries WHERE segment = {first}; "
    "SELECT id, number, hash FROM policies WHERE segment = {first} AND id > {known}; "
    "SELECT identity FROM identities WHERE identity = ANY({identities}::uuid[])"
)


class PostgresAppender:
    """Appends rows. Used by one thread. Raises psycopg's errors. After an error, the next transaction begins with a fresh connection."""

    def __init__(self, server: LogServer, config: RecordConfig, clock: Clock) -> None:
        self.name = server.name
        self.token_text: TokenText | None = None
        self._server = server
        self._config = config
        self._clock = clock
        self._reader = PostgresReader(server)
        self._connection: Connection | None = None
        self._head: Open | None = None
        self._texts: dict[int, str] = {}
        self._known: set[UUID] = set()  # identities of this transaction's rows that the log already holds

    def close(self) -> None:
        """Close the connection."""
        self._leave()
        self._reader.close()

    def assign_keys(self, rows: Sequence[Ready]) -> None:
        """Do nothing: logs in Postgres are not encrypted."""

    @contextmanager
    def transaction(self, rows: Sequence[Ready]) -> Generator[Open]:
        """Yield the open segment under the log's lock; commit at the end, roll back on an error. Full segments are closed first.

        Takes two round trips: one takes the lock and reads the state, one writes and commits.
        """
        try:
            head = self._begin(rows)
        except psycopg.errors.LockNotAvailable:
            self._roll_back()
            raise
        except BaseException:
            self._leave()
            raise
        try:
            yield head
            head.segment.commit()
        except BaseException:
            self._leave()  # closes the connection, which rolls back, and drops caches that mention unwritten rows
            raise

    def write(self, head: Open, rows: Sequence[Ready]) -> Cursor:
        """Write the rows that the log does not hold yet and return the newest sequence number. Called inside the transaction.

        Raises Conflict if a turn's identity belongs to a different turn, because another gateway answered the same call concurrently.
        """
        segment = head.segment
        asked: dict[UUID, Ready] = {}
        for row in rows:
            _refuse_other(asked.setdefault(digest_of(row.kind, row.identity), row).row, row.row)
        known = self._known
        fresh = [(row, digest.int) for digest, row in asked.items() if digest not in known]
        self._compare([row for digest, row in asked.items() if digest in known and row.turn is not None])
        newest = segment.newest
        if fresh:
            head.insert(fresh, newest, self.token_text)
        return newest + len(fresh)

    def waits(self, error: Exception) -> bool:
        """Return True if the transaction may be retried: none of its rows was kept, or those kept will be recognised."""
        return passes(error) or isinstance(error, psycopg.errors.UndefinedTable)  # the cached segment was dropped

    def refusal(self, error: Exception) -> OstinatoError:
        """Translate an error of a transaction into an OstinatoError."""
        return self._server.refusal(error)

    def _compare(self, known: Sequence[Ready]) -> None:
        found = self._reader.find(TURNS, [row.identity for row in known]) if known else {}
        for row in known:
            _refuse_other(found.get(row.identity), row.row)

    # ------------------------------------------------------------ the open segment

    def _begin(self, rows: Sequence[Ready]) -> Open:
        digests = [digest_of(row.kind, row.identity) for row in rows]
        while True:
            head = self._head or self._open_newest()
            segment = head.segment
            head.prefetch(rows, self.token_text)
            if not self._lock_and_read(segment, digests):  # another process has moved on to the next segment
                segment.connection.execute("ROLLBACK")
                self._head = None
            elif head.is_full(self._config, self._clock(), segment.newest, segment.size):
                self._close_segment(segment)
            else:
                if not segment.is_current:  # empty, because an old format is full from its first row on
                    segment.upgrade()
                return head

    def _open_newest(self) -> Open:
        connection = self._connection = self._connection or self._server.dial()
        newest = "SELECT first, layout FROM segments ORDER BY first DESC LIMIT 1"
        first, layout = connection.execute(newest).fetchone() or (1, LAYOUT)
        segment = PostgresSegment(connection, self._server.name, first, layout)
        head = self._head = Head(segment, self._texts)
        return head

    def _lock_and_read(self, segment: PostgresSegment, digests: Sequence[UUID]) -> bool:
        """Take the log's lock, and read the segment's state and which rows exist. Return False if the segment is no longer the newest.

        Raises LeaseLost if this process writes in a role that another process now has, BadConfig if a newer Ostinato migrated the tables.
        """
        table = table_of(segment.first)
        _, _, fence, newest, standing, dictionaries, policies, known = ask_at_once(
            segment.connection,
            _LOCK_AND_READ,
            lock=self._server.lock,
            fencing=self._server.fencing,
            first=segment.first,
            name=table.as_string(),
            rows=table,
            known=max(segment.policies, default=0),
            identities=f"{{{','.join(map(str, digests))}}}",
        )
        self._server.check_fence(fence[0] if fence else None)
        first, layout = newest[0]
        check_layout(self._server, LAYOUT if layout is None else layout)
        if first != segment.first:
            return False
        segment.newest, segment.size = standing[0]
        segment.dictionaries = dictionaries[0][0] or 1
        segment.policies |= {
            place: PolicyVersion(number=number, hash=bytes(digest).decode()) for place, number, digest in policies
        }
        self._known = {identity for (identity,) in known}
        return True

    def _close_segment(self, segment: PostgresSegment) -> None:
        """Close the segment and create the next one."""
        connection, now = segment.connection, self._clock()
        connection.execute(
            "UPDATE segments SET last = %s, at = %s WHERE first = %s", (segment.newest, now, segment.first)
        )
        add_segment(connection, segment.newest + 1, now)
        connection.execute("COMMIT")
        self._head = None

    def _roll_back(self) -> None:
        """Roll back after a lock timeout. Keep connection and cache, because nothing was written. End a lock holder that fell silent."""
        try:
            if self._connection is not None:
                self._server.end_silent_writer(self._connection, before="ROLLBACK; ")
        except psycopg.Error:
            self._leave()

    def _leave(self) -> None:
        self._head = None
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None


def _refuse_other(known: Row | None, row: Row) -> None:
    if isinstance(known, Turn) and isinstance(row, Turn) and _content(known) != _content(row):
        raise Conflict(
            f"turn {row.id} was answered by another gateway at the same time, and that answer is kept; send the call again to get it"
        )


def _content(turn: Turn) -> tuple[object, ...]:
    return turn.tenant, turn.user, turn.prompt_ids, turn.sampled_ids


# ---------------------------------------------------------------- retention


def drop_tables(server: LogServer, now: float, retain_days: float, keep_after: Cursor) -> int:
    """Drop the segments that were closed more than `retain_days` ago and have no row above `keep_after`; return how many.

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
    """Drop one segment. Return False if another process is dropping it."""
    with connection.transaction():
        claimed = connection.execute("SELECT pg_try_advisory_xact_lock(%s)", (server.lock ^ 1,)).fetchone()
        still = connection.execute("SELECT 1 FROM segments WHERE first = %s", (first,)).fetchone()
        if claimed != (True,) or still is None:
            return False
        server.fence(connection)
        # deleting the identities of many rows may take longer than the timeout
        connection.execute("SET LOCAL statement_timeout = 0")
        _copy_out(PostgresSegment(connection, server.name, first, LAYOUT), KeptRows(connection, server.name), last)
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
    for kind in FOR_EVER:
        after = 0
        while rows := segment.fetch_kinds([kind], after, last, PAGE):
            after = rows[-1][1][0]
            kept.keep([(kind, stored[0], prepare(segment.decode(kind, stored)).body) for _, stored in rows])


def keep_copied(server: LogServer, rows: Sequence[tuple[Cursor, Row]]) -> None:
    """Add permanent rows of a copied log, with their identities and sequence numbers. Raises StorageFull, Unavailable."""
    ready = [(prepare(row), seq) for seq, row in rows]
    places = [(digest_of(each.kind, each.identity), seq) for each, seq in ready]

    def keep(connection: Connection) -> None:
        with connection.transaction(), connection.cursor() as cursor:
            KeptRows(connection, server.name).keep([(each.kind, seq, each.body) for each, seq in ready])
            cursor.executemany("INSERT INTO identities VALUES (%s, %s) ON CONFLICT DO NOTHING", places)

    server.ask(keep)


# ---------------------------------------------------------------- the log


T = TypeVar("T")

_NO_PATIENCE = Patience(0.0, lambda _: nullcontext())  # raises the first Unavailable


def server_of(config: RecordConfig) -> LogServer:
    """Return the server of these settings; does not connect. Raises BadConfig for settings that a log in Postgres does not support."""
    if config.encrypt is not Encrypt.NONE:
        raise BadConfig(
            "record.encrypt is not available for a log in Postgres; set it to 'none', or leave record.url empty"
        )
    return LogServer.of(config)


class PostgresLog(RowLog):
    """The `Log` seam on a schema of a Postgres database. Create it with `open`.

    Example::

        with PostgresLog.open(RecordConfig(url="postgresql://ann@db.example/loop?sslmode=verify-full")) as log:
            await log.append(turn, signal)
    """

    def __init__(
        self, server: LogServer, name: str, clock: Clock, config: RecordConfig, patience: Patience | None = None
    ) -> None:
        self.name = name
        self._server, self._patience = server, patience or _NO_PATIENCE
        self._answers = PostgresReader(server)
        super().__init__(self._answers, PostgresAppender(server, config, clock), None, config)

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
        """Open or create the log at `record.url`, in the schema `record.namespace`. Waits up to `record.append_s` for a starting server.

        `first`: the sequence number of the first row if the log is created. `token`: the fencing token of a process with a role, checked
        with each write; once another process has the role, writes raise LeaseLost. `patience`: how to wait for an unavailable server once
        the log is open; None: calls raise Unavailable within `record.append_s`.

        Raises:
            BadConfig: the URL is not valid, the server is too old or not durable, or the schema belongs to another program or version.
            Unavailable: no writable server answers.
        """
        server = server_of(config).fenced(token)
        name = server.ask(lambda connection: ready_schema(connection, server, clock(), first))
        return cls(server, name, clock, config, patience)

    async def append(self, *rows: Row) -> Cursor:
        append = super().append
        return await self._patience.until_there(lambda: append(*rows)) if rows else await append()

    async def keep(self, rows: Sequence[tuple[Cursor, Row]]) -> None:
        await asyncio.to_thread(keep_copied, self._server, rows)

    def _drop_older(self, now: float, days: float, keep_after: Cursor) -> int:
        return drop_tables(self._server, now, days, keep_after)

    async def _ask(self, question: Callable[[], T]) -> T:
        return await self._patience.until_there(lambda: self._answered(question))

    async def _answered(self, question: Callable[[], T]) -> T:
        """Run a query; queries run one at a time. Raises Unavailable if the server sends no answer for `record.append_s`.

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


# ---------------------------------------------------------------- folds


logger = logging.getLogger(__name__)


class PostgresFolds:
    """`core.seams.Folds` in a log's schema, which must exist. Each name may have one writer; each call opens a connection.

    Example: ``await PostgresFolds(LogServer.of(config.record)).save("desk", 812, {"open": []})``
    """

    def __init__(self, server: LogServer, patience: Patience | None = None) -> None:
        """`patience`: how to wait for an unavailable server; None: do not wait."""
        self._server, self._patience = server, patience or _NO_PATIENCE

    async def save(self, name: str, cursor: Cursor, state: Mapping[str, Any]) -> None:
        """Save a fold, durably on return. Raises StorageFull, Unavailable, LeaseLost; the previous fold is then untouched."""
        check_fold_name(name)
        insert = "INSERT INTO folds VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET body = excluded.body"
        await self._asked(insert, (name, pack_fold(cursor, state)), writes=True)

    async def load(self, name: str) -> tuple[Cursor, dict[str, Any]] | None:
        """Return the fold saved last; None if there is none. Raises Unavailable.

        A fold that is damaged or has another format version is logged and counts as none.
        """
        check_fold_name(name)
        found = await self._asked("SELECT body FROM folds WHERE name = %s", (name,))
        try:
            return unpack_fold(bytes(found[0][0])) if found else None
        except ValueError as error:
            logger.warning("fold %s in %s cannot be used, the log is read instead: %s", name, self._server.name, error)
            return None

    async def _asked(self, query: LiteralString, values: tuple[Any, ...], *, writes: bool = False) -> list[Any]:
        def ask(connection: Connection) -> list[Any]:
            with connection.transaction():
                if writes:
                    self._server.fence(connection)
                cursor = connection.execute(query, values, binary=True)
                return cursor.fetchall() if cursor.description else []

        return await self._patience.until_there(lambda: asyncio.to_thread(self._server.ask, ask))
