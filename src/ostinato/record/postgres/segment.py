"""Reads and writes the log's tables in Postgres: one segment, the permanent rows of dropped segments, and a reader across all of them."""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, LiteralString, TypeVar
from uuid import UUID

import psycopg
from psycopg import sql

from ostinato.core.errors import Corrupt, TooLarge
from ostinato.core.records import Identity, PolicyVersion, Row
from ostinato.core.seams import Cursor
from ostinato.record.codec.kinds import TURNS, Kind, load
from ostinato.record.codec.shrink import Dictionaries, Shrinker, Use
from ostinato.record.codec.turns import Ready
from ostinato.record.packed_rows import DAMAGE, PackedRows
from ostinato.record.postgres.schema import LAYOUT, NUMBERED, NUMBERS, table_of
from ostinato.record.postgres.server import Connection, LogServer, ask_at_once, digest_of, passes
from ostinato.record.reader import PAGE, Found

_TURN = NUMBERS[TURNS.table]
_MAX_MESSAGE = 1_000_000_000  # bytes; the server accepts somewhat more
_ROW_OVERHEAD = 100  # bytes per row of a message: lengths and numbers
COLUMNS: LiteralString = "seq, kind, body, secret, said, spelt, tokens, logprobs, routes"
_NAME_ROWS: LiteralString = "INSERT INTO identities SELECT * FROM unnest(%b::uuid[], %b::bigint[])"
_INSERT_ROWS: LiteralString = (
    f"INSERT INTO {{rows}} ({COLUMNS}, identity) SELECT * FROM unnest(%b::bigint[], %b::smallint[], %b::bytea[], %b::bigint[], "
    "%b::bytea[], %b::int[], %b::bytea[], %b::bytea[], %b::bytea[], %b::uuid[])"
)

Stored = tuple[Kind, tuple[Any, ...]]
"""A row's kind, and the row in the form that `PackedRows.decode` expects."""


