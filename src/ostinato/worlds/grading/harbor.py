"""Grades a Harbor task as Harbor does: `tests/test.sh` runs on the outcome and writes a reward to /logs/verifier.

It runs in a fresh sandbox with the outcome, so no process that the model started is alive, and with the tests read-only in /tests. But the
script runs the model's code and trusts it: unlike the other graders, this one cannot detect a forged reward.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from ostinato.core.errors import BadConfig, BadRequest, StorageFull
from ostinato.core.sandbox import ChangeKind, ExecResult
from ostinato.core.seams import Backend, Sandbox
from ostinato.worlds.grading.functions import read_data
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task

SCRIPT = "tests/test.sh"
_LOGS = ("verifier", "agent", "artifacts")
_LOG_ROOT = "/tmp/logs"
_REWARDS = ("reward.txt", "reward.json")
_STEP_S = 30.0
_MOST_CHARS = 65_536


class HarborGrading(BaseModel, frozen=True, extra="forbid"):
    """The schema of a Harbor task's `Grading.data`.

    Example: ``HarborGrading(harbor={}, env={"LEVEL": "2"})``
    """

    harbor: dict[str, str] = Field(
        default_factory=dict[str, str], description="The task folder's own text files, by path."
    )
    env: dict[str, str] = Field(default_factory=dict[str, str], description="Environment variables of the tests.")


def read_harbor(task: Task) -> HarborGrading:
    """Parse a Harbor task's `grading.data`. Raises BadConfig, also if there is no `tests/test.sh`."""
    grading = read_data(HarborGrading, task)
    if SCRIPT not in task.grading.hidden:
        raise BadConfig(f"task {task.id!r}: grading.hidden: {SCRIPT} is missing, so nothing says whether it is solved")
    return grading


class HarborGrader:
    """Implements `Grader` for Harbor tasks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        grading = read_harbor(task)
        with tempfile.TemporaryDirectory(prefix="ostinato-harbor-") as place:
            tests, logs = Path(place) / "tests", Path(place) / "logs"
            await asyncio.to_thread(_lay_out, task.grading.hidden, tests, logs)
            spec = replace(task.spec, mounts={**task.spec.mounts, "/tests": str(tests), "/logs": str(logs)})
            sandbox = await self._backend.start(spec)
            try:
                await _put_outcome(sandbox, rollout)
                await sandbox.exec(("mkdir", "-p", *(f"{_LOG_ROOT}/{name}" for name in _LOGS)), timeout=_STEP_S)
                ran = await sandbox.exec(("bash", "/tests/test.sh"), env=grading.env, timeout=task.grading.timeout_s)
                for name in _REWARDS:
                    read = await sandbox.exec(("cat", f"{_LOG_ROOT}/verifier/{name}"), timeout=_STEP_S)
                    if read.code == 0:
                        return _graded(name, read.stdout.decode(errors="replace")[:_MOST_CHARS])
            finally:
                await asyncio.shield(sandbox.stop())
        return Grade(value=0.0, why=f"{SCRIPT} wrote no reward: {_ended(ran)}")


def _lay_out(hidden: Mapping[str, bytes], tests: Path, logs: Path) -> None:
    """Write the tests, and a /logs directory of symbolic links to a place that is writable in the sandbox."""
    for path, data in hidden.items():
        if path.startswith("tests/"):
            file = tests / path.removeprefix("tests/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(0o755)
    logs.mkdir()
    for name in _LOGS:
        (logs / name).symlink_to(f"{_LOG_ROOT}/{name}")


async def _put_outcome(sandbox: Sandbox, rollout: Rollout) -> None:
    """Apply the rollout's changes. A path that cannot be written, because a parent is a file or the disk is full, is left out."""
    for change in rollout.changes:
        match change.kind:
            case ChangeKind.WRITTEN:
                try:
                    await sandbox.write(change.path, change.data)
                except (BadRequest, StorageFull):  # StorageFull: of the sandbox's disk
                    continue
                if change.executable:
                    await sandbox.exec(("chmod", "+x", "--", change.path), timeout=_STEP_S)
            case ChangeKind.DELETED:
                await sandbox.exec(("rm", "-rf", "--", change.path), timeout=_STEP_S)
            case ChangeKind.LINK:
                target = change.data.decode(errors="surrogateescape")
                await sandbox.exec(("ln", "-sfn", "--", target, change.path), timeout=_STEP_S)
            case ChangeKind.OTHER:
                pass


def _graded(name: str, text: str) -> Grade:
    """Return the grade in a reward file, which holds a number, or an object of numbers: its "reward", or their mean if it has none."""
    try:
        content: Any = json.loads(text) if name.endswith(".json") else float(text)
        parts = (
            {str(key): float(value) for key, value in content.items()}
            if isinstance(content, dict)
            else {"reward": float(content)}
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        parts = dict[str, float]()
    if not parts or not all(map(math.isfinite, parts.values())):
        return Grade(value=0.0, why=f"{name} holds no reward: {text[:80]!r}")
    reward = parts.get("reward", sum(parts.values()) / len(parts))
    value = min(1.0, max(0.0, reward))
    cut = "" if value == reward else f", cut to {value:g}"
    return Grade(value=value, parts=parts, why=f"{name} says {reward:g}{cut}")


def _ended(ran: ExecResult) -> str:
    output = (ran.stderr or ran.stdout).decode(errors="replace").strip()[-300:]
    how = f"it was killed ({ran.killed_reason})" if ran.killed_reason else f"it ended with {ran.code}"
    return f"{how}: {output}" if output else how
