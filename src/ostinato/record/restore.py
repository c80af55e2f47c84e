"""Installs a backup of a log: checked file by file, then put in place by renaming, with every key that was forgotten since destroyed.

The keys are brought up to date in memory, so that one that was forgotten is never written to the run's disk again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ostinato.core.errors import BadConfig, Conflict, Corrupt, OstinatoError, StorageFull, Unavailable
from ostinato.core.files import sync_directory
from ostinato.record.backup import KEYS, BackedUpFile, BackupManifest, OnBytes, open_plain, read_manifest
from ostinato.record.keys import MasterKey, rewrap
from ostinato.record.segment import open_segment
from ostinato.record.segment_directory import LogDirectory
from ostinato.record.sqlite import connect, driver, is_busy, load, translate, translated

# ---------------------------------------------------------------- what killed restorations leave


def restoring(log: Path) -> Path:
    """Where the log that will lie in the directory `log` is assembled."""
    return log.with_name(f".{log.name}.restoring")


def replaced(log: Path) -> Path:
    """Where the empty log goes that the restored one replaces."""
    return log.with_name(f".{log.name}.replaced")


def remove_tree(path: Path) -> None:
    """Remove a directory, if it is there. Raises OSError."""
    if path.exists():
        shutil.rmtree(path)


def sweep_restorations(log: Path, before: float) -> list[str]:
    """Remove what killed restorations of a log left, if it was last written before the time `before`.

    Returns the names of the removed directories. Raises OSError.
    """
    gone: list[str] = []
    for path in (restoring(log), replaced(log)):
        if path.is_dir() and max(each.stat().st_mtime for each in (path, *path.iterdir())) < before:
            remove_tree(path)
            gone.append(path.name)
    return gone


OLD_MASTER = "--old-master"
_CHUNK = 4 << 20
_WAIT_S = 5.0  # for a process that changes the run's keys


def restore(
    source: Path,
    log: LogDirectory,
    keys: Path,
    others: Sequence[Path],
    master: Path | None,
    on_bytes: OnBytes,
    before_install: Callable[[], object] = lambda: None,
    *,
    old_master: Path | None = None,
) -> tuple[BackupManifest, int]:
    """Install the backup in `source` as the log in `log` and its file of keys `keys`; returns its manifest and how many keys it destroyed.

    A key that was destroyed in the present file `keys`, or in one of the files `others`, is destroyed in the restored one, so that what was
    forgotten after the backup stays forgotten. Keys that the present file has beyond the backup's are kept, so that a log that was moved
    away can still be read. Killed at any instant, it leaves no log or the whole of it; call it again to complete it. No process may append
    to the log; one that would forget somebody waits, then fails. `master` is the file of the master key that wraps the keys, which is
    checked. `old_master` is the file of the master key that wrapped the backup's keys before `rekey`; they are wrapped with `master` again.
    `before_install` is called once the backup is known to be whole, before anything of the run is changed.

    Raises:
        NotFound: `source` holds no complete backup.
        Conflict: a log with rows is there.
        Corrupt: a file of the backup is missing, damaged, or not what the manifest says.
        BadConfig: the backup or a segment has a newer format; the master key is the wrong one; or a file of keys is of another log.
        Unavailable: another process uses the file of keys.
        StorageFull: nothing was installed.
    """
    manifest = read_manifest(source)
    refuse_rows(log)
    fresh = LogDirectory(restoring(log.path))
    try:
        remove_tree(fresh.path)
        fresh.path.mkdir(mode=0o700, parents=True)
        _copy_files(source, manifest, fresh.path, on_bytes)
        _check_segments(source, manifest, fresh)
        has_keys = any(file.name == KEYS for file in manifest.files)
        with _held(keys if has_keys else None):
            destroyed = 0
            if has_keys:
                destroyed = _restore_keys(source / KEYS, fresh.path / KEYS, keys, others, master, old_master)
            refuse_rows(log)  # again, because copying takes long
            before_install()
            _install(fresh.path, log, keys)
    except OSError as error:
        if isinstance(error, OstinatoError):
            raise
        raise StorageFull(f"the backup was not restored to {log.path}: {error}; free space, then try again") from error
    finally:
        with suppress(OSError):
            remove_tree(fresh.path)
    return manifest, destroyed


# ---------------------------------------------------------------- restoring


def refuse_rows(log: LogDirectory) -> None:
    """Raise Conflict if there is a log with rows, or one that cannot be read; BadConfig for a link in its place."""
    if log.path.is_symlink():
        raise BadConfig(f"{log.path} is a link, which a restored log would replace; remove it, then restore")
    if not log.path.is_dir():
        return
    try:
        paths = [log.segment(first) for first in log.listing().firsts]
        empty = not log.kept.exists() and all(_is_empty(path) for path in paths)
    except (OstinatoError, driver.Error):
        empty = False
    if not empty:
        raise Conflict(
            f"there is a log in {log.path} already; move it away (mv {log.path} {log.path}.old), but leave its file of keys where it is, "
            "so that what was forgotten stays forgotten; then restore"
        )


def _is_empty(path: Path) -> bool:
    with open_segment(path) as segment:
        return segment.newest() < segment.first and segment.seal() is None


# ---------------------------------------------------------------- the files


def _copy_files(source: Path, manifest: BackupManifest, target: Path, on_bytes: OnBytes) -> None:
    """Copy every file but the keys, which are only checked. Raises Corrupt, OSError."""
    done, total = 0, sum(file.size for file in manifest.files)
    for file in manifest.files:
        try:
            if file.name == KEYS:
                _read_file(source / file.name, file, lambda _: None)
            else:
                _copy_file(source / file.name, file, target / file.name)
        except FileNotFoundError as error:
            raise Corrupt(f"{source / file.name}, which the manifest names, is missing; name another backup") from error
        done += file.size
        on_bytes(done, total)


def _copy_file(path: Path, expected: BackedUpFile, target: Path) -> None:
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
        _read_file(path, expected, copy.write)
        copy.flush()
        os.fsync(copy.fileno())


def _read_file(path: Path, expected: BackedUpFile, write: Callable[[bytes], object]) -> None:
    """Read a file; what is written, and not what is read later, has the promised size and hash. Raises Corrupt, OSError."""
    digest, size = hashlib.sha256(), 0
    with open_plain(path) as file:
        while size <= expected.size and (data := file.read(_CHUNK)):
            digest.update(data)
            size += len(data)
            write(data)
    if (size, digest.hexdigest()) != (expected.size, expected.sha256):
        raise Corrupt(
            f"{path} was changed since the backup was made: it is not what the manifest says; name another backup"
        )


def _check_segments(source: Path, manifest: BackupManifest, fresh: LogDirectory) -> None:
    """Raise Corrupt unless the segments follow one another from the manifest's first row to its last; BadConfig for a newer format."""
    firsts = fresh.listing().firsts
    ends: list[tuple[int, int]] = []
    for first in firsts:
        with open_segment(fresh.segment(first)) as segment:
            ends.append((segment.first, segment.newest()))
    if fresh.kept.exists():
        with open_segment(fresh.kept):
            pass
    whole = [first for first, _ in ends] == list(firsts) and all(
        earlier[1] + 1 == later[0] for earlier, later in pairwise(ends)
    )
    if not whole or not ends or (ends[0][0], ends[-1][1]) != (manifest.first, manifest.last):
        raise Corrupt(f"the segments in {source} are not the rows that its manifest says; name another backup")


