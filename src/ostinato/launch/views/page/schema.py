"""The page's index of the log: narrow tables for queries by user, arm, version, outcome and word.

It holds nothing that the log does not, may be deleted at any time, and is then filled again. Answers are in it only as words without
their order, and only if the log itself is not encrypted, because a forgotten person's words must not remain anywhere.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ostinato.record.sqlite import connect, create, driver, remove

FORMAT = 4
_STATEMENTS = (
    "CREATE TABLE state (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE turns (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, user TEXT NOT NULL, arm TEXT NOT NULL, "
    "version INTEGER, at REAL NOT NULL, outcome TEXT NOT NULL, rank INTEGER NOT NULL, value REAL, step INTEGER, dealt INTEGER NOT NULL)",
    *(
        f"CREATE INDEX turns_by_{'_'.join(columns)} ON turns ({', '.join(columns)}, seq)"
        for columns in (("tenant",), ("user",), ("arm",), ("version",), ("outcome",), ("step",))
    ),
    "CREATE TABLE loose (turn TEXT PRIMARY KEY, outcome TEXT NOT NULL, rank INTEGER NOT NULL, value REAL, step INTEGER) WITHOUT ROWID",
    "CREATE TABLE signals (turn TEXT, tenant TEXT, id TEXT, name TEXT, seq INTEGER, PRIMARY KEY (turn, tenant, id)) WITHOUT ROWID",
    "CREATE INDEX signals_by_seq ON signals (seq)",
    "CREATE TABLE outcomes (name TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE VIRTUAL TABLE words USING fts5 (text, content='', contentless_delete=1, detail=none)",
    "CREATE TABLE events (seq INTEGER PRIMARY KEY, id TEXT, action TEXT, number INTEGER, hash TEXT, previous_number INTEGER, "
    "previous_hash TEXT, reason TEXT, at REAL)",
    "CREATE INDEX events_by_hash ON events (hash, seq)",
    "CREATE INDEX events_by_previous ON events (previous_hash, seq)",
    "CREATE INDEX events_by_action ON events (action, number)",
    "CREATE TABLE versions (hash TEXT PRIMARY KEY, seq INTEGER NOT NULL, number INTEGER, state TEXT, verdict TEXT, difference REAL, "
    "lower REAL, upper REAL, margin REAL, looks INTEGER, reason TEXT, at REAL) WITHOUT ROWID",
    "CREATE INDEX versions_by_seq ON versions (seq)",
    "CREATE TABLE chain (place INTEGER PRIMARY KEY AUTOINCREMENT, hash TEXT UNIQUE, number INTEGER)",
    "CREATE TABLE actions (action TEXT PRIMARY KEY, count INTEGER) WITHOUT ROWID",
    "CREATE TABLE alarms (seq INTEGER PRIMARY KEY, name TEXT, reason TEXT, at REAL, standing INTEGER)",
    "CREATE TABLE standing (name TEXT PRIMARY KEY, reason TEXT, at REAL) WITHOUT ROWID",
    f"PRAGMA user_version={FORMAT}",
)


def open_index(path: Path) -> Any:
    """A connection that writes. A file that is damaged, or of another version, is rebuilt. Raises OSError, the driver's error."""
    for _ in range(2):
        if not path.exists():
            create(path, _build)
        connection = connect(path, write=True)
        # the index can be rebuilt, so speed matters more than safety from a power cut
        connection.execute("PRAGMA synchronous=OFF")
        # what is deleted leaves no trace in the file
        connection.execute("PRAGMA secure_delete=ON")
        if _is_sound(connection):
            return connection
        connection.close()
        remove(path)
    raise driver.OperationalError(f"{path} cannot be made")


def _build(connection: Any) -> None:
    for statement in _STATEMENTS:
        connection.execute(statement)


def _is_sound(connection: Any) -> bool:
    with contextlib.suppress(driver.DatabaseError):
        return connection.execute("PRAGMA user_version").fetchone() == (FORMAT,)
    return False
