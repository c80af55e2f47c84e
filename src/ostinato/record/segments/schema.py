"""The tables of a segment file, and its creation, which is atomic.

A row's place `seq` is assigned in the transaction that writes it, and writers exclude each other, so `seq` is the order of commits.
Rows are never changed: triggers refuse UPDATE and DELETE, and a segment is closed by inserting its single `seal`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ostinato.core.errors import BadConfig
from ostinato.core.seams import Cursor
from ostinato.record import sqlite
from ostinato.record.codec.kinds import SIGNALS, SMALL
from ostinato.record.sqlite import driver, translate

FORMAT = 2
"""The format version of new segments. Each file carries its own version (`PRAGMA user_version`).

In 2, what a caller wrote of a turn's sampling lies under the turn's key, and so does its text even if its tokens spell it.
"""

READABLE = frozenset({1, 2})
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
    kind.table: "seq INTEGER PRIMARY KEY, body BLOB NOT NULL"
    + (", secret INTEGER, said BLOB" if kind is SIGNALS else "")
    for kind in SMALL
}


def statements() -> list[str]:
    """The statements that make an empty database a segment."""
    made = [f"CREATE TABLE {name} ({columns})" for name, columns in _TABLES.items()]
    for name in _TABLES:
        made += [
            f"CREATE TRIGGER {name}_no_{verb.lower()} BEFORE {verb} ON {name} "
            "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END"
            for verb in ("UPDATE", "DELETE")
        ]
    return [*made, f"PRAGMA application_id={APPLICATION}"]


def mark(connection: Any) -> int:
    """Mark a segment as one of this format version, which is returned. Called in a transaction."""
    connection.execute(f"PRAGMA user_version={FORMAT}")
    return FORMAT


def create(path: Path, first: Cursor, made_at: float) -> None:
    """Create the segment whose first row has this place, unless it exists. Raises like `sqlite.create`."""

    def build(connection: Any) -> None:
        for statement in statements():
            connection.execute(statement)
        mark(connection)
        connection.execute("INSERT INTO segment VALUES (1, ?, ?)", (first, made_at))

    sqlite.create(path, build)


def check(connection: Any, path: Path) -> int:
    """The version of a segment's format.

    Raises:
        BadConfig: it was written by newer code, or by another program.
        Corrupt: it is damaged or not a database.
    """
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except driver.Error as error:
        raise translate(error, path) from error
    if application != APPLICATION:
        raise BadConfig(f"{path} is a database, but no log of Ostinato's; name another directory")
    if version not in READABLE:
        raise BadConfig(
            f"{path} has format {version}, this Ostinato reads {', '.join(map(str, sorted(READABLE)))}; "
            "open it with the Ostinato that wrote it, or start a new run"
        )
    return int(version)
