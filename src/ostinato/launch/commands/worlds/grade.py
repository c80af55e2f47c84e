"""`ostinato worlds grade`: grades what somebody wrote for a task, as a rollout is graded."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ostinato.app.worlds import open_grading
from ostinato.config import Config
from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, BadRequest, NotFound
from ostinato.core.lines import lines_of
from ostinato.core.sandbox import Change, ChangeKind
from ostinato.launch.views.screen import plain
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.outcome_files import patched, rollout_of
from ostinato.worlds.rollout.attempt import original_of
from ostinato.worlds.tasks.task import Task, Taskset
from ostinato.worlds.tasks.tasksets import load

BY_HAND = "by-hand"
_MOST_FILES = 10_000


async def grade_rollouts(config: Config, file: Path, rollouts: Path, console: Console) -> bool:
    """Grade trajectories (ATIF; the file holds one, or one per line). True if all are solved. Raises BadConfig, NotFound."""
    tasks = load(file.expanduser())
    text = _text(rollouts)
    try:
        found: list[Any] = [json.loads(text)]
    except ValueError:
        found = [_trajectory(rollouts, number, line) for number, line in enumerate(lines_of(text), 1) if line]
    return await _graded(config, tasks, [rollout_of(each) for each in found], console)


async def grade_changes(config: Config, file: Path, task: str, changes: Path, console: Console) -> bool:
    """Grade a directory with changed files, a unified diff (.patch, .diff), or a text as the last message. True if it is solved.

    Raises BadConfig, NotFound; BadRequest for a diff that does not fit.
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
    rollout = Rollout(
        task=task, harness=BY_HAND, ended=Ended.SUBMITTED, messages=messages, turns=(BY_HAND,), changes=changed
    )
    return await _graded(config, tasks, [rollout], console)


def changes_in(directory: Path) -> tuple[Change, ...]:
    """Every file and link below a directory, as changes. Raises BadRequest for more than 10,000."""
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
                raise BadRequest(
                    f"{directory} holds more than {_MOST_FILES} files: name one with the changed files only"
                )
    return tuple(sorted(found, key=lambda change: change.path))


async def _graded(config: Config, tasks: Taskset, rollouts: Sequence[Rollout], console: Console) -> bool:
    """Grade and print the rollouts one after the other. True if all are solved."""
    if not rollouts:
        raise BadConfig("there is no rollout to grade")
    whole = True
    async with open_grading(config) as (_, grader):
        for rollout in rollouts:
            with console.status(f"grading {plain(rollout.task)}"):
                grade = await grader.grade(_task(tasks, rollout.task), rollout)
            _show(rollout.task, grade, console)
            whole = whole and grade.solved
    return whole


def _show(task: str, grade: Grade, console: Console) -> None:
    verdict = ("solved", "green") if grade.solved else ("cheated", "red") if grade.cheated else ("not solved", "yellow")
    console.print(Text.assemble((plain(task), "bold"), "  ", verdict, f"  value {grade.value:g}"))
    for name, value in grade.parts.items():
        console.print(Text(f"  {plain(name)} {value:g}"))
    for line in grade.why.splitlines():
        console.print(Text(f"  {plain(line)}"), soft_wrap=True)
    for what in grade.cheated:
        console.print(Text(f"  cheated: {plain(what)}", "red"), soft_wrap=True)


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
        raise NotFound(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} cannot be read: {error}") from error


def _trajectory(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise BadConfig(f"{path}, line {number} is not JSON: {error}") from error
