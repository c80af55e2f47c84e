"""The watcher's state, in ``.git/ostinato/state.db``: the watcher can be killed at any instant, and resumes where it was.

One look is one transaction: the edits taken from the spool and its read position, the files as they were seen, the measurements and
their signals are stored together or not at all.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato_client.events import Event
from ostinato_client.watch.survival import Followed, Version

LINES_OF_A_CALL = 1 << 20
"""A line's number is its call's number times this, plus its index among the call's lines."""
_SCHEMA = 1
_MOST_NAMES = 5
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY, path BLOB NOT NULL UNIQUE, text BLOB NOT NULL, signature TEXT,
    head TEXT, homes TEXT NOT NULL, former TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS calls (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, agent TEXT NOT NULL, at REAL NOT NULL,
    written INTEGER NOT NULL DEFAULT 0, finished INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS touched (call INTEGER NOT NULL, file INTEGER NOT NULL, PRIMARY KEY (file, call)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS texts (
    call INTEGER NOT NULL, first INTEGER NOT NULL, argument TEXT NOT NULL, lines INTEGER NOT NULL, places TEXT NOT NULL,
    PRIMARY KEY (call, first)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS measured (
    call INTEGER NOT NULL, name TEXT NOT NULL, kept INTEGER, PRIMARY KEY (call, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS taken (edit BLOB PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outbox (id TEXT PRIMARY KEY, event TEXT NOT NULL, refused TEXT);
"""


class Held(Exception):
    """Another watcher has this working tree."""


@dataclass(frozen=True)
class Call:
    """A tool call that wrote lines. `measured`: lines kept, by the measurement's name; None: it was too late to measure."""

    number: int
    id: str
    agent: str
    at: float
    written: int
    measured: dict[str, int | None]

    def owns(self, line: int) -> bool:
        """True if the line of this number is the call's."""
        return line // LINES_OF_A_CALL == self.number


@dataclass(frozen=True)
class Text:
    """An argument of a call that holds lines that it wrote. `first`: the index of the first of these among the call's lines; `places`: of
    each its line in the argument, from 1; `lines`: how many the argument has.
    """

    first: int
    argument: str
    lines: int
    places: tuple[int, ...]


@dataclass
class File:
    """A followed file.

    Attributes:
        signature: of the content read last; None: read it again.
        head: the commit at which the file last existed.
        former: its earlier names, the newest first.
        homes: by branch, the file's name there, and the numbers of the lines that last stood there.
    """

    number: int
    path: str
    followed: Followed
    signature: str | None = None
    head: str | None = None
    homes: dict[str, tuple[str, frozenset[int]]] = field(default_factory=dict)
    former: tuple[str, ...] = ()

    def renamed(self, path: str) -> None:
        """Record the file's new name."""
        self.former = (self.path, *(name for name in self.former if name != self.path))[:_MOST_NAMES]
        self.path = path

    def stands_on(self, branch: str) -> None:
        """Record that the lines kept now stand on this branch, wherever they stood before."""
        kept = self.followed.kept
        left = {name: (path, numbers - kept) for name, (path, numbers) in self.homes.items()}
        self.homes = {name: home for name, home in left.items() if home[1] and name != branch}
        self.homes[branch] = (self.path, kept)


class State:
    """The database. Raises Held if another process has it open.

    Example: ``with State(directory) as state, state.look(): state.file("calc.py")``
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = sqlite3.connect(directory / "lock.db", timeout=0, isolation_level=None)
        try:
            self._lock.execute("BEGIN EXCLUSIVE")  # the system releases the lock when the process ends, however it ends
        except sqlite3.OperationalError as error:
            self._lock.close()
            if "locked" not in str(error):
                raise
            raise Held(f"{directory} is held by another watcher; one is enough") from error
        self._db = sqlite3.connect(directory / "state.db", isolation_level=None)
        self._files: dict[int, File] = {}
        try:
            self._db.executescript(_TABLES)
            schema = self.meta("schema", None)
        except sqlite3.DatabaseError as error:
            self.__exit__()
            raise sqlite3.DatabaseError(f"{directory / 'state.db'}: {error}; set it aside") from error
        if schema not in (None, _SCHEMA):
            self.__exit__()
            raise sqlite3.DatabaseError(f"{directory / 'state.db'} is of another version ({schema}); set it aside")
        self.set_meta("schema", _SCHEMA)
        os.chmod(directory / "state.db", 0o600)

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()
        self._lock.close()

    @contextmanager
    def look(self) -> Generator[None, None, None]:
        """A transaction: everything in the block is stored, or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._files.clear()
            if self._db.in_transaction:  # a full disk may have ended it
                self._db.execute("ROLLBACK")
            raise

    def meta(self, name: str, default: Any = None) -> Any:
        """The value stored under a name."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return default if row is None else json.loads(row[0])

    def set_meta(self, name: str, value: Any) -> None:
        """Store a JSON value under a name."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, json.dumps(value)))

    # ------------------------------------------------------------ files

    def files(self) -> list[File]:
        """All followed files."""
        numbers = [row[0] for row in self._db.execute("SELECT number FROM files ORDER BY number")]
        for number in numbers:
            if number not in self._files:
                query = "SELECT path, text, signature, head, homes, former FROM files WHERE number = ?"
                path, text, signature, head, homes, former = self._db.execute(query, (number,)).fetchone()
                found = {name: (path, frozenset(lines)) for name, (path, lines) in json.loads(homes).items()}
                names = tuple(json.loads(former))
                self._files[number] = File(number, os.fsdecode(path), _unpacked(text), signature, head, found, names)
        return [self._files[number] for number in numbers]

    def file(self, path: str) -> File | None:
        """The file of this path, if it is followed."""
        return next((file for file in self.files() if file.path == path), None)

    def keep(self, file: File) -> File:
        """Store a file as it is now; `number` 0 is a new one."""
        homes = json.dumps({name: (path, sorted(numbers)) for name, (path, numbers) in file.homes.items()})
        values = (
            os.fsencode(file.path),
            _packed(file.followed),
            file.signature,
            file.head,
            homes,
            json.dumps(file.former),
        )
        if file.number:
            self._db.execute(
                "UPDATE files SET path = ?, text = ?, signature = ?, head = ?, homes = ?, former = ? WHERE number = ?",
                (*values, file.number),
            )
        else:
            columns = "INSERT INTO files (path, text, signature, head, homes, former) VALUES (?, ?, ?, ?, ?, ?)"
            file.number = int(self._db.execute(columns, values).lastrowid or 0)
        self._files[file.number] = file
        return file

    def drop(self, file: File) -> None:
        """Stop following a file."""
        self._db.execute("DELETE FROM files WHERE number = ?", (file.number,))
        self._db.execute("DELETE FROM touched WHERE file = ?", (file.number,))
        self._files.pop(file.number, None)

    # ------------------------------------------------------------ calls

    def is_new(self, edit: bytes, at: float) -> bool:
        """True the first time that this edit's digest is seen. The spool of a copied repository is read again from its start."""
        return self._db.execute("INSERT OR IGNORE INTO taken VALUES (?, ?)", (edit, at)).rowcount == 1

    def call(self, id: str, agent: str, at: float) -> Call:
        """The call of this id, recorded if it is new."""
        self._db.execute("INSERT OR IGNORE INTO calls (id, agent, at) VALUES (?, ?, ?)", (id, agent, at))
        row = self._db.execute("SELECT number, id, agent, at, written FROM calls WHERE id = ?", (id,)).fetchone()
        return Call(*row, measured={})

    def wrote(self, call: Call, file: File, lines: int) -> None:
        """Record that a call wrote so many more lines in a file."""
        self._db.execute("UPDATE calls SET written = written + ? WHERE number = ?", (lines, call.number))
        self._db.execute("INSERT OR IGNORE INTO touched VALUES (?, ?)", (call.number, file.number))

    def keep_text(self, call: Call, text: Text) -> None:
        """Record which lines of an argument a call wrote."""
        row = (call.number, text.first, text.argument, text.lines, json.dumps(text.places))
        self._db.execute("INSERT OR IGNORE INTO texts VALUES (?, ?, ?, ?, ?)", row)

    def texts(self, call: Call) -> list[Text]:
        """The arguments that hold what a call wrote, as far as that is certain."""
        query = "SELECT first, argument, lines, places FROM texts WHERE call = ? ORDER BY first"
        rows = self._db.execute(query, (call.number,))
        return [Text(first, argument, lines, tuple(json.loads(places))) for first, argument, lines, places in rows]

    def open_calls(self) -> list[Call]:
        """Calls that wrote lines and are not fully measured."""
        found = self._db.execute("SELECT number, id, agent, at, written FROM calls WHERE finished = 0 AND written > 0")
        rows = found.fetchall()
        measured: dict[int, dict[str, int | None]] = {row[0]: {} for row in rows}
        for number, name, kept in self._db.execute("SELECT call, name, kept FROM measured"):
            if number in measured:
                measured[number][name] = kept
        return [Call(*row, measured=measured[row[0]]) for row in rows]

    def touched(self) -> dict[int, set[int]]:
        """For each call, by its number, the numbers of the files that it wrote in."""
        found: dict[int, set[int]] = {}
        for call, file in self._db.execute("SELECT call, file FROM touched"):
            found.setdefault(call, set()).add(file)
        return found

    def measure(self, call: Call, name: str, kept: int | None, event: Event | None) -> None:
        """Record a measurement of a call, and queue its event for sending."""
        self._db.execute("INSERT OR IGNORE INTO measured VALUES (?, ?, ?)", (call.number, name, kept))
        if event is not None:
            row = (event.id, json.dumps(event.to_json()))
            self._db.execute("INSERT OR IGNORE INTO outbox (id, event) VALUES (?, ?)", row)
        call.measured[name] = kept

    def finish(self, call: Call) -> None:
        """Measure a call no further. Its row stays for a while, so that a repeated edit does not begin the call again."""
        self._db.execute("UPDATE calls SET finished = 1 WHERE number = ?", (call.number,))
        self._db.execute("DELETE FROM touched WHERE call = ?", (call.number,))
        self._db.execute("DELETE FROM texts WHERE call = ?", (call.number,))

    def forget(self, before: float) -> None:
        """Drop calls that were finished long ago."""
        old = "(SELECT number FROM calls WHERE at < ? AND (finished = 1 OR written = 0))"
        self._db.execute(f"DELETE FROM measured WHERE call IN {old}", (before,))
        self._db.execute(f"DELETE FROM calls WHERE number IN {old}", (before,))
        self._db.execute("DELETE FROM taken WHERE at < ?", (before,))

    # ------------------------------------------------------------ signals

    def waiting(self, most: int) -> list[Event]:
        """Signals that were not sent yet, the oldest first."""
        rows = self._db.execute("SELECT event FROM outbox WHERE refused IS NULL ORDER BY rowid LIMIT ?", (most,))
        return [Event(**json.loads(row[0])) for row in rows]

    def sent(self, events: list[Event]) -> None:
        """Record that the gateway has these events."""
        with self.look():
            self._db.executemany("DELETE FROM outbox WHERE id = ?", [(event.id,) for event in events])
            self.set_meta("sent", self.meta("sent", 0) + len(events))

    def refused(self, event: Event, why: str) -> None:
        """Record that the gateway will never take this event; it stays, with the reason."""
        self._db.execute("UPDATE outbox SET refused = ? WHERE id = ?", (why[:1000], event.id))

    def counts(self) -> dict[str, int]:
        """The numbers of the status line."""
        one = {
            "calls": "SELECT count(*) FROM calls WHERE finished = 0 AND written > 0",
            "lines": "SELECT coalesce(sum(written), 0) FROM calls WHERE finished = 0",
            "files": "SELECT count(*) FROM files",
            "waiting": "SELECT count(*) FROM outbox WHERE refused IS NULL",
            "refused": "SELECT count(*) FROM outbox WHERE refused IS NOT NULL",
        }
        found = {name: int(self._db.execute(query).fetchone()[0]) for name, query in one.items()}
        return {**found, **{name: int(self.meta(name, 0)) for name in ("sent", "spoiled", "passed_over")}}


def _packed(followed: Followed) -> bytes:
    versions = [
        [list(version.lines), [list(each) for each in version.numbers]] for version in (followed.now, *followed.past)
    ]
    return zlib.compress(json.dumps(versions).encode(), 1)


def _unpacked(data: bytes) -> Followed:
    now, *past = (
        Version(tuple(lines), tuple(tuple(each) for each in numbers))
        for lines, numbers in json.loads(zlib.decompress(data))
    )
    return Followed(now, tuple(past))
