"""The transaction that appends rows in Postgres: one writer of the whole log at a time, places without gaps.

Every writer holds the same advisory lock from before it reads the newest place until its rows are committed. So places are assigned in
the order of commits, and a reader never misses a row that is committed later with a lower place. If the connection is lost, even in the
middle of COMMIT, the rows are tried again, and rows that were committed are recognised by their identities.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import LiteralString
from uuid import UUID

import psycopg

from ostinato.core.errors import Conflict, OstinatoError
from ostinato.core.records import PolicyVersion, Row, Turn
from ostinato.core.seams import Clock, Cursor
from ostinato.record.codec.kinds import TURNS
from ostinato.record.codec.rows import Ready
from ostinato.record.config import RecordConfig
from ostinato.record.head import Head, TokenText
from ostinato.record.keys import KeyRing
from ostinato.record.owners import assign
from ostinato.record.postgres.reader import PostgresReader
from ostinato.record.postgres.schema import LAYOUT, add_segment, check_layout, table_of
from ostinato.record.postgres.segment import PostgresSegment
from ostinato.record.postgres.server import Connection, LogServer, ask_at_once, digest_of, passes

Open = Head[PostgresSegment]
_LOOK: LiteralString = (
    "BEGIN; SELECT pg_advisory_xact_lock({lock}); {fencing}; SELECT max(first), (SELECT layout FROM log) FROM segments; "
    "SELECT coalesce(max(seq), {first} - 1), pg_total_relation_size({name}::regclass) FROM {rows}; "
    "SELECT max(id) FROM dictionaries WHERE segment = {first}; "
    "SELECT id, number, hash FROM policies WHERE segment = {first} AND id > {known}; "
    "SELECT identity FROM identities WHERE identity = ANY({identities}::uuid[])"
)


class PostgresAppender:
    """Appends rows. Used by one thread. Raises psycopg's errors; after one, the next transaction begins with a fresh connection."""

    def __init__(self, server: LogServer, config: RecordConfig, clock: Clock, ring: KeyRing | None) -> None:
        self.name = server.name
        self.token_text: TokenText | None = None
        self._server = server
        self._config = config
        self._clock = clock
        self._ring = ring
        self._reader = PostgresReader(server, ring)
        self._connection: Connection | None = None
        self._head: Open | None = None
        self._texts: dict[int, str] = {}
        self._there: set[UUID] = set()  # identities of this transaction that the log already holds

    def close(self) -> None:
        """Close the connection."""
        self._leave()
        self._reader.close()

    def assign_keys(self, rows: Sequence[Ready]) -> None:
        """Assign each row's text its key; new keys are stored on return. Called before the transaction."""
        if self._ring is not None:
            assign(rows, self._config.encrypt, self._ring, self._reader.owners)

    @contextmanager
    def transaction(self, rows: Sequence[Ready]) -> Generator[Open]:
        """The open segment, under the log's lock; committed at the end, rolled back on an error. Closes segments that are full.

        Two round trips: one to take the lock and read the state, one to write and commit.
        """
        try:
            head = self._begin(rows)
        except psycopg.errors.LockNotAvailable:
            self._step_back()
            raise
        except BaseException:
            self._leave()
            raise
        try:
            yield head
            head.segment.commit()
        except BaseException:
            self._leave()  # closes its connection, which rolls back, and drops its memory of rows that were not written
            raise

    def write(self, head: Open, rows: Sequence[Ready]) -> Cursor:
        """Write the rows that the log does not hold yet; returns the newest row's place. Called inside the transaction.

        Raises Conflict for a turn whose identity belongs to another turn, from a gateway that answered the same call at the same time.
        """
        segment = head.segment
        asked: dict[UUID, Ready] = {}
        for row in rows:
            _refuse_other(asked.setdefault(digest_of(row.kind, row.identity), row).row, row.row)
        there = self._there
        fresh = [(row, digest.int) for digest, row in asked.items() if digest not in there]
        self._compare([row for digest, row in asked.items() if digest in there and row.turn is not None])
        newest = segment.newest
        if fresh:
            head.insert(fresh, newest, self.token_text)
        return newest + len(fresh)

    def waits(self, error: Exception) -> bool:
        """True if the transaction may be retried: none of its rows was kept, or those kept will be recognised."""
        return passes(error) or isinstance(error, psycopg.errors.UndefinedTable)  # the cached segment was dropped

    def refusal(self, error: Exception) -> OstinatoError:
        """Translate an error of a transaction into the project's own."""
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
            head.foresee(rows, self.token_text)
            if not self._look(segment, digests):  # another process has moved on to the next
                segment.connection.execute("ROLLBACK")
                self._head = None
            elif self._is_full(head):
                self._go_on(segment)
            else:
                return head

    def _open_newest(self) -> Open:
        connection = self._connection = self._connection or self._server.dial()
        (first,) = connection.execute("SELECT max(first) FROM segments").fetchone() or (1,)
        head = self._head = Head(PostgresSegment(connection, self._server.name, first, self._ring), self._texts)
        return head

    def _look(self, segment: PostgresSegment, digests: Sequence[UUID]) -> bool:
        """Take the log's lock, and read the segment's state and which rows exist; False if the segment is no longer the newest.

        Raises LeaseLost if this process writes in a role that another process now has, BadConfig if a newer Ostinato changed the tables.
        """
        table = table_of(segment.first)
        _, _, fence, newest, standing, dictionaries, policies, there = ask_at_once(
            segment.connection,
            _LOOK,
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
        self._there = {identity for (identity,) in there}
        return True

    def _is_full(self, head: Open) -> bool:
        segment, config = head.segment, self._config
        rows = segment.newest - segment.first + 1
        age = self._clock() - head.made_at
        return rows > 0 and (
            rows >= config.segment_rows
            or segment.size >= config.segment_mb * 1e6
            or not 0 <= age < 3600 * config.segment_hours
        )

    def _go_on(self, segment: PostgresSegment) -> None:
        """Close the segment permanently and create the next."""
        connection, now = segment.connection, self._clock()
        connection.execute(
            "UPDATE segments SET last = %s, at = %s WHERE first = %s", (segment.newest, now, segment.first)
        )
        add_segment(connection, segment.newest + 1, now)
        connection.execute("COMMIT")
        self._head = None

    def _step_back(self) -> None:
        """Roll back after a lock timeout, keeping connection and cache as nothing was written; end a silent holder of the lock."""
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


def _refuse_other(there: Row | None, row: Row) -> None:
    if isinstance(there, Turn) and isinstance(row, Turn) and _said(there) != _said(row):
        raise Conflict(
            f"turn {row.id} was answered by another gateway at the same time, and that answer is kept; send the call again to get it"
        )


def _said(turn: Turn) -> tuple[object, ...]:
    return turn.tenant, turn.user, turn.prompt_ids, turn.sampled_ids
