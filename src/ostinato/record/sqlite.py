"""SQLite for the log: a version without the WAL corruption bug, full durability, and errors translated into the project's own."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pysqlite3.dbapi2

from ostinato.core.errors import BadConfig, Corrupt, OstinatoError, StorageFull, TooLarge, Unavailable
from ostinato.core.files import sync_directory

driver: Any = pysqlite3.dbapi2  # its stubs do not know SQLite's version and codes

FAULTY = ((3, 7, 0), (3, 51, 2))
"""Inclusive range of SQLite versions whose WAL can be corrupted when it is reset (fixed in 3.51.3; sqlite.org/changes.html)."""

BUSY_MS = 100
"""How long one attempt waits for another process's lock. Callers that want to wait longer retry."""


_WORDS: dict[str, int] = {
    "database or disk is full": driver.SQLITE_FULL,
    "disk I/O error": driver.SQLITE_IOERR,
    "malformed": driver.SQLITE_CORRUPT,
    "not a database": driver.SQLITE_NOTADB,
}


def refuse_faulty(version: str) -> None:
    """Raise BadConfig if this SQLite version can corrupt a write-ahead log.

    Example: ``refuse_faulty("3.53.4")`` returns; ``refuse_faulty("3.40.1")`` raises.
    """
    parts = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    found = tuple(int(part) for part in parts.groups()) if parts else (0, 0, 0)
    if found < FAULTY[0] or found <= FAULTY[1]:
        raise BadConfig(
            f"SQLite {version} can corrupt a write-ahead log (every version before 3.51.3); "
            "install the wheel that bundles a newer one: pip install --upgrade 'pysqlite3>=0.6.1'"
        )


def connect(path: Path, *, write: bool) -> Any:
    """A connection to an existing database, in autocommit mode; it may move between threads, used by one at a time.

    Raises BadConfig for a faulty SQLite, the driver's OperationalError if there is no such file.
    """
    refuse_faulty(driver.sqlite_version)
    connection = driver.connect(
        f"file:{quote(str(path))}?mode=rw", uri=True, isolation_level=None, check_same_thread=False, timeout=0
    )
    try:
        connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        connection.execute("PRAGMA synchronous=FULL")
        # without it the deletes of INSERT OR REPLACE fire no triggers
        connection.execute("PRAGMA recursive_triggers=ON")
        connection.execute(f"PRAGMA query_only={'OFF' if write else 'ON'}")
    except driver.Error:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: Any, begin: str = "IMMEDIATE") -> Generator[None]:
    """A transaction: committed at the end of the block, rolled back on an error. Raises the driver's error."""
    connection.execute(f"BEGIN {begin}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # on a full disk SQLite has rolled back already, and would say so instead of the error
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def load(path: Path) -> Any:
    """A connection to a copy in memory of a database that nobody uses. Beside the file nothing is written. Raises the driver's error."""
    refuse_faulty(driver.sqlite_version)
    copy = driver.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        with closing(driver.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)) as source:
            copy_pages(source, copy, -1)
    except driver.Error:
        copy.close()
        raise
    return copy


def copy_pages(source: Any, copy: Any, pages: int, report: Callable[[int, int, int], object] | None = None) -> None:
    """Copy a database into another, `pages` at a time, or at once if negative. `report` is the driver's `progress`.

    Raises the driver's error with the code that the driver leaves out there, so that `translate` and `is_busy` can tell it.
    """
    try:
        source.backup(copy, pages=pages, progress=report)
    except driver.OperationalError as error:
        error.sqlite_errorcode = next((code for words, code in _WORDS.items() if words in str(error)), _code(error))
        raise


def create(path: Path, build: Callable[[Any], None], *, journal: str = "wal") -> None:
    """Create a database that only its owner can read, unless it exists. `build` fills it in a transaction.

    It appears complete or not at all. Any number of processes may do this at once; the first one's database is used.

    Raises BadConfig if the file system does not support this journal, OSError or the driver's error; then nothing was created.
    """
    if not path.exists():
        _create(path, build, journal)
    sync_directory(path.parent)  # also if it existed: the process that created it may have died before its own sync


def _create(path: Path, build: Callable[[Any], None], journal: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        # files that SQLite creates beside it get the same mode
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with closing(connect(partial, write=True)) as connection:
            with transaction(connection):
                build(connection)
            # only now: what closing moves from a write-ahead log into the file may not fit on the disk, and closing does not say so
            (mode,) = connection.execute(f"PRAGMA journal_mode={journal}").fetchone()
            if mode != journal:
                raise BadConfig(f"the file system of {path} cannot hold a write-ahead log; put the run on a local disk")
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Remove a database and SQLite's files beside it, the database first, so that a kill in between leaves no database."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def is_busy(error: Exception) -> bool:
    """True if another connection holds the lock."""
    return _code(error) in (driver.SQLITE_BUSY, driver.SQLITE_LOCKED)


def translate(error: Exception, path: Path) -> OstinatoError:
    """Translate a database error into StorageFull, Corrupt, TooLarge or Unavailable, with a message that names file and remedy."""
    code = _code(error)
    if code in (driver.SQLITE_FULL, driver.SQLITE_IOERR):
        return StorageFull(f"nothing was written to {path}: {error}; free space or repair the disk, then try again")
    if code in (driver.SQLITE_CORRUPT, driver.SQLITE_NOTADB):
        return Corrupt(f"{path} is damaged or no log: {error}; restore it from a copy")
    if code == driver.SQLITE_TOOBIG:
        return TooLarge(f"a row is larger than {path} can hold: {error}; send less at once")
    return Unavailable(f"the log at {path} could not be used: {error}; see which process holds it and try again")


@contextmanager
def translated(path: Path) -> Generator[None]:
    """Raises a database's error inside the block as `translate` gives it."""
    try:
        yield
    except driver.Error as error:
        raise translate(error, path) from error


def _code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
