"""Backups of a run's log: made while workers run, and restored into a run's directory. Also rotates the master key of its keys.

The logs of tenants' branches are in ``branches/TENANT`` of a backup, each a backup of its own, with the cursor up to which it was copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ostinato import __version__
from ostinato.app.branches import branch_config, branches_begun, copied_fold, read_copied_upto, write_copied_upto
from ostinato.app.storage import Home, check_log, home, serving_run
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, Conflict, Corrupt, NotFound, StorageFull
from ostinato.core.files import write_atomic
from ostinato.core.seams import Cursor
from ostinato.record.backup import BackupManifest, MakeDirectory, OnBytes, back_up, read_manifest, read_plain
from ostinato.record.keys import rekey
from ostinato.record.restore import refuse_rows, restore
from ostinato.record.roles import hold
from ostinato.record.segment_directory import LogDirectory

_WRITERS = ("up", "serve", "train", "rollout", "release", "housekeeping")
"""The locks of the processes that write a run's log."""
_COPIED = "copied.json"
"""The file beside a branch's manifest with the cursor up to which its log was copied from the run's."""


def back_up_log(config: Config, target: Path, on_bytes: OnBytes) -> BackupManifest:
    """Copy the run's log and keys to a new or empty directory. Raises like `record.backup.back_up`; BadConfig for a log in Postgres."""
    _refuse_postgres(config, "back it up with pg_dump --format=custom --schema={}")
    check_log(config)
    place = Home(config.run.directory)

    def branches(last: Cursor, make: MakeDirectory) -> None:
        for each in branches_begun(config):
            _back_up_branch(each, Home(target).branch(each.run.tenant), last, make, on_bytes)

    return back_up(LogDirectory(place.log), place.keys, target, __version__, wall_clock, on_bytes, branches)


