"""`ostinato weights gc`, `pin` and `unpin`: decide which versions stay, and delete the others."""

from __future__ import annotations

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ostinato.app.retention import needed
from ostinato.app.storage import home, open_log, open_store
from ostinato.config import Config
from ostinato.launch.commands.weights.versions import find_version
from ostinato.weights.keep import pins
from ostinato.weights.keep.gc import Collected, GcProgress, Tally, collect


async def collect_garbage(config: Config, dry_run: bool, console: Console) -> None:
    """Delete what nothing needs, or say what would be deleted. Raises Corrupt if a manifest, which names what is needed, is damaged."""
    roots = await _needed(config, console)
    with _Screen(console) as screen:
        found = await collect(
            open_store(config),
            config.collect,
            roots=roots,
            dry_run=dry_run,
            on_step=screen.show,
        )
    _print(found, config, console)


async def pin_version(config: Config, name: str, version: str, console: Console) -> None:
    """Keep a version until it is unpinned. Raises NotFound, BadRequest."""
    policy = (await find_version(config, version)).policy
    before = await pins.pin(open_store(config), name, policy.hash)
    moved = f"; it held {before[:16]} before" if before not in (None, policy.hash) else ""
    console.print(f"pin {name} holds {policy}{moved}", highlight=False)


async def unpin_version(config: Config, name: str, console: Console) -> None:
    """Remove a pin. Raises NotFound, which lists the pins."""
    root = await pins.unpin(open_store(config), name)
    console.print(f"pin {name} is gone; it held {root[:16]}", highlight=False)


async def _needed(config: Config, console: Console) -> list[str]:
    """The roots that must stay according to the run's log."""
    if not home(config).log.exists():
        console.print(f"no log in {config.run.directory}: past releases are kept only where a ref or pin names them")
        return []
    with open_log(config) as log:
        return await needed(log, config)


class _Screen:
    """One bar for each stage of a collection, with bytes and their rate."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[size]}"),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, step: GcProgress) -> None:
        """Move the stage's bar."""
        if step.stage not in self._tasks:
            self._tasks[step.stage] = self._progress.add_task(step.stage, total=None, size="")
        task = self._tasks[step.stage]
        elapsed = self._progress.tasks[task].elapsed
        rate = f", {decimal(int(step.bytes / elapsed))}/s" if elapsed else ""
        size = f"{decimal(step.bytes)}{rate}" if step.bytes else ""
        self._progress.update(task, completed=step.done, total=step.total, size=size)


def _print(found: Collected, config: Config, console: Console) -> None:
    table = Table("kept", "root", "because of", box=None, pad_edge=False)
    for policy, reasons in found.reasons.items():
        table.add_row(f"v{policy.number}", policy.hash[:16], ", ".join(reasons))
    console.print(table)
    would = "would delete" if found.dry_run else "deleted"
    if found.gone:
        console.print(f"{would} {', '.join(str(policy) for policy in found.gone)}", highlight=False, soft_wrap=True)
    for ref in found.leases:
        console.print(f"{would} the expired {ref}", highlight=False)
    for root in found.missing:
        console.print(f"a past release is not in this store: {root[:16]}", highlight=False)
    young = (
        f" ({_size(found.young)} unneeded but younger than {config.collect.grace_hours:g} h)"
        if found.young.objects
        else ""
    )
    console.print(f"{would} {_size(found.deleted)}; kept {_size(found.kept)}{young}", highlight=False)


def _size(tally: Tally) -> str:
    return f"{tally.objects} objects, {decimal(tally.bytes)}"
