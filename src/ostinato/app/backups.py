"""A run's log in backups: made beside running workers, restored into a run's directory, and its keys under another master key."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ostinato import __version__
from ostinato.app.branches import branches_begun, copied_fold
from ostinato.app.storage import Home, check_log, home, serving_run
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, Conflict, NotFound, StorageFull
from ostinato.record.backup import BackupManifest, OnBytes, back_up, read_manifest
from ostinato.record.keys import rekey
from ostinato.record.restore import refuse_rows, restore
from ostinato.record.roles import hold
from ostinato.record.segment_directory import LogDirectory

_WRITERS = ("up", "serve", "train", "rollout", "release", "housekeeping")
"""The locks of the processes that use a run's log."""


def back_up_log(config: Config, target: Path, on_bytes: OnBytes) -> BackupManifest:
    """Copy the run's log and keys into a new or empty directory. Raises as `record.backup.back_up`; BadConfig for a log in Postgres."""
    _refuse_postgres(config, "back it up with pg_dump --format=custom --schema={}")
    check_log(config)
    place = Home(config.run.directory)
    return back_up(LogDirectory(place.log), place.keys, target, __version__, wall_clock, on_bytes)


def restore_log(
    config: Config, source: Path, keys: Path | None, on_bytes: OnBytes, old_master: Path | None = None
) -> tuple[BackupManifest, int]:
    """Install a backup as the run's log; returns its manifest, and how many keys were destroyed in it.

    These are the keys that are destroyed in the run's own file of keys or in the file `keys`. `old_master` is the master key's file of a
    backup that was made before `rekey_log`. The run's folds are deleted, to be made again from the log, and how far it was copied for
    tenants' branches: another row may stand at a place now. Raises as `record.restore.restore`; BadConfig for a log in Postgres; Conflict
    while a worker of the run or of a branch is up, or for a checkpoint of the trainer that is newer than the backup.
    """
    _refuse_postgres(config, "restore it with pg_restore --schema={}")
    if keys is not None and not keys.is_file():
        raise NotFound(f"--keys: there is no file {keys}; name a copy of log-keys.db")
    manifest = read_manifest(source)
    place = home(config)
    if place.elsewhere.exists():
        raise BadConfig(f"the log of the run in {place.root} lies in Postgres; name another run.directory")
    with _stopped(config):
        refuse_rows(LogDirectory(place.log))
        _refuse_newer_checkpoints(place, manifest)
        return restore(
            source,
            LogDirectory(place.log),
            place.keys,
            [] if keys is None else [keys],
            config.record.master_key,
            on_bytes,
            before_install=lambda: _delete_folds(config),
            old_master=old_master,
        )


def rekey_log(config: Config, new_master: Path) -> int:
    """Wrap the run's keys and its branches' with another master key; returns how many there are.

    Raises as `record.keys.rekey`, and then completes what it began if it is called again; BadConfig for a branch's run; Conflict while a
    worker of the run or of a branch is up.
    """
    place = Home(config.run.directory)
    if config.run.tenant:
        raise BadConfig(
            f"{place.root} trains a branch: rekey in the run that serves, {serving_run(config).run.directory}, which reaches this one, too"
        )
    if not place.keys.exists():
        raise NotFound(f"there are no keys in {place.keys}: nothing of this log is encrypted (record.encrypt)")
    with _stopped(config):
        copies = [keys for each in branches_begun(config) if (keys := Home(each.run.directory).keys).exists()]
        return sum(rekey(keys, config.record.master_key, new_master) for keys in (place.keys, *copies))


@contextmanager
def _stopped(config: Config) -> Generator[None]:
    """Keep the run's workers and its branches' from starting inside the block. Raises Conflict, naming the process, if one is up."""
    with ExitStack() as stack:
        for each in (config, *branches_begun(config)):
            for role in _WRITERS:
                stack.enter_context(hold(each.run.directory, role))
        yield


def _refuse_postgres(config: Config, remedy: str) -> None:
    if config.record.url:
        named = config.record.namespace
        raise BadConfig(f"the run's log lies in Postgres, in the schema {named}: {remedy.format(named)}")


def _delete_folds(config: Config) -> None:
    """Delete what was derived from another log, before the restored one is there: nothing of it can be continued."""
    folds = Home(config.run.directory).folds
    try:
        if folds.exists():
            shutil.rmtree(folds)
        for branch in branches_begun(config):
            copied_fold(branch).unlink(missing_ok=True)
    except OSError as error:
        raise StorageFull(f"{error.filename or folds} cannot be deleted: {error}; delete it, then try again") from error


def _refuse_newer_checkpoints(place: Home, manifest: BackupManifest) -> None:
    """Raise Conflict if the trainer would go on from steps that the backup does not hold."""
    if not place.checkpoints.is_dir():
        return
    from ostinato.train.checkpoint import cursor_of, stored

    newer = [path for path in stored(place.checkpoints) if cursor_of(path) > manifest.last]
    if newer:
        raise Conflict(
            f"the trainer's checkpoint {newer[0]} was written after row {manifest.last}, where the backup ends: move {place.checkpoints} "
            "away and put the checkpoints that were copied before this backup in its place, or restore a newer backup"
        )