# ---------------------------------------------------------------- the keys


@dataclass(frozen=True, slots=True)
class _Key:
    """A row of a file of keys. `secret`: as stored; None once it is destroyed."""

    id: int
    tenant: str
    scope: str
    secret: bytes | None
    forgotten_at: float | None


@contextmanager
def _held(keys: Path | None) -> Generator[None]:
    """Keep every process from changing a file of keys inside the block, if there is one. Raises Unavailable, Corrupt.

    A process that waited meanwhile fails if the file was replaced: SQLite refuses to change one that has lost its name.
    """
    if keys is None or not keys.exists():
        yield
        return
    with translated(keys):
        db = connect(keys, write=True)
    with closing(db):
        _begin(db, keys)
        yield


def _begin(db: Any, keys: Path) -> None:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            db.execute("BEGIN IMMEDIATE")
            return
        except driver.Error as error:
            if not is_busy(error):
                raise translate(error, keys) from error
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"another process uses {keys}; wait until it has ended or stop it, then try again"
                ) from error


def _restore_keys(
    backup: Path, target: Path, keys: Path, others: Sequence[Path], master: Path | None, old_master: Path | None
) -> int:
    """Write the backup's keys to `target`, brought up to date with the run's and the other files; returns how many it destroyed."""
    with translated(backup):
        loaded = load(backup)
    with closing(loaded) as db, translated(target):
        secrets = _opened_backup(db, backup, master, old_master)
        count = _take_over(db, keys, secrets, MasterKey(keys, master)) if keys.exists() else 0
        count += sum(_destroy(db, _read(db, other)) for other in others if other.exists())
        present = MasterKey(target, master)
        if not present.none:  # keys that were created before there was a master key
            rewrap(db, present, present)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        db.execute("VACUUM INTO ?", (str(target),))
    return count


def _stored(db: Any) -> list[_Key]:
    return [_Key(*row) for row in db.execute("SELECT id, tenant, scope, secret, forgotten_at FROM keys")]


