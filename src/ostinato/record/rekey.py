"""Wraps the keys of a log anew, with another master key: rotation of the master key. The rows of the log stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ostinato.core.errors import NotFound, Unavailable
from ostinato.record.keys import MasterKey
from ostinato.record.sqlite import connect, driver, is_busy, translate

NEW_MASTER = "--new-master"


def rekey(keys: Path, old: Path | None, new: Path) -> int:
    """Wrap every key in the file `keys` with the master key in the file `new`; returns how many keys there are.

    `old` is the file of the present master key, None if the keys are not wrapped. All keys change in one transaction, so that a process
    killed at any instant leaves all of them under one master key; then the file is rewritten, so that no trace of the old wrapping stays in
    it. Called again, it completes what a killed call began. No other process may use the file: it would go on with the old master key.

    Raises:
        NotFound: there is no such file.
        BadConfig: a master key cannot be read or is too short, or neither of the two opens the keys.
        Corrupt, StorageFull: the file is as it was, or already under the new master key; call it again.
        Unavailable: another process uses the file.
    """
    before, after = MasterKey(keys, old), MasterKey(keys, new, NEW_MASTER)
    if not keys.exists():
        raise NotFound(f"there are no keys in {keys}: nothing of this log is encrypted (record.encrypt)")
    try:
        db = connect(keys, write=True)
        try:
            db.execute("PRAGMA synchronous=EXTRA")
            db.execute("PRAGMA secure_delete=ON")
            db.execute("BEGIN EXCLUSIVE")
            count = _rewrap(db, before, after)
            db.execute("COMMIT")
            db.execute("VACUUM")
            return count
        finally:
            db.close()
    except driver.Error as error:
        if is_busy(error):
            raise Unavailable(f"another process uses {keys}; stop the run's workers, then try again") from error
        raise translate(error, keys) from error


def _rewrap(db: Any, before: MasterKey, after: MasterKey) -> int:
    stored = db.execute("SELECT id, scope, secret FROM keys WHERE secret IS NOT NULL").fetchall()
    changed = [
        (after.wrap(before.unwrap(secret, scope), scope), number)
        for number, scope, secret in stored
        if not after.wraps(secret, scope)
    ]
    db.executemany("UPDATE keys SET secret = ? WHERE id = ?", changed)
    return len(stored)