def _back_up_branch(branch: Config, target: Path, last: Cursor, make: MakeDirectory, on_bytes: OnBytes) -> None:
    """Back up a branch's log and keys, if it has rows, and its copied cursor, which is at most `last`. Raises like `back_up_log`."""
    place = Home(branch.run.directory)
    if not LogDirectory(place.log).listing().firsts:
        return
    make(target)
    upto = read_copied_upto(branch)  # before the copy, which therefore holds at least the rows up to it
    back_up(LogDirectory(place.log), place.keys, target, __version__, wall_clock, on_bytes)
    write_atomic(target / _COPIED, json.dumps({"copied": min(upto, last)}), durable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredLog:
    """The result of a restore. `destroyed`: how many keys were destroyed in the restored log. `branches`: the tenants whose branches' logs
    were restored; `kept`: those whose branches' logs existed and were left alone.
    """

    manifest: BackupManifest
    destroyed: int
    branches: Sequence[str]
    kept: Sequence[str]


def restore_log(
    config: Config, source: Path, keys: Path | None, on_bytes: OnBytes, old_master: Path | None = None
) -> RestoredLog:
    """Install a backup as the run's log, and the logs in it of branches that have no log here.

    Keys that are destroyed in the run's own file of keys or in the file `keys` are destroyed in the restored one. `old_master` is the file
    of the master key of a backup that was made before `rekey_log`. The run's folds are deleted, to be rebuilt from the log; so are the
    copied cursors of branches that stay, because sequence numbers may now mean other rows. Raises like `record.restore.restore`; BadConfig
    for a log in Postgres; Conflict while a worker of the run or of a branch runs, or if the trainer has a checkpoint newer than the backup.
    """
    _refuse_postgres(config, "restore it with pg_restore --schema={}")
    if keys is not None and not keys.is_file():
        raise NotFound(f"--keys: there is no file {keys}; name a copy of log-keys.db")
    manifest = read_manifest(source)
    place = home(config)
    if place.elsewhere.exists():
        raise BadConfig(f"the log of the run in {place.root} is in Postgres; name another run.directory")
    here = [each.run.tenant for each in branches_begun(config)]
    copies = [path.name for path in sorted(source.glob("branches/*")) if path.is_dir()]
    lacking = [branch_config(config, tenant) for tenant in copies if tenant not in here]
    copied: list[tuple[Config, Cursor]] = []
    destroyed = 0

    def before_install() -> None:
        nonlocal destroyed
        for branch in lacking:
            count, upto = _restore_branch(branch, source, on_bytes, old_master)
            copied.append((branch, upto))
            destroyed += count
        _delete_folds(config)

    with _stopped(config, *lacking):
        refuse_rows(LogDirectory(place.log))
        _refuse_newer_checkpoints(place, manifest)
        _, count = restore(
            source,
            LogDirectory(place.log),
            place.keys,
            [] if keys is None else [keys],
            config.record.master_key,
            on_bytes,
            before_install=before_install,
            old_master=old_master,
        )
        for branch, upto in copied:
            write_copied_upto(branch, upto)
    restored = [each.run.tenant for each in lacking]
    return RestoredLog(manifest=manifest, destroyed=destroyed + count, branches=restored, kept=here)


def _restore_branch(branch: Config, source: Path, on_bytes: OnBytes, old_master: Path | None) -> tuple[int, Cursor]:
    """Install a branch's log from the serving run's backup. Return how many keys were destroyed in it, and its copied cursor.

    If the process is killed before the run's own log is installed, the branch's log exists and stays at the next try. Rows are then copied
    again from the beginning, which keeps each row once. Raises like `restore_log`.
    """
    own, place, master = Home(source).branch(branch.run.tenant), home(branch), branch.record.master_key
    _refuse_newer_checkpoints(place, read_manifest(own))
    try:
        upto = int(json.loads(read_plain(own / _COPIED, 100))["copied"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{own / _COPIED} cannot be read: {error}; name another backup") from error
    _, destroyed = restore(own, LogDirectory(place.log), place.keys, [], master, on_bytes, old_master=old_master)
    return destroyed, upto


def rekey_log(config: Config, new_master: Path) -> int:
    """Wrap the run's keys and its branches' with another master key; return how many keys there are.

    Raises like `record.keys.rekey`, and completes what it began if it is called again; BadConfig for a branch's run; Conflict while a
    worker of the run or of a branch runs.
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
def _stopped(config: Config, *more: Config) -> Generator[None]:
    """Keep the workers of the run, its branches and `more` from starting while the block runs. Raises Conflict, naming the process, if one
    is running.
    """
    with ExitStack() as stack:
        for each in (config, *branches_begun(config), *more):
            for role in _WRITERS:
                stack.enter_context(hold(each.run.directory, role))
        yield


def _refuse_postgres(config: Config, remedy: str) -> None:
    if config.record.url:
        named = config.record.namespace
        raise BadConfig(f"the run's log is in Postgres, in the schema {named}: {remedy.format(named)}")


def _delete_folds(config: Config) -> None:
    """Delete the folds of the present log before the restored one is installed: none of them can be continued."""
    folds = Home(config.run.directory).folds
    try:
        if folds.exists():
            shutil.rmtree(folds)
        for branch in branches_begun(config):
            copied_fold(branch).unlink(missing_ok=True)
    except OSError as error:
        raise StorageFull(f"{error.filename or folds} cannot be deleted: {error}; delete it, then try again") from error


def _refuse_newer_checkpoints(place: Home, manifest: BackupManifest) -> None:
    """Raise Conflict if the trainer would continue from steps that the backup does not contain."""
    if not place.checkpoints.is_dir():
        return
    from ostinato.train.checkpoint import cursor_of, stored

    kept = stored(place.checkpoints)
    if place.root.parent.name == "branches":
        # a branch's first checkpoint was written by the serving run's trainer, at a row of that run's log
        kept = kept[:1]
    newer = [path for path in kept if cursor_of(path) > manifest.last]
    if newer:
        raise Conflict(
            f"the trainer's checkpoint {newer[0]} was written after row {manifest.last}, where the backup ends: move {place.checkpoints} "
            "away and put the checkpoints that were copied before this backup in its place, or restore a newer backup"
        )
