"""Installs a backup of a log: checks every file, destroys the keys that were destroyed since the backup, and renames it into place.

The keys are updated in memory, so that a key destroyed since the backup is never written to the run's disk again.
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

# ---------------------------------------------------------------- leftovers of killed restores


def restoring(log: Path) -> Path:
    """Return the directory in which the log that `log` will hold is assembled."""
    return log.with_name(f".{log.name}.restoring")


def replaced(log: Path) -> Path:
    """Return where the empty log is moved that the restored one replaces."""
    return log.with_name(f".{log.name}.replaced")


def remove_tree(path: Path) -> None:
    """Remove a directory if it exists. Raises OSError."""
    if path.exists():
        shutil.rmtree(path)


def sweep_restorations(log: Path, before: float) -> list[str]:
    """Remove what killed restores of a log left behind and last wrote before the time `before`.

    Return the names of the removed directories. Raises OSError.
    """
    gone: list[str] = []
    for path in (restoring(log), replaced(log)):
        if path.is_dir() and max(each.stat().st_mtime for each in (path, *path.iterdir())) < before:
            remove_tree(path)
            gone.append(path.name)
    return gone


OLD_MASTER = "--old-master"
_CHUNK_BYTES = 4 << 20
_WAIT_S = 5.0  # for a process that is changing the run's keys


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
    """Install the backup in `source` as the log `log` with the file of keys `keys`; return its manifest and how many keys were destroyed.

    A key that is destroyed in the present file `keys`, or in one of the files `others`, is destroyed in the restored one, so that what was
    forgotten after the backup stays forgotten. Keys that only the present file has are kept, so that a log that was moved away stays
    readable. Killed at any instant, it leaves either no log or the whole of it; call it again to complete it. No process may append to the
    log; a concurrent `forget` waits, then fails.

    `master` is the file of the master key that wraps the keys, which is checked. `old_master` is the file of the master key that wrapped
    the backup's keys before `rekey`; they are wrapped again with `master`. `before_install` is called once the whole backup is verified,
    before anything of the run is changed.

    Raises:
        NotFound: `source` holds no complete backup.
        Conflict: a log with rows exists.
        Corrupt: a file of the backup is missing, damaged, or not what the manifest says.
        BadConfig: the backup or a segment has a newer format, the master key is wrong, or a file of keys belongs to another log.
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
        with _locked_keys(keys if has_keys else None):
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


# ---------------------------------------------------------------- the log to be replaced


def refuse_rows(log: LogDirectory) -> None:
    """Raise Conflict if a log exists that has rows or cannot be read; BadConfig if the directory is a link."""
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


# ---------------------------------------------------------------- copying and verifying the files


def _copy_files(source: Path, manifest: BackupManifest, target: Path, on_bytes: OnBytes) -> None:
    """Copy every file except the keys, which are only verified. Raises Corrupt, OSError."""
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
    """Read a file once and pass its bytes to `write`, verifying the same bytes against size and hash. Raises Corrupt, OSError."""
    digest, size = hashlib.sha256(), 0
    with open_plain(path) as file:
        while size <= expected.size and (data := file.read(_CHUNK_BYTES)):
            digest.update(data)
            size += len(data)
            write(data)
    if (size, digest.hexdigest()) != (expected.size, expected.sha256):
        raise Corrupt(
            f"{path} was changed since the backup was made: it is not what the manifest says; name another backup"
        )


def _check_segments(source: Path, manifest: BackupManifest, fresh: LogDirectory) -> None:
    """Raise Corrupt unless the segments are contiguous from the manifest's first row to its last; BadConfig for a newer format."""
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


# ---------------------------------------------------------------- merging the keys


@dataclass(frozen=True, slots=True)
class _Key:
    """A row of a file of keys. `secret`: the key as stored; None once it is destroyed."""

    id: int
    tenant: str
    scope: str
    secret: bytes | None
    forgotten_at: float | None