class PostgresSegment(PackedRows):
    """A segment over a connection that the caller owns. Used by one thread at a time. Raises psycopg's errors, Corrupt."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        first: Cursor,
        layout: int,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """`layout`: the version in which its rows were written. `on_answer`: called whenever the server has answered."""
        self.connection = connection
        self.layout = layout
        self._on_answer = on_answer
        self.first = first
        self.newest = first - 1
        self.size = 0  # bytes
        self.dictionaries = 1
        # the statements that `commit` sends, with their values
        self._pending: list[tuple[sql.SQL | sql.Composed, list[Any]]] = []
        self._bytes = 0  # approximate bytes of these values
        self._table = table_of(first)
        super().__init__(f"{name}, segment {first}", None)

    def ask(self, query: LiteralString, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows of a query, in which `{rows}` stands for this segment's table."""
        composed = sql.SQL(query).format(rows=self._table)
        found = self.connection.execute(composed, values, binary=True).fetchall()
        self._on_answer()
        return found

    @property
    def knows_calls(self) -> bool:
        return self.layout >= 3

    def stored_newest(self) -> Cursor:
        """Return the sequence number of its newest row, or the one before its first if it has none."""
        return self.ask("SELECT coalesce(max(seq), %s) FROM {rows}", (self.first - 1,))[0][0]

    # ------------------------------------------------------------ rows

    def fetch_kinds(
        self, kinds: Collection[Kind], after: Cursor, end: Cursor, limit: int, *, newest_first: bool = False
    ) -> list[Stored]:
        """Return stored rows of these kinds with `after` < seq <= `end`, in order, at most `limit` of each kind."""
        tail: LiteralString = "DESC" if newest_first else "ASC"
        query: LiteralString = (
            f"SELECT {COLUMNS} FROM unnest(%s::smallint[]) AS wanted(number) CROSS JOIN LATERAL (SELECT * FROM {{rows}} "
            f"WHERE kind = wanted.number AND seq > %s AND seq <= %s ORDER BY seq {tail} LIMIT %s) AS found ORDER BY seq {tail}"
        )
        numbers = [NUMBERS[kind.table] for kind in kinds]
        return [as_stored(row) for row in self.ask(query, (numbers, after, end, limit))]

    def fetch_places(self, places: Sequence[Cursor]) -> list[Stored]:
        """Return the rows with these sequence numbers, without missing ones."""
        query: LiteralString = f"SELECT {COLUMNS} FROM {{rows}} WHERE seq = ANY(%s::bigint[])"
        return [as_stored(row) for row in self.ask(query, (list(places),))]

    def before_last(self, count: int, kind: Kind) -> tuple[Cursor | None, int]:
        """Return (seq before the newest `count` rows of one kind, `count`), or (None, number of such rows) if there are fewer here."""
        number = NUMBERS[kind.table]
        query = "SELECT seq FROM {rows} WHERE kind = %s ORDER BY seq DESC LIMIT 1 OFFSET %s"
        if found := self.ask(query, (number, count - 1)):
            return found[0][0] - 1, count
        return None, self.ask("SELECT count(*) FROM {rows} WHERE kind = %s", (number,))[0][0]

    def locate(self, kind: Kind, identity: Identity) -> Cursor | None:
        query = "SELECT seq FROM identities WHERE identity = %s AND seq >= %s"
        found = self.ask(query, (digest_of(kind, identity), self.first))
        return found[0][0] if found else None

    # ------------------------------------------------------------ token ids, policies, token texts and dictionaries

    def stored_tokens(self, seq: Cursor) -> tuple[int | None, bytes] | None:
        found = self.ask("SELECT secret, tokens FROM {rows} WHERE seq = %s AND tokens IS NOT NULL", (seq,))
        return found[0] if found else None

    def stored_policies(self) -> Iterable[tuple[int, int, str]]:
        found = self.ask("SELECT id, number, hash FROM policies WHERE segment = %s", (self.first,))
        return [(place, number, bytes(digest).decode()) for place, number, digest in found]

    def stored_pieces(self, tokens: Collection[int] | None) -> Sequence[tuple[int, str]]:
        query = (
            "SELECT token, text FROM pieces WHERE segment = %s AND (%s::bigint[] IS NULL OR token = ANY(%s::bigint[]))"
        )
        wanted = None if tokens is None else list(tokens)
        return [(token, bytes(text).decode()) for token, text in self.ask(query, (self.first, wanted, wanted))]

    def stored_dictionaries(self) -> Dictionaries:
        found = self.ask("SELECT id, use, body FROM dictionaries WHERE segment = %s", (self.first,))
        return {number: (Use(use), bytes(body)) for number, use, body in found}

    # ------------------------------------------------------------ writing, in a transaction that the caller began

    def made_at(self) -> float:
        return self.ask("SELECT made_at FROM segments WHERE first = %s", (self.first,))[0][0]

    def put(self, rows: Sequence[tuple[Ready, int]], values: Sequence[tuple[Any, ...]]) -> None:
        stored = [
            (*_as_columns(row.kind, value), UUID(int=key)) for (row, key), value in zip(rows, values, strict=True)
        ]
        columns = [list(column) for column in zip(*stored, strict=True)]
        self._bytes += sum(
            _ROW_OVERHEAD + sum(len(value) for value in row if isinstance(value, bytes)) for row in stored
        )
        self._pending += [
            (sql.SQL(_NAME_ROWS), [columns[-1], columns[0]]),
            (sql.SQL(_INSERT_ROWS).format(rows=self._table), columns),
        ]

    @property
    def is_current(self) -> bool:
        return self.layout == LAYOUT

    def upgrade(self) -> None:
        """Mark an empty segment as having the current layout; its columns are the same."""
        self.layout = LAYOUT
        self._pending.append((sql.SQL("UPDATE segments SET layout = %b WHERE first = %b"), [LAYOUT, self.first]))

    def put_pieces(self, rows: Sequence[tuple[int, str]]) -> int:
        """See `PackedRows`. Called in the transaction or before it."""
        insert = (
            "INSERT INTO pieces SELECT %s, * FROM unnest(%s::bigint[], %s::bytea[]) WHERE EXISTS "
            "(SELECT 1 FROM segments WHERE first = %s) ON CONFLICT DO NOTHING RETURNING token"
        )
        tokens, texts = [token for token, _ in rows], [text.encode() for _, text in rows]
        return len(self.ask(insert, (self.first, tokens, texts, self.first)))

    def put_policy(self, policy: PolicyVersion) -> int:
        """See `PackedRows`. `policies` must hold all policies of the segment."""
        for number, known in self.policies.items():
            if known == policy:
                return number
        number = 1 + max(self.policies, default=0)
        self.policies[number] = policy
        values = [self.first, number, policy.number, policy.hash.encode()]
        self._pending.append((sql.SQL("INSERT INTO policies VALUES (%b, %b, %b, %b)"), values))
        return number

    def commit(self) -> None:
        """Send the pending statements and commit the transaction, in one round trip. Raises TooLarge.

        Values are bound parameters, because the server logs the text of a failed statement.

        Postgres counts no idle-in-transaction time during or after a pipeline. Hence the transaction may end with a pipeline but must not
        begin with one: afterwards no lock is held, whether it committed or aborted. A process that stalls between the pipeline's messages
        still holds the lock; processes that wait for it end its session (`LogServer.end_silent_writer`).
        """
        pending, size = self._pending, self._bytes
        self._pending, self._bytes = [], 0
        if size > _MAX_MESSAGE:
            raise TooLarge(f"the rows together are larger than {self.name} can take at once; send fewer")
        with self.connection.pipeline():
            for statement, values in pending:
                self.connection.execute(statement, values, prepare=False)
            self.connection.execute("COMMIT", prepare=False)

    def newest_dictionary(self) -> int:
        return self.dictionaries

    def put_dictionary(self, number: int, use: Use, body: bytes) -> None:
        values = (self.first, number, use.value, body)
        self.connection.execute("INSERT INTO dictionaries VALUES (%s, %s, %s, %s)", values)


