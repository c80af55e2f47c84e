"""A segment of the log as an SQLite file: its tables, its atomic creation, and the open file.

A row's sequence number `seq` is assigned in the transaction that writes it, and writers exclude each other, so `seq` is the commit order.
Rows are never changed: triggers refuse UPDATE and DELETE. A segment is closed by inserting its single `seal`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.core.errors import BadConfig
from ostinato.core.records import Identity, PolicyVersion, Row
from ostinato.core.seams import Cursor
from ostinato.record import sqlite
from ostinato.record.codec import turns
from ostinato.record.codec.kinds import KINDS, SMALL, TURNS, Kind, key_of
from ostinato.record.codec.shrink import Dictionaries, Use
from ostinato.record.codec.turns import Ready
from ostinato.record.keys import KeyRing
from ostinato.record.packed_rows import DAMAGE, PackedRows
from ostinato.record.sqlite import connect, driver, translate, translated

# ---------------------------------------------------------------- the tables


FORMAT = 5
"""The format version of new segments. Each file carries its own version (`PRAGMA user_version`).

2: a turn's caller-given sampling options, and its text even if its tokens spell it, are encrypted under the turn's key.
3: turns store their parsed tool calls.
4: turns store steering and consent; penalties are encrypted under the turn's key; rows for bases and people's consents.
5: rows for forgotten people, for dials that people set, and for priors of dials.
"""

READABLE = frozenset({1, 2, 3, 4, 5})
"""The format versions that this code reads."""

APPLICATION = 0x4F53544C  # "OSTL": marks the file as part of a log

_TABLES = {
    "segment": "id INTEGER PRIMARY KEY CHECK (id = 1), first INTEGER NOT NULL, made_at REAL NOT NULL",
    "seal": "id INTEGER PRIMARY KEY CHECK (id = 1), last INTEGER NOT NULL, at REAL NOT NULL, kinds TEXT NOT NULL, filter BLOB NOT NULL",
    "identities": "key INTEGER PRIMARY KEY, seq INTEGER NOT NULL",
    "policies": "id INTEGER PRIMARY KEY, number INTEGER NOT NULL, hash TEXT NOT NULL",
    "pieces": "token INTEGER PRIMARY KEY, text TEXT NOT NULL",
    "dictionaries": "id INTEGER PRIMARY KEY, use TEXT NOT NULL, body BLOB NOT NULL",
    "turns": "seq INTEGER PRIMARY KEY, secret INTEGER, head BLOB NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL, "
    "text BLOB, routes BLOB",
} | {
    kind.table: "seq INTEGER PRIMARY KEY, body BLOB NOT NULL" + (", secret INTEGER, said BLOB" if kind.said else "")
    for kind in SMALL
}


def _tables(names: Iterable[str]) -> list[str]:
    """Return the statements that create these tables with triggers that refuse changes to their rows."""
    made = [f"CREATE TABLE {name} ({_TABLES[name]})" for name in names]
    for name in names:
        made += [
            f"CREATE TRIGGER {name}_no_{verb.lower()} BEFORE {verb} ON {name} "
            "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END"
            for verb in ("UPDATE", "DELETE")
        ]
    return made


def create_segment(path: Path, first: Cursor, made_at: float) -> None:
    """Create the segment whose first row has the sequence number `first`, unless it exists. Raises like `sqlite.create`."""

    def build(connection: Any) -> None:
        for statement in (*_tables(_TABLES), f"PRAGMA application_id={APPLICATION}", f"PRAGMA user_version={FORMAT}"):
            connection.execute(statement)
        connection.execute("INSERT INTO segment VALUES (1, ?, ?)", (first, made_at))

    sqlite.create(path, build)


def check_format(connection: Any, path: Path) -> int:
    """Return the format version of a segment.

    Raises:
        BadConfig: it was written by newer code, or by another program.
        Corrupt: it is damaged or not a database.
    """
    with translated(path):
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise BadConfig(f"{path} is a database, but not a log of Ostinato; use another directory")
    if version not in READABLE:
        raise BadConfig(
            f"{path} has format {version}, this Ostinato reads {', '.join(map(str, sorted(READABLE)))}; "
            "open it with the Ostinato that wrote it, or start a new run"
        )
    return int(version)


# ---------------------------------------------------------------- the segment


KEYS = (1 << 63) - 1  # bit mask of identity keys
END: Cursor = (1 << 63) - 1  # the largest sequence number


class SegmentGone(Exception):
    """The file is missing because retention dropped it."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The seal of a closed segment: its last sequence number, when it was closed, and the tables that have rows."""

    last: Cursor
    at: float
    tables: frozenset[str]