def _read(db: Any, other: Path) -> list[_Key]:
    """The keys in another file of the same log. Raises BadConfig for another log's, Corrupt, Unavailable."""
    with translated(other), closing(connect(other, write=False)) as found:
        keys = _stored(found)
    known = dict(db.execute("SELECT id, scope FROM keys"))
    if any(known.get(key.id, key.scope) != key.scope for key in keys):
        raise _foreign(other)
    return keys


def _foreign(other: Path) -> BadConfig:
    return BadConfig(
        f"{other} is the file of keys of another log; move it away, or name the one that belongs to the backup"
    )


def _opened(keys: Sequence[_Key], master: MasterKey) -> dict[int, bytes]:
    """The keys that are not destroyed, by their numbers. Raises BadConfig unless the master key opens all of them."""
    return {key.id: master.unwrap(key.secret, key.scope) for key in keys if key.secret is not None}


def _opened_backup(db: Any, backup: Path, master: Path | None, old_master: Path | None) -> dict[int, bytes]:
    """The backup's keys; those that only the old master key opens are wrapped with the present one again. Raises BadConfig."""
    keys, present = _stored(db), MasterKey(backup, master)
    try:
        return _opened(keys, present)
    except BadConfig as error:
        if present.none:
            raise
        if old_master is None:
            raise BadConfig(
                f"{error}; if `ostinato log rekey` changed the master key since the backup, name the old one's file with {OLD_MASTER}"
            ) from error
    secrets = _opened(keys, MasterKey(backup, old_master, OLD_MASTER))
    wrapped = [(present.wrap(secrets[key.id], key.scope), key.id) for key in keys if key.secret is not None]
    db.executemany("UPDATE keys SET secret = ? WHERE id = ?", wrapped)
    return secrets


def _take_over(db: Any, keys: Path, secrets: dict[int, bytes], master: MasterKey) -> int:
    """Destroy what is destroyed in the run's present file, and keep the keys that only it has; returns how many it destroyed.

    `secrets`: the backup's keys by their numbers.
    """
    present = _read(db, keys)
    try:
        found = _opened(present, master)
    except BadConfig as error:
        raise BadConfig(
            f"record.master_key opens the keys of the backup, but not those in {keys}, which would be lost: if `ostinato log rekey` made "
            f"them so, set record.master_key to its new file and name the old one's with {OLD_MASTER}; or move {keys} away, keep it, and "
            "name it with --keys, so that what was forgotten stays forgotten"
        ) from error
    if any(secrets.get(number, secret) != secret for number, secret in found.items()):
        raise _foreign(keys)
    count = _destroy(db, present)
    known = {number for (number,) in db.execute("SELECT id FROM keys")}
    only_here = [(key.id, key.tenant, key.scope, key.secret) for key in present if key.id not in known]
    try:
        db.executemany("INSERT INTO keys (id, tenant, scope, secret) VALUES (?, ?, ?, ?)", only_here)
    except driver.IntegrityError as error:  # the owner has another key in the backup
        raise _foreign(keys) from error
    return count


def _destroy(db: Any, keys: Sequence[_Key]) -> int:
    """Destroy the keys that are destroyed in another file; returns how many. Numbers of keys are never used again."""
    forgotten = [(key.id, key.tenant, key.scope, key.forgotten_at) for key in keys if key.secret is None]
    numbers = json.dumps([key[0] for key in forgotten])
    count = db.execute(
        "UPDATE keys SET secret = NULL WHERE secret IS NOT NULL AND id IN (SELECT value FROM json_each(?))", (numbers,)
    ).rowcount
    db.executemany(
        "INSERT INTO keys (id, tenant, scope, secret, forgotten_at) VALUES (?, ?, ?, NULL, ?) "
        "ON CONFLICT (id) DO UPDATE SET forgotten_at = excluded.forgotten_at",
        forgotten,
    )
    if keys:  # so that a key made from now on cannot be taken for one of these
        newest = (max(key.id for key in keys),)
        if not db.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'keys'", newest).rowcount:
            db.execute("INSERT INTO sqlite_sequence VALUES ('keys', ?)", newest)
    return count


# ---------------------------------------------------------------- installing


def _install(fresh: Path, log: LogDirectory, keys: Path) -> None:
    """Put the keys in place, then the log, whose appearance completes it. An empty log in its place is removed."""
    restored = fresh / KEYS
    if restored.exists():
        with restored.open("rb") as file:
            os.fsync(file.fileno())
        for suffix in ("-journal", "-wal", "-shm"):  # they would be applied to the new file
            keys.with_name(keys.name + suffix).unlink(missing_ok=True)
        restored.replace(keys)
        sync_directory(keys.parent)
    aside = replaced(log.path)
    remove_tree(aside)
    sync_directory(fresh)
    refuse_rows(log)
    with suppress(FileNotFoundError):
        log.path.rename(aside)
    fresh.rename(log.path)
    sync_directory(log.path.parent)
    remove_tree(aside)
