"""SQLite as the log needs it: a library without the WAL corruption fault, full durability, and errors in this project's words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2
from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError

from ostinato.core.errors import BadConfig, Corrupt, OstinatoError, StorageFull, Unavailable

driver: Any = pysqlite3.dbapi2  # its stubs do not know SQLite's version and codes

FAULTY = ((3, 7, 0), (3, 51, 2))
"""Inclusive range of SQLite versions whose WAL can be corrupted when it is reset (fixed in 3.51.3; sqlite.org/changes.html)."""

BUSY_MS = 30_000


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


def connect(path: Path, *, write: bool) -> Engine:
    """An engine whose transactions are `BEGIN IMMEDIATE` (write) or read-only snapshots. Raises BadConfig for a faulty SQLite."""
    refuse_faulty(driver.sqlite_version)
    engine = create_engine(URL.create("sqlite", database=str(path)), module=driver)

    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not open transactions of its own
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        mode = cursor.execute("PRAGMA journal_mode=WAL").fetchone()[0] if write else "wal"
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA recursive_triggers=ON")  # without it INSERT OR REPLACE deletes unseen by the triggers
        cursor.execute(f"PRAGMA query_only={'OFF' if write else 'ON'}")
        cursor.close()
        if mode != "wal":
            raise BadConfig(f"the file system of {path} cannot hold a write-ahead log; put the store on a local disk")

    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    event.listen(engine, "connect", prepare)
    event.listen(engine, "begin", begin)
    return engine


def translate(error: DatabaseError, path: Path) -> OstinatoError:
    """The project's error for a database's: StorageFull, Corrupt or Unavailable, naming the file and the remedy."""
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
    if code in (driver.SQLITE_FULL, driver.SQLITE_IOERR):
        return StorageFull(
            f"nothing was written to {path}: {error.orig}; free space or repair the disk, then try again"
        )
    if code in (driver.SQLITE_CORRUPT, driver.SQLITE_NOTADB):
        return Corrupt(f"{path} is damaged or no log: {error.orig}; restore it from a copy")
    return Unavailable(f"the log at {path} could not be used: {error.orig}; see which process holds it and try again")
