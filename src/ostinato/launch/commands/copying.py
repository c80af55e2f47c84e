"""`ostinato log copy`: a run's log to Postgres, or back into its directory."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ostinato.app.storage import Home, copy_rows_of, log_elsewhere, named_log
from ostinato.config import Config
from ostinato.core.errors import BadConfig, NotFound
from ostinato.launch.views.audit import audited, login
from ostinato.record.config import RecordConfig


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
