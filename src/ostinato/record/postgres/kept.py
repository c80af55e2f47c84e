"""The permanent rows, which stay at their places when retention drops their segments."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, LiteralString

from ostinato.core.errors import Corrupt
from ostinato.core.records import Row
from ostinato.core.seams import Cursor
from ostinato.record.codec.kinds import Kind, load
from ostinato.record.codec.shrink import Shrinker, Use
from ostinato.record.postgres.schema import NUMBERED, NUMBERS
from ostinato.record.postgres.segment import Stored
from ostinato.record.postgres.server import Connection


class KeptRows:
    """Batches, releases, stamps and alarms of dropped segments. Raises psycopg's errors, Corrupt."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._shrinker = Shrinker(dict)

    def keep(self, rows: Sequence[tuple[Kind, Cursor, bytes]]) -> None:
        """Write rows, each with its place and its JSON. Existing rows stay as they are."""
        values = [(seq, NUMBERS[kind.table], self._shrinker.pack(Use.ROWS, body)) for kind, seq, body in rows]
        with self._connection.cursor() as cursor:
            cursor.executemany("INSERT INTO kept VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", values)

    def fetch_kinds(
        self, kinds: Collection[Kind], after: Cursor, end: Cursor, limit: int, *, newest_first: bool = False
    ) -> list[Stored]:
        """Stored rows of these kinds, `after` < place <= `end`, at most `limit` of each kind, in order."""
        tail: LiteralString = "DESC" if newest_first else "ASC"
        query: LiteralString = (
            "SELECT found.* FROM unnest(%s::smallint[]) AS wanted(number) CROSS JOIN LATERAL (SELECT * FROM kept "
            f"WHERE kind = wanted.number AND seq > %s AND seq <= %s ORDER BY seq {tail} LIMIT %s) AS found ORDER BY seq {tail}"
        )
        return self._asked(query, ([NUMBERS[kind.table] for kind in kinds], after, end, limit)) if kinds else []

    def fetch_places(self, places: Sequence[Cursor]) -> list[Stored]:
        """The rows at these places, as far as they exist."""
        return self._asked("SELECT * FROM kept WHERE seq = ANY(%s::bigint[])", (list(places),))

    def before_last(self, count: int, kind: Kind) -> tuple[Cursor | None, int]:
        """Like `PostgresSegment.before_last`."""
        query: LiteralString = "SELECT seq FROM kept WHERE kind = %s ORDER BY seq DESC LIMIT %s"
        found = self._connection.execute(query, (NUMBERS[kind.table], count)).fetchall()
        return (found[-1][0] - 1, count) if len(found) == count else (None, len(found))

    def decode(self, kind: Kind, stored: Sequence[Any]) -> Row:
        """The record of one stored row."""
        try:
            return kind.record(**load(kind, kind.body, json.loads(self._shrinker.unpack(stored[1]))))
        except (ValueError, IndexError, TypeError, KeyError) as error:
            raise Corrupt(
                f"row {stored[0]} of {self._name} cannot be read: {error!r}; restore it from a copy"
            ) from error

    def _asked(self, query: LiteralString, values: Sequence[Any]) -> list[Stored]:
        found = self._connection.execute(query, values, binary=True).fetchall()
        return [(NUMBERED[number], (seq, body)) for seq, number, body in found]
