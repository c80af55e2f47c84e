"""Installs a backup of a log: checked file by file, then put in place by renaming, with every key that was forgotten since destroyed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, Conflict, Corrupt, OstinatoError, StorageFull
from ostinato.record.backup import KEYS, BackedUpFile, Manifest, OnBytes, open_plain, read_manifest
from ostinato.record.keys import KeyRing
from ostinato.record.segments.directory import LogDirectory
from ostinato.record.segments.segment import open_segment
from ostinato.record.sqlite import connect, driver, sync_directory, translate

_CHUNK = 4 << 20


def restore(
    source: Path,
    log: LogDirectory,
    keys: Path,
    others: Sequence[Path],
    master: Path | None,
    on_bytes: OnBytes,
) -> tuple[Manifest, int]:
    """Install the backup in `source` as the log in `log` and its file of keys `keys`; returns its manifest and how many keys it destroyed.

    A key that was destroyed in the present file `keys`, or in one of the files `others`, is destroyed in the restored one, so that what was
    forgotten after the backup stays forgotten. Killed at any instant, it leaves no log or the whole of it; call it again to complete it. No
    process may use the log. `master` is the file of the master key that wraps the keys, which is checked.

    Raises:
        NotFound: `source` holds no complete backup.
        Conflict: a log with rows is there.
        Corrupt: a file of the backup is missing, damaged, or not what the manifest says.
        BadConfig: the backup or a segment has a newer format; the master key is the wrong one; or a file of keys is of another log.
        StorageFull: nothing was installed.
    """
    manifest = read_manifest(source)
    refuse_rows(log)
    fresh = LogDirectory(log.path.with_name(f".{log.path.name}.restoring"))
    try:
        _remove_tree(fresh.path)
        fresh.path.mkdir(mode=0o700, parents=True)
        _copy_files(source, manifest, fresh.path, on_bytes)
        _check_segments(source, manifest, fresh)
        destroyed = 0
        if (fresh.path / KEYS).exists():
            destroyed = _keep_forgotten(fresh.path / KEYS, [keys, *others])
            KeyRing(fresh.path / KEYS, master, wall_clock).close()
        _install(fresh.path, log.path, keys)
    except OSError as error:
        if isinstance(error, OstinatoError):
            raise
        raise StorageFull(f"the backup was not restored to {log.path}: {error}; free space, then try again") from error
    finally:
        with suppress(OSError):
            _remove_tree(fresh.path)
    return manifest, destroyed


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


def _copy_files(source: Path, manifest: Manifest, target: Path, on_bytes: OnBytes) -> None:
    done, total = 0, sum(file.size for file in manifest.files)
    for file in manifest.files:
        try:
            _copy_file(source / file.name, file, target / file.name)
        except FileNotFoundError as error:
            raise Corrupt(f"{source / file.name}, which the manifest names, is missing; name another backup") from error
        done += file.size
        on_bytes(done, total)


def _copy_file(path: Path, expected: BackedUpFile, target: Path) -> None:
    """Copy a file; what was copied, and not what is read later, has the promised size and hash. Raises Corrupt, OSError."""
    digest, size = hashlib.sha256(), 0
    with (
        open_plain(path) as file,
        os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy,
    ):
        while size <= expected.size and (data := file.read(_CHUNK)):
            digest.update(data)
            size += len(data)
            copy.write(data)
        copy.flush()
        os.fsync(copy.fileno())
    if (size, digest.hexdigest()) != (expected.size, expected.sha256):
        raise Corrupt(
            f"{path} was changed since the backup was made: it is not what the manifest says; name another backup"
        )


def _check_segments(source: Path, manifest: Manifest, fresh: LogDirectory) -> None:
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


def _keep_forgotten(restored: Path, others: Sequence[Path]) -> int:
    """Destroy in the restored file of keys what was destroyed in these; returns how many. Numbers of keys are never used again."""
    try:
        with closing(connect(restored, write=True)) as db:
            db.execute("PRAGMA secure_delete=ON")
            count = 0
            for other in others:
                if other.exists():
                    count += _destroy(db, other)
            db.execute("VACUUM")
    except driver.Error as error:
        raise translate(error, restored) from error
    return count


def _destroy(db: Any, other: Path) -> int:
    try:
        with closing(connect(other, write=False)) as found:
            keys = found.execute("SELECT id, tenant, scope, forgotten_at, secret IS NULL FROM keys").fetchall()
    except driver.Error as error:
        raise translate(error, other) from error
    known = dict(db.execute("SELECT id, scope FROM keys"))
    strange = [number for number, _, scope, _, _ in keys if known.get(number, scope) != scope]
    if strange:
        raise BadConfig(
            f"{other} is the file of keys of another log; move it away, or name the one that belongs to the backup"
        )
    forgotten = [key[:4] for key in keys if key[4]]
    numbers = json.dumps([key[0] for key in forgotten])
    db.execute("BEGIN IMMEDIATE")
    count = db.execute(
        "UPDATE keys SET secret = NULL WHERE secret IS NOT NULL AND id IN (SELECT value FROM json_each(?))", (numbers,)
    ).rowcount
    db.executemany(
        "INSERT INTO keys (id, tenant, scope, secret, forgotten_at) VALUES (?, ?, ?, NULL, ?) "
        "ON CONFLICT (id) DO UPDATE SET forgotten_at = excluded.forgotten_at",
        forgotten,
    )
    if keys:  # so that a key made from now on cannot be taken for one of these
        newest = (max(key[0] for key in keys),)
        if not db.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'keys'", newest).rowcount:
            db.execute("INSERT INTO sqlite_sequence VALUES ('keys', ?)", newest)
    db.execute("COMMIT")
    return count


# ---------------------------------------------------------------- installing


def _install(fresh: Path, log: Path, keys: Path) -> None:
    """Put the keys in place, then the log, whose appearance completes it. An empty log in its place is removed."""
    restored = fresh / KEYS
    if restored.exists():
        with restored.open("rb") as file:
            os.fsync(file.fileno())
        for suffix in ("-journal", "-wal", "-shm"):  # they would be applied to the new file
            keys.with_name(keys.name + suffix).unlink(missing_ok=True)
        restored.replace(keys)
        sync_directory(keys.parent)
    replaced = log.with_name(f".{log.name}.replaced")
    _remove_tree(replaced)
    with suppress(FileNotFoundError):
        log.rename(replaced)
    sync_directory(fresh)
    fresh.rename(log)
    sync_directory(log.parent)
    _remove_tree(replaced)


def _remove_tree(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
