"""Backups and copies of a run's log: `ostinato log backup`, `restore`, `rekey` (another master key) and `copy` (to Postgres and back)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ostinato.app.backups import back_up_log, rekey_log, restore_log
from ostinato.app.storage import Home, copy_rows_of, log_elsewhere, named_log
from ostinato.config import Config
from ostinato.core.errors import BadConfig, NotFound
from ostinato.launch.views.audit import audited, login
from ostinato.record.backup import KEYS, BackupManifest, OnBytes
from ostinato.record.config import RecordConfig


def backup(config: Config, directory: Path, console: Console) -> None:
    """Back up the run's log. Raises as `app.backups.back_up_log`."""
    with (
        _progress(console, "copying the log") as show,
        audited(Home(config.run.directory), "log backup", actor=login(), target=str(directory)),
    ):
        made = back_up_log(config, directory, show)
    console.print(f"backed up {_rows(made)} to {directory}", highlight=False, soft_wrap=True)
    if any(file.name == KEYS for file in made.files):
        master = config.record.master_key
        said = (
            f"{KEYS} in it is not wrapped with a master key: who has the directory can read everything"
            if master is None
            else f"the master key is not in it: keep a copy of {master} elsewhere, because nothing can be read without it"
        )
        console.print(
            f"{said}. Delete the directory once somebody is forgotten who is in it", highlight=False, soft_wrap=True
        )


def restore(
    config: Config, directory: Path, keys: Path | None, console: Console, old_master: Path | None = None
) -> None:
    """Restore a backup into the run's directory. Raises as `app.backups.restore_log`."""
    with (
        _progress(console, "restoring the log") as show,
        audited(Home(config.run.directory), "log restore", actor=login(), source=str(directory)),
    ):
        manifest, destroyed = restore_log(config, directory, keys, show, old_master)
    console.print(f"restored {_rows(manifest)} to {config.run.directory}", highlight=False, soft_wrap=True)
    if destroyed:
        console.print(f"{destroyed} keys that were forgotten since stay destroyed", highlight=False)


def rekey(config: Config, new_master: Path, console: Console) -> None:
    """Wrap the run's keys with another master key. Raises as `app.backups.rekey_log`."""
    with audited(Home(config.run.directory), "log rekey", actor=login()):
        count = rekey_log(config, new_master)
    named = f'record.master_key = "{new_master}"'
    console.print(
        f"{count} keys are wrapped with the master key in {new_master}: set {named} before the run starts again. "
        "Keep the old one for earlier backups: `ostinato log restore DIR --old-master FILE` needs it",
        highlight=False,
        soft_wrap=True,
    )


def _rows(manifest: BackupManifest) -> str:
    dropped = " and the permanent rows before them" if manifest.first > 1 else ""
    return (
        "a log without rows" if manifest.last < manifest.first else f"rows {manifest.first} to {manifest.last}{dropped}"
    )


@contextmanager
def _progress(console: Console, what: str) -> Generator[OnBytes]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        yield show


# ---------------------------------------------------------------- copies of the log


async def copy_between(config: Config, source: str, target: str, console: Console) -> None:
    """Copy a log. Raises NotFound, BadConfig, Conflict, StorageFull, Unavailable."""
    one, other = (named_log(config, place) for place in (source, target))
    if one == other:
        raise BadConfig("the two logs are the same; name another target")
    if isinstance(one, Path) and not one.exists():
        raise NotFound(f"no log in {one}; name a run's directory or postgresql://user@host/database")
    if isinstance(one, RecordConfig):
        name, there = log_elsewhere(one)
        if not there:
            raise NotFound(f"no log at {name}; correct the URL or record.namespace")
    columns = (TextColumn("copying rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("rows", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        place = Home(one.parent) if isinstance(one, Path) else Home(config.run.directory)
        with audited(place, "log copy", actor=login(), target=str(other) if isinstance(other, Path) else "Postgres"):
            newest = await copy_rows_of(config, one, other, show)
    console.print(f"copied: the newest row is {newest}", highlight=False)
