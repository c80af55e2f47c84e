"""`ostinato suite make`: draws a held-out suite from a run's log. `ostinato suite check`: contamination of suites by training turns."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ostinato.app import log_suites
from ostinato.app.evaluation import gate_rules
from ostinato.app.storage import existing_home, open_log
from ostinato.app.suites import open_task_suite
from ostinato.config import Config
from ostinato.core.errors import BadConfig, NotFound
from ostinato.evaluate.gate import assumed_error, items_in_round, smallest_margin
from ostinato.evaluate.suites import Item, Suite
from ostinato.launch.views.screen import counting_bars, plain, say
from ostinato.worlds.tasks.task import Task
from ostinato.worlds.tasks.tasksets import save, taskset_of

SHOWN = 20


async def make_suite(config: Config, file: Path, draw: log_suites.SuiteDraw, console: Console) -> None:
    """Draw a suite from a run's log and write it to a file that only its owner can read. Raises NotFound, BadConfig, StorageFull."""
    existing_home(config)
    if file.exists():
        raise BadConfig(
            f"{file} is there already; name a new file, since what a suite holds decides what its scores mean"
        )
    reader = log_suites.open_reader(config)
    with open_log(config) as log, counting_bars() as on_progress:
        found = await log_suites.draw_suite(log, config, draw, reader, on_progress)
    save(taskset_of(file.stem, found.tasks), file, mode=0o600)
    _print_drawn(found, console)
    count = f"{len(found.tasks)}" if len(found.tasks) >= draw.items else f"only {len(found.tasks)} of {draw.items}"
    console.print(Text(f"{count} items in {file}. Put this into the settings and restart `up` (or the trainer):"))
    say(console, _settings(config, file, draw, found.tasks))
    if draw.grade == "exact":
        console.print(
            Text("exact: only the answer that was liked scores 1, so good answers in other words score 0", "yellow")
        )
    if config.record.encrypt.value != "none" or found.left_out["forgotten"]:
        told = "the file holds people's words in plain text, which `ostinato forget` does not reach: keep it as you keep the log's keys"
        console.print(Text(told, "yellow"))


def _print_drawn(found: log_suites.DrawnSuite, console: Console) -> None:
    console.print(
        f"{found.turns} turns of people could be drawn; {found.trained} that were trained on were looked through for copies"
    )
    for title, counts in (("left out", found.left_out), ("items", found.strata)):
        told = ", ".join(f"{count} {plain(name)}" for name, count in counts.most_common() if count)
        say(console, f"{title}: {told or 'none'}")


def _settings(config: Config, file: Path, draw: log_suites.SuiteDraw, tasks: Sequence[Task]) -> str:
    """Return the settings that evaluate candidates on the file, with margins wide enough for its number of items."""
    gate = gate_rules(config)
    suite = Suite(file.stem, "", tuple(Item(task.id, task.family) for task in tasks))
    error = assumed_error(items_in_round(suite, gate), gate)
    lines = ["[evaluate]", f"suite = {json.dumps(str(file.resolve()))}"]
    margins = {"margin": gate.alpha_at(gate.max_draws), "total_margin": gate.total_alpha_at(gate.max_draws)}
    coarse = [
        f"{name} = {math.ceil(1000 * smallest) / 1000:g}"
        for name, level in margins.items()
        if getattr(gate, name) < (smallest := smallest_margin(error, level))
    ]
    if coarse:
        lines += ["[evaluate.gate]  # the smallest losses that so many items can rule out", *coarse]
    if ":" in draw.grade:
        lines += ["[worlds.graders]", f"{draw.grader} = {json.dumps(draw.grade)}"]
    return "\n".join(f"  {line}" for line in lines)


async def check_suites(config: Config, files: Sequence[str], gram: int, machine: bool, console: Console) -> bool:
    """Print which items share an n-gram of `gram` words with turns that were trained on. Return True if none does.

    `files`: task files; if empty, those of the settings. Raises NotFound if there is no run or no suite, BadConfig.
    """
    existing_home(config)
    names = files or log_suites.suite_files(config)
    if not names:
        raise NotFound("no suite is named in evaluate.suite; give a task file")
    suites = {found.suite.name: found.tasks.tasks for found in (open_task_suite(name, config) for name in names)}
    reader = log_suites.open_reader(config)
    with open_log(config) as log, counting_bars(disable=machine) as on_progress:
        found = await log_suites.contamination(log, suites, reader, gram=gram, on_progress=on_progress)
    if machine:
        console.out(json.dumps(asdict(found)), highlight=False)
    else:
        _print_shared(found, gram, console)
    return not found.shared


def _print_shared(found: log_suites.Contamination, gram: int, console: Console) -> None:
    shared = found.shared
    told = f"{found.items} items, {found.turns} turns of people that were trained on: {len(shared)} items share {gram} words in a row"
    say(console, f"{told} with them", "yellow" if shared else "green")
    if found.short:
        say(console, f"{found.short} items have too few words of their own to be recognised", "dim")
    for each in shared[:SHOWN]:
        where = f"{each.item}  in {each.turns} turns, e.g. {each.turn}: {shlex.quote(each.run)}"
        say(console, f"  {plain(where)}")
    if len(shared) > SHOWN:
        console.print(f"  and {len(shared) - SHOWN} more (--json lists all)")
    if shared:
        console.print(
            "  their scores may rise by memory alone: take them out, or draw new ones with `ostinato suite make`"
        )
