"""`ostinato worlds show`: the contents of a taskset. `ostinato worlds build`: turns published packages into tasks.

`ostinato worlds plan-burst`: simulates three ways to place a burst of sandboxes, with all assumptions. `ostinato worlds grade`: grades a
solution that somebody wrote by hand like a rollout.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ostinato.app.worlds import GRADERS, check_grading, open_build_place, open_grading
from ostinato.config import Config
from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, BadRequest, NotFound, OstinatoError, SandboxRefused
from ostinato.core.sandbox import Change, ChangeKind
from ostinato.launch.views.screen import plain, say
from ostinato.worlds.building.config import BuildConfig
from ostinato.worlds.building.runs import BuildPlace
from ostinato.worlds.building.sources import canonical, fetch_sdist
from ostinato.worlds.bursts import ASSUMPTIONS, Burst, Fleet, Packing, simulate
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.harnesses import HARNESSES, is_agent, no_harness
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.rollout.attempt import original_of
from ostinato.worlds.tasks.harbor import load_harbor
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load, save, taskset_of
from ostinato.worlds.unified_diff import patched

if TYPE_CHECKING:
    from ostinato.worlds.building.package_build import PackageYield

# ---------------------------------------------------------------- contents of a taskset


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
        console.print(Text(f"{plain(name)} is not a built-in grader; worlds.graders must name it", "yellow"))
    harnesses = {task.harness for task in taskset.tasks}
    for name in sorted(name for name in harnesses if name not in HARNESSES and not is_agent(name)):
        console.print(Text(no_harness(plain(name)), "yellow"))


def shared_packages(taskset: Taskset) -> list[str]:
    """Return the packages (`about.package`, by canonical name) that have tasks in both splits."""
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


# ---------------------------------------------------------------- tasks from packages


_KINDS = ("removal", "deletion", "bug")


def _check_installed() -> None:
    try:
        import libcst  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise BadConfig("building tasks needs libcst: pip install 'ostinato[worlds]'") from error


async def build_tasks(
    packages: Sequence[str], held_out: Sequence[str], out: Path, cache: Path, config: BuildConfig, console: Console
) -> None:
    """Build tasks, write the taskset, and print each package's yield. Tasks of `held_out` packages serve evaluation only, never training.

    Raises BadConfig if libcst is missing, SandboxRefused if this machine cannot sandbox code, BadRequest if no package is named or none
    gave a task.
    """
    if not packages:
        raise BadRequest("name a package, as in `ostinato worlds build tabulate --out tasks.jsonl`", field="package")
    _check_installed()
    out.parent.mkdir(parents=True, exist_ok=True)
    place = open_build_place(out, cache)
    built: list[PackageYield] = []
    refused: dict[str, str] = {}
    splits: dict[str, Split] = {}
    wanted = [(each, Split.TRAIN) for each in packages] + [(each, Split.HELD_OUT) for each in held_out]
    try:
        await place.backend.isolation()
        columns = ("{task.description}", BarColumn(), "{task.fields[found]} tasks", TimeElapsedColumn())
        with Progress(SpinnerColumn(), *columns, console=console, transient=True) as bar:
            for package, split in wanted:
                try:
                    built.append(await _one(place, config, package, split, splits, bar))
                except SandboxRefused as error:
                    refused[package] = f"it could not be isolated in the sandbox: {error}"
                except OstinatoError as error:
                    refused[package] = str(error)
    finally:
        await place.backend.close()
    tasks = [task for each in built for task in each.tasks]
    console.print(yields_table(built))
    for each in built:
        console.print(Text(f"left out of {plain(each.package)}: {reasons(each)}"))
    for package, why in refused.items():
        console.print(Text(f"refused {plain(package)}: {plain(why)}"))
    if not tasks:
        raise BadRequest("no package gave a task; see the reasons above", field="package")
    taskset = taskset_of(out.stem, tasks)
    save(taskset, out)
    console.print(Text(f"{out}: {len(tasks)} tasks, hash {taskset.hash}"))


async def _one(
    place: BuildPlace, config: BuildConfig, package: str, split: Split, splits: dict[str, Split], bar: Progress
) -> PackageYield:
    """Build one package. `splits`: the splits of the packages so far. Raises BadRequest if this package is already in the other split."""
    line = bar.add_task(plain(package), total=1.0, found=0)

    def progress(what: str, found: int, share: float) -> None:
        bar.update(line, description=f"{plain(package)}: {what}", found=found, completed=share)

    try:
        progress("fetching it", 0, 0.0)
        from ostinato.worlds.building.package_build import PackageBuild  # imported here, since it needs libcst

        build = PackageBuild(place, config, await fetch_sdist(package), package, split)
        if splits.setdefault(canonical(build.tree.name), split) is not split:
            raise BadRequest(
                f"{build.tree.name} is already used for training; name a package for one split only", field="package"
            )
        return await build.run(progress)
    finally:
        bar.remove_task(line)


def yields_table(built: Sequence[PackageYield]) -> Table:
    """Return a table with a row per package: its test suite, its tasks by kind, CPU seconds, tasks per CPU hour."""
    names = ("package", "tests", "suite CPU s", *_KINDS, "CPU s", "an hour")
    table = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for each in built:
        table.add_row(
            Text(plain(f"{each.package} {each.version}")),
            str(len(each.suite.stable)),
            f"{each.suite.cpu:.1f}",
            *(str(each.kinds.get(kind, 0)) for kind in _KINDS),
            f"{each.cpu:.0f}",
            f"{3600 * len(each.tasks) / max(each.cpu, 1e-9):.0f}",
        )
    return table


def reasons(each: PackageYield) -> str:
    """Return why changes of a package were left out, the most frequent reason first."""
    left_out = Counter({why: count for why, count in each.fates.items() if why != "valid" and count > 0})
    return "; ".join(f"{count} {why}" for why, count in left_out.most_common())


# ---------------------------------------------------------------- bursts


def show_burst(
    sandboxes: int, clusters: int, nodes: int, lose_after: float | None, seed: int, console: Console, *, machine: bool
) -> None:
    """Simulate each packing strategy and print a line for it. Raises BadRequest."""
    fleet, burst = Fleet(clusters=clusters, nodes=nodes), Burst(sandboxes=sandboxes, lose_region_at=lose_after)
    found = [simulate(fleet, burst, packing, seed) for packing in Packing]
    if machine:
        said = {"fleet": asdict(fleet), "burst": asdict(burst), "seed": seed, "assumptions": ASSUMPTIONS}
        console.out(json.dumps({**said, "placed": [asdict(each) for each in found]}), highlight=False)
        return
    counts, shares = ("failed", "killed", "lost", "machines"), ("cores", "memory")
    table = Table("packing", "placed", "all after", "p50", "p99", *counts, *shares, "cost", box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for each in found:
        table.add_row(
            each.packing.value,
            f"{each.placed:,}" + (f" ({each.unplaced:,} never)" if each.unplaced else ""),
            *(f"{seconds:.1f} s" for seconds in (each.all_s, each.p50_s, each.p99_s)),
            *(f"{count:,}" for count in (each.failed, each.killed, each.lost, each.machines)),
            *(f"{100 * share:.0f}%" for share in (each.cores, each.memory)),
            f"{each.cost:.2f}",
        )
    console.print(table)
    console.print(Text("A simulation, not a measurement. Assumptions:", "dim"))
    for name, value in {**asdict(fleet), **asdict(burst), "seed": seed}.items():
        console.print(Text(f"  {name} = {value}", "dim"))
    for line in ASSUMPTIONS:
        say(console, f"  {line}", "dim")


# ---------------------------------------------------------------- grading by hand

BY_HAND = "by-hand"
_MOST_FILES = 10_000


async def grade_changes(config: Config, file: Path, task: str, changes: Path, console: Console) -> bool:
    """Grade a solution: a directory with changed files, a unified diff (.patch, .diff), or a text as the last message.

    Returns True if it solves the task. Raises BadConfig, NotFound, and BadRequest for a diff that does not apply.
    """
    tasks = load(file.expanduser())
    found = _task(tasks, task)
    messages, changed = found.messages, tuple[Change, ...]()
    if changes.is_dir():
        changed = changes_in(changes)
    elif changes.suffix in (".patch", ".diff"):
        changed = patched(_text(changes), lambda path: original_of(found.spec, path))
    else:
        messages = (*messages, Message(role=Role.ASSISTANT, text=_text(changes)))
    ended, by = Ended.SUBMITTED, BY_HAND
    rollout = Rollout(task=task, harness=by, ended=ended, messages=messages, turns=(by,), changes=changed)
    async with open_grading(config) as (_, grader):
        with console.status(f"grading {plain(task)}"):
            grade = await grader.grade(found, rollout)
    _show(task, grade, console)
    return grade.solved


def changes_in(directory: Path) -> tuple[Change, ...]:
    """Return every file and symbolic link below a directory as a change. Raises BadRequest for more than 10,000."""
    found: list[Change] = []
    for top, folders, files in os.walk(directory):
        for name in sorted([*files, *(each for each in folders if (Path(top) / each).is_symlink())]):
            path = Path(top) / name
            where = path.relative_to(directory).as_posix()
            if path.is_symlink():
                found.append(Change(path=where, kind=ChangeKind.LINK, data=os.fsencode(path.readlink())))
            elif path.is_file():
                executable = os.access(path, os.X_OK)
                found.append(Change(path=where, kind=ChangeKind.WRITTEN, data=path.read_bytes(), executable=executable))
            if len(found) > _MOST_FILES:
                more = f"more than {_MOST_FILES} files"
                raise BadRequest(f"{directory} holds {more}: name one with the changed files only")
    return tuple(sorted(found, key=lambda change: change.path))


def _show(task: str, grade: Grade, console: Console) -> None:
    verdict = ("solved", "green") if grade.solved else ("cheated", "red") if grade.cheated else ("not solved", "yellow")
    console.print(Text.assemble((plain(task), "bold"), "  ", verdict, f"  value {grade.value:g}"))
    for name, value in grade.parts.items():
        console.print(Text(f"  {plain(name)} {value:g}"))
    for line in grade.why.splitlines():
        say(console, f"  {plain(line)}")
    for what in grade.cheated:
        say(console, f"  cheated: {plain(what)}", "red")


def _task(tasks: Taskset, name: str) -> Task:
    found = next((task for task in tasks.tasks if task.id == name), None)
    if found is None:
        some = ", ".join(task.id for task in tasks.tasks[:5])
        raise NotFound(f"{tasks.name} has no task {name!r}; it has {some}{', ...' if len(tasks.tasks) > 5 else ''}")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise NotFound(f"--changes: there is no file {path}; name a directory, a diff or a text") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"--changes {path} cannot be read: {error}; a diff or a text is a file in UTF-8") from error
