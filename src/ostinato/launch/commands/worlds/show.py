"""`ostinato worlds show`: what a taskset holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.app.worlds import GRADERS, check_grading
from ostinato.launch.views.screen import plain
from ostinato.worlds.building.sources import canonical
from ostinato.worlds.harness.harnesses import HARNESSES, is_agent, no_harness
from ostinato.worlds.tasks.harbor import load_harbor
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load


def show_taskset(file: Path, console: Console) -> None:
    """Print the name, the hash, and a table of the families. Raises BadConfig for a file that is not a taskset."""
    taskset = load_harbor(file, offline=True) if file.is_dir() else load(file)
    own = sorted({task.grading.grader for task in taskset.tasks} - set(GRADERS))
    if not file.is_dir():
        for task in taskset.tasks:
            check_grading(task, own)
    count = len(taskset.tasks)
    console.print(Text.assemble((plain(taskset.name), "bold"), f"  {count} task{'s' * (count != 1)}"))
    console.print(Text(f"hash {taskset.hash}", "dim"))
    console.print(_families(taskset))
    alone = [task.id for task in taskset.tasks if task.harness not in ("single", "repair") and task.turns == 1]
    if alone:
        told = f"turns = 1 in {len(alone)} of them, {plain(alone[0])} first: the model acts once and sees no result"
        console.print(Text(told, "yellow"))
    for package in shared_packages(taskset):
        told = f"{plain(package)} has both training and held-out tasks: the held-out tasks use code that the model sees in training"
        console.print(Text(told, "yellow"))
    for name in own:
        console.print(Text(f"{plain(name)} is no built-in grader; worlds.graders must name it", "yellow"))
    unknown = sorted(
        {task.harness for task in taskset.tasks if task.harness not in HARNESSES and not is_agent(task.harness)}
    )
    for name in unknown:
        console.print(Text(no_harness(plain(name)), "yellow"))


def shared_packages(taskset: Taskset) -> list[str]:
    """The packages (`about.package`, by their canonical names) that have tasks in both splits."""
    taught, held_out = (
        {canonical(task.about["package"]) for task in taskset.tasks if task.split is split and "package" in task.about}
        for split in (Split.TRAIN, Split.HELD_OUT)
    )
    return sorted(taught & held_out)


def _families(taskset: Taskset) -> Table:
    table = Table("family", "harness", "grader", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (*(split.value for split in Split), "KiB", "hidden KiB"):
        table.add_column(name, justify="right")
    families: dict[str, list[Task]] = defaultdict(list)
    for task in taskset.tasks:
        families[task.family].append(task)
    for number, (name, tasks) in enumerate(families.items(), start=1):
        table.add_row(Text(plain(name)), *_figures(tasks), end_section=number == len(families))
    if len(families) > 1:
        table.add_row(Text(f"{len(families)} families"), *_figures(taskset.tasks))
    return table


def _figures(tasks: Sequence[Task]) -> Iterable[str | Text]:
    yield _names(task.harness for task in tasks)
    yield _names(task.grading.grader for task in tasks)
    yield from (str(sum(task.split is split for task in tasks)) for split in Split)
    yield f"{sum(len(data) for task in tasks for data in task.spec.files.values()) / 1024:.1f}"
    yield f"{sum(len(data) for task in tasks for data in task.grading.hidden.values()) / 1024:.1f}"


def _names(names: Iterable[str]) -> Text:
    return Text(", ".join(sorted({plain(name) for name in names})))
