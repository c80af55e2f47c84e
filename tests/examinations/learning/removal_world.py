"""Functions of real packages with their bodies removed: the model looks, writes the body with a tool, and the package's own tests decide.

The tasks are those of `ostinato worlds build` whose body is short. Each package is a family here, and is either taught or held out.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.examinations.learning.demonstrating import Say, call_of, demonstrated

from ostinato.core.conversation import Message
from ostinato.core.seams import Backend
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load, taskset_of

HARNESS = {
    "offered": ["bash", "edit", "submit"],
    "prompt": "Look at the function, write its body, then submit.",
    "output_chars": 1200,
}
BODY_LINES, TURNS, TOKENS = 6, 4, 192


@dataclass(frozen=True, slots=True)
class _Body:
    """The removed body and its file: `missing` is the line in its place."""

    path: str
    missing: str
    lines: tuple[str, ...]


def removal_tasks(file: Path) -> Taskset:
    """A taskset file's tasks with short bodies, about half of the packages held out. Their layers are in the file's directory."""
    kept = [
        replace(
            task,
            family=task.about["package"],
            split=Split.HELD_OUT if hashlib.sha256(task.about["package"].encode()).digest()[0] % 2 else Split.TRAIN,
            turns=TURNS,
            tokens=TOKENS,
            timeout_s=180.0,
        )
        for task in load(file).tasks
        if task.family == "package.removal" and (body := _body(task)) and len(body.lines) <= BODY_LINES
    ]
    return taskset_of("removals", kept)


async def demonstrations(backend: Backend, tasks: Taskset) -> list[str]:
    """A line for `ostinato train --demonstrations` for each taught task."""
    taught = [task for task in tasks.tasks if task.split is Split.TRAIN]
    return [await demonstrated(backend, task, HARNESS, _mends(task)) for task in taught]


def _mends(task: Task) -> Say:
    """A script that looks at the function, inserts the body and submits."""
    body = _body(task)
    assert body is not None
    name = task.about["function"].rpartition("::")[2].rpartition(".")[2]
    steps = (
        call_of("bash", command=f"grep -n -A 16 'def {name}' {body.path}"),
        call_of("edit", path=body.path, old=body.missing, new="\n".join(body.lines)),
        call_of("submit"),
    )

    def say(messages: Sequence[Message]) -> Message:
        return steps[sum(bool(message.calls) for message in messages)]

    return say


def _body(task: Task) -> _Body | None:
    """The removed body, or None if more than one body was removed or the line in its place occurs elsewhere too."""
    solution = task.grading.data["solution"]
    if len(solution) != 1:
        return None
    ((path, text),) = solution.items()
    before = task.spec.files[path].decode()
    changed = list(difflib.unified_diff(before.split("\n"), text.split("\n"), lineterm="", n=0))[2:]
    gone, come = ([line[1:] for line in changed if line.startswith(sign)] for sign in "-+")
    if len(gone) != 1 or before.count(gone[0]) != 1:
        return None
    return _Body(path, gone[0], tuple(come))
