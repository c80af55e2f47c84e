"""`ostinato worlds run`: tries each task a number of times with the weights of a run, and shows how much was solved."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ostinato.app.storage import home, open_run
from ostinato.app.worlds_notices import note_cheats, note_coverage
from ostinato.app.worlds_rollouts import check_tasks, open_workshop
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, StorageFull
from ostinato.core.lines import lines_of
from ostinato.core.records import PolicyVersion
from ostinato.launch.commands.worlds.measuring.figures import figures_json, show_figures
from ostinato.launch.commands.worlds.measuring.weights import PlacedWeights, at_gateway, place_weights
from ostinato.launch.views import progress
from ostinato.launch.views.plain import plain
from ostinato.launch.workers.stopping import stop_signals
from ostinato.worlds.rollout.attempt import Workshop
from ostinato.worlds.rollout.evaluate_tasks import Measurement
from ostinato.worlds.rollout.finished import CheatWatch, Finished, read_finished
from ostinato.worlds.rollout.groups import shuffled
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """What to measure. `split` "all": every task; `limit` 0: no limit; `out`: a further file for the records.

    Example: ``MeasureOptions(file=Path("tasks.jsonl"), split="held_out", tries=8, limit=100, release="v40")``
    """

    file: Path
    split: str = Split.HELD_OUT.value
    tries: int = 1
    limit: int = 0
    release: str = "newest"
    out: Path | None = None
    machine: bool = False


async def run_tasks(config: Config, asked: MeasureOptions, console: Console) -> None:
    """Measure, and print the results. Ctrl-C ends it early, with the figures of the rollouts that had ended.

    Raises BadConfig for a taskset without such tasks, NotFound or Conflict for weights that are not available, StorageFull.
    """
    tasks = load(asked.file.expanduser())
    chosen = chosen_tasks(tasks, asked.split, asked.limit, config.worlds.seed)
    check_tasks(config, chosen)

    def say(what: str) -> None:
        if not asked.machine:
            console.print(Text(plain(what), "dim"), soft_wrap=True)

    async def work(url: str) -> tuple[PolicyVersion, list[Finished]]:
        async with place_weights(config, url, asked.release) as placed:
            many = f"{len(chosen)} tasks of {asked.split} x {asked.tries}"
            say(
                f"{tasks.name} ({tasks.hash[:12]}): {many}, temperature {config.worlds.temperature:g}; {_named(placed)}"
            )
            async with open_workshop(config, home(config), placed.url, tasks, placed.slot) as shop:
                return placed.policy, await _measured(config, asked, tasks, chosen, shop, console)

    policy, records = await at_gateway(config, work, say)
    await _note(config, tasks, records, asked.tries)
    whole = len(records) == asked.tries * len(chosen)
    if asked.machine:
        console.out(json.dumps(figures_json(records, asked.tries, policy, whole=whole)), highlight=False)
        return
    if not whole:
        console.print(Text(f"stopped after {len(records)} of {asked.tries * len(chosen)} rollouts", "yellow"))
    if records:
        show_figures(records, asked.tries, policy, console)


async def _note(config: Config, tasks: Taskset, records: Sequence[Finished], k: int) -> None:
    """Raise alarms in the run's log if a rollout cheated, or if the measurements of this taskset taken together call for an alarm."""
    watch = CheatWatch(config.worlds.cheat_quiet)
    for record in records:
        watch.take(record)
    with contextlib.suppress(FileNotFoundError), open_run(config) as run:
        await note_cheats(run.log, watch)
        kept, _ = read_finished(lines_of(run.home.finished.read_text(encoding="utf-8", errors="replace")))
        await note_coverage(run.log, (each for each in kept if each.taskset == tasks.hash), k)


def chosen_tasks(tasks: Taskset, split: str, limit: int, seed: int) -> list[Task]:
    """The tasks of a split ("all": every task), in the file's order; if over `limit`, those that the seed draws. Raises BadConfig."""
    found = [task for task in tasks.tasks if split in ("all", task.split.value)]
    if not found:
        raise BadConfig(f"{tasks.name}: no task has the split {split!r}; `ostinato worlds show` lists the splits")
    if not 0 < limit < len(found):
        return found
    drawn = set(shuffled([task.id for task in found], 0, seed)[:limit])
    return [task for task in found if task.id in drawn]


def _named(placed: PlacedWeights) -> str:
    held = "pinned" if placed.pinned else "which changes as the trainer learns"
    return f"answers come from {placed.policy}, slot {placed.slot}, {held}"


async def _measured(
    config: Config,
    asked: MeasureOptions,
    tasks: Taskset,
    chosen: list[Task],
    shop: Workshop,
    console: Console,
) -> list[Finished]:
    """Measure until all rollouts have ended or somebody stops it; returns the records of those that ended."""
    settings, records = config.worlds, list[Finished]()
    measurement = Measurement(
        chosen,
        shop,
        tries=asked.tries,
        concurrency=settings.concurrency,
        token=f"m{secrets.token_hex(4)}",
        again=settings.tries,
        pause_s=settings.retry_pause_s,
        patience_s=settings.patience_s,
    )
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[so_far]}"),
        TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True, disable=asked.machine,
    )  # fmt: skip
    with bar, _keeping(config, asked.out) as keep:
        line = bar.add_task("rollouts", total=asked.tries * len(chosen), so_far="")

        async def work() -> None:
            async with contextlib.aclosing(measurement.results()) as results:
                async for tried in results:
                    record = tried.record(tasks, wall_clock)
                    keep(record.line())
                    records.append(record)
                    bar.update(line, advance=1, so_far=f"{sum(each.solved for each in records)} solved")

        await _until_stopped(work())
    return records


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or until SIGINT, SIGTERM or SIGHUP. Raises what `work` raises."""
    loop, working = asyncio.get_running_loop(), asyncio.ensure_future(work)
    signals = stop_signals()
    for number in signals:
        loop.add_signal_handler(number, working.cancel)
    try:
        await asyncio.wait({working})
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


@contextlib.contextmanager
def _keeping(config: Config, out: Path | None) -> Generator[Callable[[str], None]]:
    """A function that appends a line to the run's own file and to `out`. Raises StorageFull if `out` cannot be opened for writing."""
    own = progress.Progress(home(config).finished, progress.kept_bytes(config))
    with contextlib.ExitStack() as leaving:
        try:
            file = None if out is None else leaving.enter_context(out.open("a", encoding="utf-8", buffering=1))
        except OSError as error:
            raise StorageFull(f"--out {out} cannot be written: {error.strerror}") from error

        def keep(line: str) -> None:
            own.append(line)
            if file is not None:
                file.write(f"{line}\n")

        yield keep