class Segment(PackedRows):
    """An open segment file. Used by one thread at a time; close it when done.

    Raises, here and in every method: SegmentGone (opening only), Corrupt, BadConfig for another format, the driver's errors.
    """

    def __init__(self, path: Path, ring: KeyRing | None, *, write: bool = False) -> None:
        self.path = path
        try:
            self.db = connect(path, write=write)
        except driver.OperationalError as error:
            if not path.exists():
                raise SegmentGone(str(path)) from error
            raise translate(error, path) from error
        try:
            self.version = check_format(self.db, path)
            (self.first,) = self.db.execute("SELECT first FROM segment").fetchone()
            super().__init__(str(path), ring)
        except BaseException as error:
            self.db.close()
            if isinstance(error, Exception) and not path.exists():  # dropped while it was being opened
                raise SegmentGone(str(path)) from error
            raise
        self._seal: Seal | None = None

    def close(self) -> None:
        """Close the file."""
        self.db.close()

    # ------------------------------------------------------------ state

    @property
    def knows_calls(self) -> bool:
        return self._format() >= 3

    def _format(self) -> int:
        # an empty segment is upgraded before its first row; `seal` reads the version when it first sees a seal
        if not self.is_current and self.seal() is None:
            self.version = check_format(self.db, self.path)
        return self.version

    def rows_of(self, kind: Kind) -> str:
        """Return the table of a kind for use in a query: an empty subquery if the segment is older than the kind."""
        return kind.table if kind.since <= self._format() else "(SELECT 0 AS seq, x'' AS body WHERE 0)"

    def newest(self) -> Cursor:
        """Return the sequence number of its newest row, or the one before its first if it has none."""
        places = ", ".join(f"ifnull((SELECT max(seq) FROM {self.rows_of(kind)}), 0)" for kind in KINDS)
        return self.db.execute(f"SELECT max({places})").fetchone()[0] or self.first - 1

    def seal(self) -> Seal | None:
        """Return the segment's seal; None while it is open."""
        if self._seal is None:
            found = self.db.execute("SELECT last, at, kinds FROM seal").fetchone()
            if found and not self.is_current:  # another process may have upgraded it before filling and sealing it
                self.version = check_format(self.db, self.path)
            self._seal = found and Seal(found[0], found[1], frozenset(json.loads(found[2])))
        return self._seal

    def filter(self) -> bytes:
        """Return the Bloom filter of its identities (`segment_directory`), built when it was closed; empty while it is open."""
        found = self.db.execute("SELECT filter FROM seal").fetchone()
        return found[0] if found else b""

    # ------------------------------------------------------------ rows

    def fetch(self, kind: Kind, after: Cursor, end: Cursor, limit: int, *, newest_first: bool = False) -> list[Any]:
        """Return up to `limit` stored rows of one kind with `after` < seq <= `end`. `decode` turns them into records."""
        order = "DESC" if newest_first else "ASC"
        query = f"SELECT * FROM {self.rows_of(kind)} WHERE seq > ? AND seq <= ? ORDER BY seq {order} LIMIT ?"
        return self.db.execute(query, (after, end, limit)).fetchall()

    def before_last(self, count: int, kind: Kind, end: Cursor = END) -> tuple[Cursor | None, int]:
        """Return (seq before the newest `count` rows of one kind, `count`), or (None, number of such rows) if there are fewer here.

        Rows above `end` do not count.
        """
        query = f"SELECT seq FROM {self.rows_of(kind)} WHERE seq <= ? ORDER BY seq DESC LIMIT 1 OFFSET ?"
        found = self.db.execute(query, (end, count - 1)).fetchone()
        if found is not None:
            return found[0] - 1, count
        return None, self.db.execute(f"SELECT count(*) FROM {self.rows_of(kind)} WHERE seq <= ?", (end,)).fetchone()[0]

    def locate(self, kind: Kind, identity: Identity) -> Cursor | None:
        """Return the sequence number of the row with this identity; None if it is not in this segment."""
        return self.place(kind, identity, key_of(kind, identity))[0]

    def place(self, kind: Kind, identity: Identity, key: int) -> tuple[Cursor | None, int]:
        """Return the row's sequence number or None, and the key that it has or would get.

        Identities with colliding keys take the next free key (linear probing).
        """
        while (found := self.db.execute("SELECT seq FROM identities WHERE key = ?", (key,)).fetchone()) is not None:
            if self._identity(kind, found[0]) == identity:
                return found[0], key
            key = (key + 1) & KEYS
        return None, key

    def known(self, keys: Sequence[int]) -> set[int]:
        """Return those of these keys that are taken."""
        query = "SELECT key FROM identities WHERE key IN (SELECT value FROM json_each(?))"
        return {key for (key,) in self.db.execute(query, (json.dumps(list(keys)),))}

    def row(self, kind: Kind, seq: Cursor) -> Row | None:
        """Return the record with this sequence number; None if it is of another kind."""
        stored = self.db.execute(f"SELECT * FROM {self.rows_of(kind)} WHERE seq = ?", (seq,)).fetchone()
        return None if stored is None else self.decode(kind, stored)

    def owner(self, seq: Cursor) -> tuple[str, str] | None:
        """Return the tenant and the user of the turn with this sequence number. Needs no encryption key."""
        stored = self.db.execute("SELECT head FROM turns WHERE seq = ?", (seq,)).fetchone()
        try:
            return None if stored is None else turns.head_owner(self.shrinker.unpack(stored[0]))
        except DAMAGE as error:
            raise self.corrupt(seq, error) from error

    def _identity(self, kind: Kind, seq: Cursor) -> Identity | None:
        column = "head" if kind is TURNS else "body"
        stored = self.db.execute(f"SELECT {column} FROM {self.rows_of(kind)} WHERE seq = ?", (seq,)).fetchone()
        if stored is None:
            return None
        try:
            plain = self.shrinker.unpack(stored[0])
            if kind is TURNS:
                return (turns.head_id(plain),)
            values = json.loads(plain)
            return tuple(values[at] for at in kind.places)
        except DAMAGE as error:
            raise self.corrupt(seq, error) from error

    # ------------------------------------------------------------ token ids, policies, token texts and dictionaries

    def stored_tokens(self, seq: Cursor) -> tuple[int | None, bytes] | None:
        return self.db.execute("SELECT secret, tokens FROM turns WHERE seq = ?", (seq,)).fetchone()

    def stored_policies(self) -> Iterable[tuple[int, int, str]]:
        return self.db.execute("SELECT id, number, hash FROM policies")

    def stored_pieces(self, tokens: Collection[int] | None) -> Sequence[tuple[int, str]]:
        if tokens is None:
            return self.db.execute("SELECT token, text FROM pieces").fetchall()
        query = "SELECT token, text FROM pieces WHERE token IN (SELECT value FROM json_each(?))"
        return self.db.execute(query, (json.dumps(list(tokens)),)).fetchall()

    def stored_dictionaries(self) -> Dictionaries:
        found = self.db.execute("SELECT id, use, body FROM dictionaries").fetchall()
        return {number: (Use(use), body) for number, use, body in found}

    # ------------------------------------------------------------ writing, in a transaction that the caller began

    @property
    def is_current(self) -> bool:
        return self.version == FORMAT

    def upgrade(self) -> None:
        """Upgrade an empty segment, or the file of permanent rows, to the current format by adding the tables of later kinds."""
        for statement in _tables([kind.table for kind in SMALL if kind.since > self._format()]):
            self.db.execute(statement)
        self.db.execute(f"PRAGMA user_version={FORMAT}")
        self.version = FORMAT

    def made_at(self) -> float:
        return self.db.execute("SELECT made_at FROM segment").fetchone()[0]

    def put(self, rows: Sequence[tuple[Ready, int]], values: Sequence[tuple[Any, ...]]) -> None:
        tables: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for (row, _), value in zip(rows, values, strict=True):
            tables[row.kind.table].append(value)
        places = [(key, value[0]) for (_, key), value in zip(rows, values, strict=True)]
        self.db.executemany("INSERT INTO identities VALUES (?, ?)", places)
        for table, chosen in tables.items():
            marks = ", ".join("?" * len(chosen[0]))
            self.db.executemany(f"INSERT INTO {table} VALUES ({marks})", chosen)

    def put_pieces(self, rows: Sequence[tuple[int, str]]) -> int:
        return self.db.executemany("INSERT OR IGNORE INTO pieces VALUES (?, ?)", rows).rowcount

    def put_policy(self, policy: PolicyVersion) -> int:
        query = "SELECT id FROM policies WHERE number = ? AND hash = ?"
        found = self.db.execute(query, (policy.number, policy.hash)).fetchone()
        if found is not None:
            return found[0]
        insert = "INSERT INTO policies (number, hash) VALUES (?, ?)"
        return self.db.execute(insert, (policy.number, policy.hash)).lastrowid

    def newest_dictionary(self) -> int:
        return self.db.execute("SELECT ifnull(max(id), 1) FROM dictionaries").fetchone()[0]

    def put_dictionary(self, number: int, use: Use, body: bytes) -> None:
        self.db.execute("INSERT INTO dictionaries VALUES (?, ?, ?)", (number, use, body))


@contextmanager
def open_segment(path: Path, *, write: bool = False) -> Generator[Segment]:
    """Yield a segment, opened without encryption keys. Raises SegmentGone if it is gone or another process drops it in the meantime."""
    segment = Segment(path, None, write=write)
    try:
        yield segment
    except driver.Error as error:
        if path.exists():
            raise
        raise SegmentGone(str(path)) from error
    finally:
        segment.close()