@contextmanager
def _locked_keys(keys: Path | None) -> Generator[None]:
    """Lock a file of keys, if it exists, against changes while the block runs. Raises Unavailable, Corrupt.

    A process that waited for the lock fails if the file was replaced, because SQLite refuses to write to an unlinked database.
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
    """Write the backup's keys to `target`, merged with the run's and the other files; return how many were destroyed."""
    with translated(backup):
        loaded = load(backup)
    with closing(loaded) as db, translated(target):
        secrets = _unwrap_backup(db, backup, master, old_master)
        count = _merge_present(db, keys, secrets, MasterKey(keys, master)) if keys.exists() else 0
        count += sum(_destroy(db, _read(db, other)) for other in others if other.exists())
        present = MasterKey(target, master)
        if not present.none:  # wrap keys that were created before there was a master key
            rewrap(db, present, present)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        db.execute("VACUUM INTO ?", (str(target),))
    return count


def _stored(db: Any) -> list[_Key]:
    return [_Key(*row) for row in db.execute("SELECT id, tenant, scope, secret, forgotten_at FROM keys")]


def _read(db: Any, other: Path) -> list[_Key]:
    """Return the keys in another file of the same log. Raises BadConfig if it belongs to another log, Corrupt, Unavailable."""
    with translated(other), closing(connect(other, write=False)) as found:
        keys = _stored(found)
    known = dict(db.execute("SELECT id, scope FROM keys"))
    if any(known.get(key.id, key.scope) != key.scope for key in keys):
        raise _other_log(other)
    return keys


def _other_log(other: Path) -> BadConfig:
    return BadConfig(
        f"{other} is the file of keys of another log; move it away, or name the one that belongs to the backup"
    )


def _unwrap_all(keys: Sequence[_Key], master: MasterKey) -> dict[int, bytes]:
    """Return {number: key} of keys that are not destroyed. Raises BadConfig unless the master key unwraps all of them."""
    return {key.id: master.unwrap(key.secret, key.scope) for key in keys if key.secret is not None}


def _unwrap_backup(db: Any, backup: Path, master: Path | None, old_master: Path | None) -> dict[int, bytes]:
    """Return {number: key} of the backup. If only the old master key unwraps them, wrap them with the present one. Raises BadConfig."""
    keys, present = _stored(db), MasterKey(backup, master)
    try:
        return _unwrap_all(keys, present)
    except BadConfig as error:
        if present.none:
            raise
        if old_master is None:
            raise BadConfig(
                f"{error}; if `ostinato log rekey` changed the master key since the backup, name the old one's file with {OLD_MASTER}"
            ) from error
    secrets = _unwrap_all(keys, MasterKey(backup, old_master, OLD_MASTER))
    wrapped = [(present.wrap(secrets[key.id], key.scope), key.id) for key in keys if key.secret is not None]
    db.executemany("UPDATE keys SET secret = ? WHERE id = ?", wrapped)
    return secrets


def _merge_present(db: Any, keys: Path, secrets: dict[int, bytes], master: MasterKey) -> int:
    """Destroy the keys that are destroyed in the run's present file, and add those that only it has. Return how many were destroyed.

    `secrets`: the backup's keys, as {number: key}.
    """
    present = _read(db, keys)
    try:
        found = _unwrap_all(present, master)
    except BadConfig as error:
        raise BadConfig(
            f"record.master_key opens the keys of the backup, but not those in {keys}, which would be lost: if `ostinato log rekey` "
            f"changed their master key, set record.master_key to its file and name the old one's with {OLD_MASTER}; or move {keys} away, "
            "keep it, and name it with --keys, so that what was forgotten stays forgotten"
        ) from error
    if any(secrets.get(number, secret) != secret for number, secret in found.items()):
        raise _other_log(keys)
    count = _destroy(db, present)
    known = {number for (number,) in db.execute("SELECT id FROM keys")}
    only_here = [(key.id, key.tenant, key.scope, key.secret) for key in present if key.id not in known]
    try:
        db.executemany("INSERT INTO keys (id, tenant, scope, secret) VALUES (?, ?, ?, ?)", only_here)
    except driver.IntegrityError as error:  # the backup has another key for the same owner
        raise _other_log(keys) from error
    return count


def _destroy(db: Any, keys: Sequence[_Key]) -> int:
    """Destroy the keys that are destroyed in another file; return how many. Key numbers are never reused."""
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
    if keys:  # so that no future key gets a number that this file has used
        newest = (max(key.id for key in keys),)
        if not db.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'keys'", newest).rowcount:
            db.execute("INSERT INTO sqlite_sequence VALUES ('keys', ?)", newest)
    return count


# ---------------------------------------------------------------- installing


def _install(fresh: Path, log: LogDirectory, keys: Path) -> None:
    """Put the keys in place, then the log, whose rename completes the restore. An empty log in its place is removed."""
    restored = fresh / KEYS
    if restored.exists():
        with restored.open("rb") as file:
            os.fsync(file.fileno())
        for suffix in ("-journal", "-wal", "-shm"):  # SQLite would apply them to the new file
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
