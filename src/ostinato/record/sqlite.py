"""SQLite for the log: no version with the WAL corruption bug, full durability, and errors translated into OstinatoError."""

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

driver: Any = pysqlite3.dbapi2  # its type stubs lack the version and error codes

FAULTY = ((3, 7, 0), (3, 51, 2))
"""Inclusive range of SQLite versions whose WAL reset can corrupt the database (fixed in 3.51.3; sqlite.org/changes.html)."""

BUSY_MS = 100
"""How long one attempt waits for another process's lock, in milliseconds. Callers that want to wait longer retry."""


_CODE_BY_MESSAGE: dict[str, int] = {
    "database or disk is full": driver.SQLITE_FULL,
    "disk I/O error": driver.SQLITE_IOERR,
    "malformed": driver.SQLITE_CORRUPT,
    "not a database": driver.SQLITE_NOTADB,
}


def refuse_faulty(version: str) -> None:
    """Raise BadConfig if this SQLite version can corrupt a write-ahead log (`FAULTY`).

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
    """Open an existing database in autocommit mode. The connection may move between threads, but only one may use it at a time.

    Raises BadConfig for a faulty SQLite, the driver's OperationalError if there is no such file.
    """
    refuse_faulty(driver.sqlite_version)
    connection = driver.connect(
        f"file:{quote(str(path))}?mode=rw", uri=True, isolation_level=None, check_same_thread=False, timeout=0
    )
    try:
        connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        connection.execute("PRAGMA synchronous=FULL")
        # otherwise the deletes of INSERT OR REPLACE fire no triggers
        connection.execute("PRAGMA recursive_triggers=ON")
        connection.execute(f"PRAGMA query_only={'OFF' if write else 'ON'}")
    except driver.Error:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: Any, begin: str = "IMMEDIATE") -> Generator[None]:
    """Run the block in a transaction: commit at its end, roll back on an error. Raises the driver's errors."""
    connection.execute(f"BEGIN {begin}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # on a full disk SQLite has already rolled back; a second ROLLBACK would raise and hide the error
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def load(path: Path) -> Any:
    """Return a connection to an in-memory copy of a database that no process uses; writes no file. Raises the driver's errors."""
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
    """Copy a database into another, `pages` at a time, or all at once if negative. `report` is the driver's `progress` callback.

    Raises the driver's error with its error code, which the driver omits here, so that `translate` and `is_busy` recognise it.
    """
    try:
        source.backup(copy, pages=pages, progress=report)
    except driver.OperationalError as error:
        error.sqlite_errorcode = next(
            (code for words, code in _CODE_BY_MESSAGE.items() if words in str(error)), _code(error)
        )
        raise


def create(path: Path, build: Callable[[Any], None], *, journal: str = "wal") -> None:
    """Create a database with mode 0600, unless it exists. `build` fills it in a transaction.

    Atomic: the file appears complete or not at all. Several processes may call this at once; the first one's database is used.

    Raises BadConfig if the file system does not support this journal mode, OSError or the driver's error; then nothing was created.
    """
    if not path.exists():
        _create(path, build, journal)
    sync_directory(path.parent)  # also if it existed: its creator may have died before syncing


def _create(path: Path, build: Callable[[Any], None], journal: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        # SQLite's side files get the mode of the database
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with closing(connect(partial, write=True)) as connection:
            with transaction(connection):
                build(connection)
            # only after the commit: closing checkpoints the WAL into the file, and hides that the disk is full
            (mode,) = connection.execute(f"PRAGMA journal_mode={journal}").fetchone()
            if mode != journal:
                raise BadConfig(f"the file system of {path} cannot hold a write-ahead log; put the run on a local disk")
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Remove a database and SQLite's side files. The database goes first, so that a kill in between leaves no database."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def is_busy(error: Exception) -> bool:
    """Return True if another connection holds the lock."""
    return _code(error) in (driver.SQLITE_BUSY, driver.SQLITE_LOCKED)


def translate(error: Exception, path: Path) -> OstinatoError:
    """Translate a database error into StorageFull, Corrupt, TooLarge or Unavailable; the message names the file and the remedy."""
    code = _code(error)
    if code in (driver.SQLITE_FULL, driver.SQLITE_IOERR):
        return StorageFull(f"nothing was written to {path}: {error}; free space or repair the disk, then try again")
    if code in (driver.SQLITE_CORRUPT, driver.SQLITE_NOTADB):
        return Corrupt(f"{path} is damaged or not a log: {error}; restore it from a copy")
    if code == driver.SQLITE_TOOBIG:
        return TooLarge(f"a row is larger than {path} can hold: {error}; send less at once")
    return Unavailable(f"the log at {path} could not be used: {error}; see which process holds it and try again")


@contextmanager
def translated(path: Path) -> Generator[None]:
    """Raise the block's database errors as `translate` returns them."""
    try:
        yield
    except driver.Error as error:
        raise translate(error, path) from error


def _code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
