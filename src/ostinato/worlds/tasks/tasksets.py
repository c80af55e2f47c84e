r"""Tasksets as files in our own format (JSONL): read strictly, written so that reading gives the same taskset again, hashed as a whole.

One line is one task::

    {"id": "calc-1", "family": "repair", "messages": [{"role": "user", "content": "Tests fail. Mend calc.py."}], "harness": "tools",
     "turns": 8, "world": {"files": {"calc.py": "def add(a, b):\n    return a - b\n"}, "layers": ["layers/calc"]},
     "grading": {"grader": "pytest", "data": {"fail_to_pass": ["test_calc.py::test_add"]}, "hidden": {"test_calc.py": "..."}}}

A line may also be a suite's item, the flat form of a held-out task of one answer::

    {"id": "add-1", "family": "arithmetic", "messages": [{"role": "user", "content": "..."}], "grader": "python_tests",
     "sampling": {"max_tokens": 96, "temperature": 0.8, "stop": ["\ndef"]}, "head": "def add(a, b):", "tests": "..."}

Layers are directories named relative to the file, and lie beside or below it. Nothing that is read is executed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from ostinato.core.errors import BadConfig, StorageFull
from ostinato.core.files import write_atomic
from ostinato.worlds.tasks import rows
from ostinato.worlds.tasks.places import directory_below, read_plain, read_tree
from ostinato.worlds.tasks.task import Task, Taskset

MOST_TASKSET_BYTES = 512 * 2**20
MOST_LINE_CHARACTERS = 64 * 2**20
MOST_TASKS = 100_000


def taskset_of(name: str, tasks: Sequence[Task]) -> Taskset:
    """Tasks under a name, checked as if they were read from a file, and hashed with the content of their layers.

    Raises BadConfig for no tasks or too many, a duplicate id, a field that no file could hold, or a layer that is not a directory.
    """
    if not 0 < len(tasks) <= MOST_TASKS:
        raise BadConfig(f"taskset {name!r} has {len(tasks)} tasks; it needs 1 to {MOST_TASKS}")
    trees: dict[str, str] = {}
    for layer in {layer for task in tasks for layer in task.spec.layers}:
        trees[layer] = f"tree/{read_tree(Path(layer)).hash}"
    seen: set[str] = set()
    digest = blake3()
    for task in tasks:
        if task.id in seen:
            raise BadConfig(f"taskset {name!r}: the id {task.id!r} occurs twice; ids must be unique")
        seen.add(task.id)
        row = rows.check_row(f"taskset {name!r}, task {task.id!r}", task, trees)
        digest.update(json.dumps(rows.hashed_fields(row), sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return Taskset(name=name, hash=digest.hexdigest(), tasks=tuple(tasks))


def load(path: Path, *, answer_s: float = rows.ANSWER_S, grading_s: float = rows.GRADING_S) -> Taskset:
    """Read a task file; the taskset is named after it. `answer_s` and `grading_s` are as `parse_row` has them.

    Raises BadConfig if the file is missing, a link, too large or not UTF-8, or a line is wrong: names the line, the field, the remedy.
    """
    data = read_plain(path, MOST_TASKSET_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadConfig(f"taskset file {path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    return parse(path.stem, text, path.parent, answer_s=answer_s, grading_s=grading_s)


def parse(
    name: str, text: str, home: Path, *, answer_s: float = rows.ANSWER_S, grading_s: float = rows.GRADING_S
) -> Taskset:
    """The taskset in a file's text, one task a line; blank lines are skipped. `home` is where its layers lie. Raises as `load`."""
    found: list[tuple[str, rows.TaskRow]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"taskset {name!r}, line {number}"
            if len(line) > MOST_LINE_CHARACTERS:
                raise BadConfig(f"{where}: longer than {MOST_LINE_CHARACTERS} characters; put large files into a layer")
            found.append((where, rows.parse_row(where, line, answer_s=answer_s, grading_s=grading_s)))
    layers: dict[str, Path] = {}
    for where, row in found:
        for layer in row.world.layers:
            try:
                layers[layer] = layers.get(layer) or directory_below(home, layer)
            except BadConfig as error:
                raise BadConfig(f"{where}, field 'world.layers': {error}") from error
    return taskset_of(name, [rows.task_of(row, layers) for _, row in found])


def save(taskset: Taskset, path: Path, *, mode: int = 0o666) -> None:
    """Write a taskset so that `load` gives the same tasks and the same hash; an older file is replaced atomically. `mode`: the file's.

    Raises BadConfig if a layer does not lie beside or below the file or the taskset's hash is not that of its tasks, StorageFull.
    """
    if taskset_of(taskset.name, taskset.tasks).hash != taskset.hash:
        raise BadConfig(f"taskset {taskset.name!r} is not what its hash says; make it with taskset_of")
    home = path.parent.resolve()
    layers: dict[str, str] = {}
    for layer in {layer for task in taskset.tasks for layer in task.spec.layers}:
        place = Path(layer).resolve()
        if not place.is_relative_to(home) or place == home:
            raise BadConfig(f"the layer {place} does not lie below {home}; copy it there, or save the taskset above it")
        layers[layer] = place.relative_to(home).as_posix()
    lines = [rows.line_of(rows.check_row(f"task {task.id!r}", task, layers)) for task in taskset.tasks]
    try:
        write_atomic(path, "".join(f"{line}\n" for line in lines), durable=True, mode=mode)
    except OSError as error:
        raise StorageFull(f"taskset file {path} cannot be written ({error.strerror}); check the directory") from error
