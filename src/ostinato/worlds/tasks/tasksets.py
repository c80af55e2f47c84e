r"""Taskset files in our own JSONL format: strict parsing, lossless writing, and a hash of the whole content.

One line is one task::

    {"id": "calc-1", "family": "repair", "messages": [{"role": "user", "content": "Tests fail. Mend calc.py."}], "harness": "tools",
     "turns": 8, "world": {"files": {"calc.py": "def add(a, b):\n    return a - b\n"}, "layers": ["layers/calc"]},
     "grading": {"grader": "pytest", "data": {"fail_to_pass": ["test_calc.py::test_add"]}, "hidden": {"test_calc.py": "..."}}}

A line may also be an evaluation suite's item, the flat form of a held-out task with a single answer::

    {"id": "add-1", "family": "arithmetic", "messages": [{"role": "user", "content": "..."}], "grader": "python_tests",
     "sampling": {"max_tokens": 96, "temperature": 0.8, "stop": ["\ndef"]}, "head": "def add(a, b):", "tests": "..."}

Layers are directories beside or below the file, with names relative to it. Nothing in a file is executed.
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

MAX_TASKSET_BYTES = 512 * 2**20
MAX_LINE_CHARACTERS = 64 * 2**20
MAX_TASKS = 100_000


def taskset_of(name: str, tasks: Sequence[Task]) -> Taskset:
    """Return a named taskset. The tasks are validated as if read from a file, and hashed with the content of their layers.

    Raises BadConfig for no tasks or too many, a duplicate id, a field that a file could not contain, or a layer that is not a directory.
    """
    if not 0 < len(tasks) <= MAX_TASKS:
        raise BadConfig(f"taskset {name!r} has {len(tasks)} tasks; it needs 1 to {MAX_TASKS}")
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
    """Read a task file; the taskset is named after it. `answer_s` and `grading_s` are as in `parse_row`.

    Raises BadConfig if the file is missing, a link, too large or not UTF-8, or a line is invalid; it names the line, the field and the
    remedy.
    """
    data = read_plain(path, MAX_TASKSET_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadConfig(f"taskset file {path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    return parse(path.stem, text, path.parent, answer_s=answer_s, grading_s=grading_s)


def parse(
    name: str, text: str, home: Path, *, answer_s: float = rows.ANSWER_S, grading_s: float = rows.GRADING_S
) -> Taskset:
    """Parse a file's text, one task per line; blank lines are skipped. `home`: the directory of its layers. Raises as `load`."""
    parsed: list[tuple[str, rows.TaskRow]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"taskset {name!r}, line {number}"
            if len(line) > MAX_LINE_CHARACTERS:
                raise BadConfig(f"{where}: longer than {MAX_LINE_CHARACTERS} characters; put large files into a layer")
            parsed.append((where, rows.parse_row(where, line, answer_s=answer_s, grading_s=grading_s)))
    layers: dict[str, Path] = {}
    for where, row in parsed:
        for layer in row.world.layers:
            try:
                layers[layer] = layers.get(layer) or directory_below(home, layer)
            except BadConfig as error:
                raise BadConfig(f"{where}, field 'world.layers': {error}") from error
    return taskset_of(name, [rows.task_of(row, layers) for _, row in parsed])


def save(taskset: Taskset, path: Path, *, mode: int = 0o666) -> None:
    """Write a taskset so that `load` gives the same tasks and the same hash. An existing file is replaced atomically.

    `mode`: the file's permissions. Raises BadConfig if a layer is not beside or below the file or if the taskset's hash is not that of its
    tasks, StorageFull.
    """
    if taskset_of(taskset.name, taskset.tasks).hash != taskset.hash:
        raise BadConfig(f"taskset {taskset.name!r} does not match its hash; make it with taskset_of")
    home = path.parent.resolve()
    layers: dict[str, str] = {}
    for layer in {layer for task in taskset.tasks for layer in task.spec.layers}:
        place = Path(layer).resolve()
        if not place.is_relative_to(home) or place == home:
            raise BadConfig(f"the layer {place} is not below {home}; copy it there, or save the taskset above it")
        layers[layer] = place.relative_to(home).as_posix()
    lines = [rows.line_of(rows.check_row(f"task {task.id!r}", task, layers)) for task in taskset.tasks]
    try:
        write_atomic(path, "".join(f"{line}\n" for line in lines), durable=True, mode=mode)
    except OSError as error:
        raise StorageFull(f"taskset file {path} cannot be written ({error.strerror}); check the directory") from error