def as_stored(row: Sequence[Any]) -> Stored:
    """Convert a row of `COLUMNS` to the form that `PackedRows.decode` expects."""
    seq, number, body, secret, said, spelt, tokens, logprobs, routes = row
    if number == _TURN:
        return TURNS, (seq, secret, body, tokens, logprobs, spelt if said is None else said, routes)
    kind = NUMBERED[number]
    return kind, (seq, body, secret, said) if kind.said else (seq, body)


def _as_columns(kind: Kind, value: Sequence[Any]) -> tuple[Any, ...]:
    """The inverse of `as_stored`."""
    number = NUMBERS[kind.table]
    if kind is not TURNS:
        seq, body, secret, said = value if kind.said else (*value, None, None)
        return seq, number, body, secret, said, None, None, None, None
    seq, secret, head, tokens, logprobs, text, routes = value
    said, spelt = (text, None) if isinstance(text, bytes) else (None, text)
    return seq, number, head, secret, said, spelt, tokens, logprobs, routes


# ---------------------------------------------------------------- permanent rows of dropped segments


class KeptRows:
    """The rows of permanent kinds (`FOR_EVER`) of dropped segments. Raises psycopg's errors, Corrupt."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._shrinker = Shrinker(dict)

    def keep(self, rows: Sequence[tuple[Kind, Cursor, bytes]]) -> None:
        """Write rows as (kind, sequence number, JSON). Existing rows stay as they are."""
        values = [(seq, NUMBERS[kind.table], self._shrinker.pack(Use.ROWS, body)) for kind, seq, body in rows]
        with self._connection.cursor() as cursor:
            cursor.executemany("INSERT INTO kept VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", values)

    def fetch_kinds(
        self, kinds: Collection[Kind], after: Cursor, end: Cursor, limit: int, *, newest_first: bool = False
    ) -> list[Stored]:
        """Do what `PostgresSegment.fetch_kinds` does."""
        tail: LiteralString = "DESC" if newest_first else "ASC"
        query: LiteralString = (
            "SELECT found.* FROM unnest(%s::smallint[]) AS wanted(number) CROSS JOIN LATERAL (SELECT * FROM kept "
            f"WHERE kind = wanted.number AND seq > %s AND seq <= %s ORDER BY seq {tail} LIMIT %s) AS found ORDER BY seq {tail}"
        )
        numbers = [NUMBERS[kind.table] for kind in kinds if kind.for_ever]
        return self._asked(query, (numbers, after, end, limit)) if numbers else []

    def fetch_places(self, places: Sequence[Cursor]) -> list[Stored]:
        """Return the rows with these sequence numbers, without missing ones."""
        return self._asked("SELECT * FROM kept WHERE seq = ANY(%s::bigint[])", (list(places),))

    def before_last(self, count: int, kind: Kind) -> tuple[Cursor | None, int]:
        """Do what `PostgresSegment.before_last` does."""
        query: LiteralString = "SELECT seq FROM kept WHERE kind = %s ORDER BY seq DESC LIMIT %s"
        found = self._connection.execute(query, (NUMBERS[kind.table], count)).fetchall()
        return (found[-1][0] - 1, count) if len(found) == count else (None, len(found))

    def decode(self, kind: Kind, stored: Sequence[Any]) -> Row:
        """Return the record of one stored row."""
        try:
            return kind.record(**load(kind, kind.body, json.loads(self._shrinker.unpack(stored[1]))))
        except DAMAGE as error:
            raise Corrupt(
                f"row {stored[0]} of {self._name} cannot be read: {error!r}; restore it from a copy"
            ) from error

    def _asked(self, query: LiteralString, values: Sequence[Any]) -> list[Stored]:
        found = self._connection.execute(query, values, binary=True).fetchall()
        return [(NUMBERED[number], (seq, body)) for seq, number, body in found]


# ---------------------------------------------------------------- the reader across segments


_MAX_CACHED = 6  # segments
_NEWEST: LiteralString = "SELECT max(first) FROM segments; SELECT coalesce(max(seq), {below}) FROM {rows}"
_BEGIN: LiteralString = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT first, layout FROM segments ORDER BY first"
)
T = TypeVar("T")


class PostgresReader:
    """Answers queries about the log, each from one consistent state. Thread-safe: one query at a time. Never blocks a writer."""

    def __init__(self, server: LogServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.heard = 0.0  # when the server answered last, on the monotonic clock
        self._segments: OrderedDict[Cursor, PostgresSegment] = OrderedDict()
        self._layouts: dict[Cursor, int] = {}

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._leave()

    def newest(self) -> Cursor:
        """Return the newest sequence number, or the horizon if no row is above it. One round trip if the newest segment is cached."""
        return self._retry(self._newest)

    def horizon(self) -> Cursor:
        """Return the sequence number up to which retention has dropped rows, apart from permanent ones; 0 if none."""
        return self._ask(lambda firsts: firsts[0] - 1)

    def page(self, kinds: Collection[Kind], after: Cursor, end: Cursor) -> tuple[Found, Cursor]:
        """Return the next rows of these kinds above `after`, in order, and the cursor up to which all of them have been read."""
        return self._retry(lambda: self._page(self._firsts(), kinds, after, end))

    def find(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Row]:
        """Return the rows with these identities, without unknown ones. One round trip if all are unknown, the most frequent case."""
        return self._retry(lambda: self._find(kind, identities))

    def places(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Cursor]:
        """Return the sequence numbers of the rows with these identities, without unknown ones."""
        return self._retry(lambda: self._places(kind, identities))

    def tail(self, n: int, kinds: Collection[Kind]) -> Found:
        """Return the newest `n` rows of these kinds, in log order."""
        return self._ask(lambda firsts: self._tail(firsts, n, kinds))

    def before_last(self, count: int, kind: Kind) -> Cursor:
        """Return the cursor above which the newest `count` (>= 1) rows of a kind lie; 0 if there are fewer."""
        return self._ask(lambda firsts: self._before_last(firsts, count, kind))

    # ------------------------------------------------------------ queries

    def _ask(self, question: Callable[[list[Cursor]], T]) -> T:
        """Run a query in one snapshot. `question` receives the first rows of the segments."""
        return self._retry(lambda: self._in_snapshot(question))

    def _retry(self, ask: Callable[[], T]) -> T:
        """Run a query. Retry if a segment was dropped in the meantime or the connection was lost."""
        deadline = time.monotonic() + self._server.wait_s
        with self._lock:
            while True:
                try:
                    answer = ask()
                    self._hear()
                    return answer
                except psycopg.Error as error:
                    self._leave()
                    dropped = isinstance(error, psycopg.errors.UndefinedTable)
                    if not (dropped or passes(error)) or time.monotonic() > deadline:
                        raise self._server.refusal(error) from error
                except BaseException:
                    self._leave()
                    raise

    def _connected(self) -> Connection:
        self._connection = self._connection or self._server.dial()
        return self._connection

    def _in_snapshot(self, question: Callable[[list[Cursor]], T]) -> T:
        connection = self._connected()
        _, listing = ask_at_once(connection, _BEGIN)
        answer = question(self._listed(listing))
        connection.execute("COMMIT")
        return answer

    def _leave(self) -> None:
        self._segments.clear()
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _newest(self) -> Cursor:
        """Return the newest sequence number. If the cached segment is still the newest, it holds it, and no snapshot is needed."""
        connection, known = self._connected(), max(self._segments, default=None)
        if known is not None:
            ((newest,),), ((place,),) = ask_at_once(connection, _NEWEST, below=known - 1, rows=table_of(known))
            if newest == known:
                return place
        return self._in_snapshot(lambda firsts: self._segment(firsts[-1]).stored_newest())

    def _asked(self, query: LiteralString, values: Sequence[Any]) -> list[Any]:
        found = self._connected().execute(query, values, binary=True).fetchall()
        self._hear()
        return found

    def _hear(self) -> None:
        self.heard = time.monotonic()

    def _firsts(self) -> list[Cursor]:
        return self._listed(self._asked("SELECT first, layout FROM segments ORDER BY first", ()))

    def _listed(self, segments: Sequence[Any]) -> list[Cursor]:
        """Remember the segments' layouts and return their first rows."""
        self._layouts = dict(segments)
        return list(self._layouts)

    def _segment(self, first: Cursor) -> PostgresSegment:
        assert self._connection is not None
        segment, layout = self._segments.pop(first, None), self._layouts[first]
        if segment is None:
            segment = PostgresSegment(self._connection, self._server.name, first, layout, self._hear)
        segment.layout = layout  # it changes when an empty segment is upgraded
        self._segments[first] = segment
        if len(self._segments) > _MAX_CACHED:
            self._segments.popitem(last=False)
        return segment

    def _home(self, firsts: list[Cursor], index: int) -> PostgresSegment | KeptRows:
        """Return a segment by its index in `firsts`; for -1 the permanent rows of dropped segments."""
        if index >= 0:
            return self._segment(firsts[index])
        assert self._connection is not None
        return KeptRows(self._connection, self._server.name)

    def _page(self, firsts: list[Cursor], kinds: Collection[Kind], after: Cursor, end: Cursor) -> tuple[Found, Cursor]:
        """Read a page without a snapshot, like `_find`: the listing is newer than `end`, so its segments hold all rows up to `end`."""
        index = bisect_right(firsts, after + 1) - 1
        following = firsts[index + 1 : index + 2]
        upto = min(end, following[0] - 1) if following else end
        home = self._home(firsts, index)
        rows = home.fetch_kinds(kinds, after, upto, PAGE)
        by_kind: dict[str, list[Cursor]] = defaultdict(list)
        for kind, stored in rows:
            by_kind[kind.table].append(stored[0])
        upto = min([upto, *(places[-1] for places in by_kind.values() if len(places) == PAGE)])
        return [(stored[0], home.decode(kind, stored)) for kind, stored in rows if stored[0] <= upto], upto

    def _places(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Cursor]:
        digests = {digest_of(kind, identity): identity for identity in identities}
        query: LiteralString = "SELECT identity, seq FROM identities WHERE identity = ANY(%s::uuid[])"
        return {digests[digest]: seq for digest, seq in self._asked(query, (list(digests),))} if digests else {}

    def _find(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Row]:
        """Find rows without a snapshot: rows never change, and the segments listed after their numbers were found hold all of them."""
        places = self._places(kind, identities)
        if not places:
            return {}
        firsts = self._firsts()
        by_segment: dict[int, list[Cursor]] = defaultdict(list)
        for seq in sorted(places.values()):
            by_segment[bisect_right(firsts, seq) - 1].append(seq)
        found: dict[Cursor, Row] = {}
        for index, seqs in by_segment.items():
            home = self._home(firsts, index)
            found |= {stored[0]: home.decode(kind, stored) for kind, stored in home.fetch_places(seqs)}
        return {identity: found[seq] for identity, seq in places.items() if seq in found}

    def _tail(self, firsts: list[Cursor], n: int, kinds: Collection[Kind]) -> Found:
        found: Found = []
        for index in reversed(range(-1, len(firsts))):
            left = n - len(found)
            if left > 0:
                home = self._home(firsts, index)
                rows = home.fetch_kinds(kinds, 0, _END, left, newest_first=True)[:left]
                found += [(stored[0], home.decode(kind, stored)) for kind, stored in rows]
        return sorted(found, key=lambda item: item[0])

    def _before_last(self, firsts: list[Cursor], count: int, kind: Kind) -> Cursor:
        for index in reversed(range(-1, len(firsts))):
            place, found = self._home(firsts, index).before_last(count, kind)
            if place is not None:
                return place
            count -= found
        return 0


_END = (1 << 63) - 1
