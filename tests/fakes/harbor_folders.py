"""Writes tasks as folders that Harbor runs: what the reader of Harbor's folders must understand, our own tasks' rows included.

A task that came from a folder is written again as it was. Of our own tasks, only those that a script can verify are written: `pytest`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ostinato.core.conversation import Role
from ostinato.core.errors import BadConfig, StorageFull
from ostinato.worlds.tasks.harbor import CONFIG, INSTRUCTION, OWN
from ostinato.worlds.tasks.places import check_tree
from ostinato.worlds.tasks.rows import check_row, line_of
from ostinato.worlds.tasks.task import Task, Taskset

IMAGE = "python:3.11-slim"


_SCRIPT = """#!/bin/bash
# Every named test must pass, with the hidden files in place.
cp -r /tests/hidden/. {workdir}/ 2>/dev/null
cd {workdir} || exit 1
mkdir -p /logs/verifier
if python -m pytest -q -p no:cacheprovider {tests}; then echo 1; else echo 0; fi > /tmp/reward
tail -n 1 /tmp/reward > /logs/verifier/reward.txt
"""


def save_harbor(taskset: Taskset, directory: Path, *, image: str = IMAGE) -> list[Path]:
    """Write one folder for each task below a directory, which must hold none of them yet. Returns the folders, in the tasks' order.

    Args:
        taskset: the tasks to write.
        directory: the directory to write to.
        image: the base image of our own tasks; it must have what the tasks need, pytest included.

    Raises:
        BadConfig: a task cannot be written (the message names it, and nothing is written); or a folder exists already.
        StorageFull: a folder cannot be written.
    """
    written = [(task, harbor_files(task, image=image)) for task in taskset.tasks]
    folders = [directory / f"{number:05d}-{_slug(task.id)}" for number, (task, _) in enumerate(written)]
    try:
        for folder, (_, files) in zip(folders, written, strict=True):
            folder.mkdir(parents=True)
            for path, data in files.items():
                place = folder / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)
                if path.endswith(".sh"):
                    place.chmod(0o755)
    except FileExistsError as error:
        raise BadConfig(f"{error.filename} is there already; name an empty directory") from error
    except OSError as error:
        raise StorageFull(f"{directory}: {error.strerror}; check the directory") from error
    return folders


def harbor_files(task: Task, *, image: str = IMAGE) -> dict[str, bytes]:
    """A task's folder, path -> bytes. Raises BadConfig if the task cannot be written."""
    harbor = task.grading.data.get("harbor")
    if harbor is not None:
        if not isinstance(harbor, dict) or not all(isinstance(harbor.get(name), str) for name in (CONFIG, INSTRUCTION)):
            raise BadConfig(f"task {task.id!r}: grading.data.harbor must hold {CONFIG} and {INSTRUCTION}")
        files = {name: str(harbor[name]).encode() for name in (CONFIG, INSTRUCTION)} | dict(task.grading.hidden)
    else:
        files = _own_files(task, image)
    check_tree(files)
    return files


def _own_files(task: Task, image: str) -> dict[str, bytes]:
    spec, grading = task.spec, task.grading
    if spec.layers:
        raise BadConfig(
            f"task {task.id!r}: layers cannot be written for Harbor; put what they hold into an image and into files"
        )
    if grading.grader != "pytest":
        raise BadConfig(
            f"task {task.id!r}: grader {grading.grader!r} is no script that Harbor could run; only pytest is"
        )
    named = [*grading.data.get("fail_to_pass", ()), *grading.data.get("pass_to_pass", ())]
    if not named or not all(isinstance(name, str) for name in named):
        raise BadConfig(f"task {task.id!r}: grading.data names no tests, in fail_to_pass and pass_to_pass")
    bare = replace(task, spec=replace(spec, files={}), grading=replace(grading, hidden={}))
    row = line_of(check_row(f"task {task.id!r}", bare, {}))
    tests = " ".join(shlex.quote(name) for name in named)
    docker = f"FROM {image}\nWORKDIR {spec.workdir}\n" + (f"COPY files/ {spec.workdir}/\n" if spec.files else "")
    texts = [message.text for message in task.messages if message.role in (Role.SYSTEM, Role.USER)]
    return {
        CONFIG: _toml(task, row).encode(),
        INSTRUCTION: "\n\n".join(texts).encode(),
        "environment/Dockerfile": docker.encode(),
        **{f"environment/files/{path}": data for path, data in spec.files.items()},
        "tests/test.sh": _SCRIPT.format(workdir=shlex.quote(spec.workdir), tests=tests).encode(),
        **{f"tests/hidden/{path}": data for path, data in grading.hidden.items()},
    }


def _toml(task: Task, row: str) -> str:
    spec = task.spec
    names = sorted({each.rpartition(":")[0] for each in spec.hosts})
    tables: dict[str, Mapping[str, Any]] = {
        "task": {"name": f"ostinato/{_slug(task.id)}"},
        "metadata": {"category": task.family},
        f"metadata.{OWN}": {"row": row},
        "verifier": {"timeout_sec": float(task.grading.timeout_s)},
        "agent": {"timeout_sec": float(task.timeout_s)},
        "environment": {
            "workdir": spec.workdir,
            "memory_mb": spec.limits.memory_mb,
            "storage_mb": spec.limits.disk_mb,
            "network_mode": "allowlist" if names else "no-network",
            **({"allowed_hosts": names} if names else {}),
        },
        "environment.env": spec.env,
    }
    lines = ['schema_version = "1.4"']
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_value(key)} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """A value in TOML. JSON's strings, numbers and lists of strings are valid TOML, except that DEL must be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _slug(id: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", id).strip("-")[:64] or "task"
