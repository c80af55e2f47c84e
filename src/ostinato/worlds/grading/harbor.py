"""Grades a Harbor task as Harbor does: `tests/test.sh` runs on the outcome and writes a reward to /logs/verifier.

The outcome is put into a fresh sandbox first, so nothing that the model started is still running, and the tests lie in /tests, read-only.
The script runs what the model wrote, though, and trusts it: unlike the other graders, this one cannot tell a forged reward.
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
_PLACE = "/tmp/logs"
_REWARDS = ("reward.txt", "reward.json")
_STEP_S = 30.0
_MOST_CHARS = 65_536


class HarborGrading(BaseModel, frozen=True, extra="forbid"):
    """The schema of a Harbor task's `Grading.data`.

    Example: ``HarborGrading(harbor={}, env={"LEVEL": "2"})``
    """

    harbor: dict[str, str] = Field(default_factory=dict[str, str], description="The folder's own texts, by path.")
    env: dict[str, str] = Field(default_factory=dict[str, str], description="Variables of the tests.")


def read_harbor(task: Task) -> HarborGrading:
    """Parse a Harbor task's `grading.data`. Raises BadConfig, also if there is no `tests/test.sh`."""
    asked = read_data(HarborGrading, task)
    if SCRIPT not in task.grading.hidden:
        raise BadConfig(f"task {task.id!r}: grading.hidden: {SCRIPT} is missing, so nothing says whether it is solved")
    return asked


class HarborGrader:
    """Implements `Grader` for Harbor tasks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        asked = read_harbor(task)
        with tempfile.TemporaryDirectory(prefix="ostinato-harbor-") as place:
            tests, logs = Path(place) / "tests", Path(place) / "logs"
            await asyncio.to_thread(_lay_out, task.grading.hidden, tests, logs)
            spec = replace(task.spec, mounts={**task.spec.mounts, "/tests": str(tests), "/logs": str(logs)})
            sandbox = await self._backend.start(spec)
            try:
                await _put_outcome(sandbox, rollout)
                await sandbox.exec(("mkdir", "-p", *(f"{_PLACE}/{name}" for name in _LOGS)), timeout=_STEP_S)
                ran = await sandbox.exec(("bash", "/tests/test.sh"), env=asked.env, timeout=task.grading.timeout_s)
                for name in _REWARDS:
                    found = await sandbox.exec(("cat", f"{_PLACE}/verifier/{name}"), timeout=_STEP_S)
                    if found.code == 0:
                        return _graded(name, found.stdout.decode(errors="replace")[:_MOST_CHARS])
            finally:
                await asyncio.shield(sandbox.stop())
        return Grade(value=0.0, why=f"{SCRIPT} wrote no reward: {_ended(ran)}")


def _lay_out(hidden: Mapping[str, bytes], tests: Path, logs: Path) -> None:
    """Write the tests, and a directory whose links lead to where a sandbox can write."""
    for path, data in hidden.items():
        if path.startswith("tests/"):
            file = tests / path.removeprefix("tests/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(0o755)
    logs.mkdir()
    for name in _LOGS:
        (logs / name).symlink_to(f"{_PLACE}/{name}")


async def _put_outcome(sandbox: Sandbox, rollout: Rollout) -> None:
    """Make the changes of the rollout. A path that cannot be written, such as one below a file, or for which there is no room, is left
    out.
    """
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
    """The grade that a reward file tells: a number, or an object of numbers, of which "reward" counts, else their mean."""
    try:
        told: Any = json.loads(text) if name.endswith(".json") else float(text)
        parts = (
            {str(key): float(value) for key, value in told.items()}
            if isinstance(told, dict)
            else {"reward": float(told)}
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
    said = (ran.stderr or ran.stdout).decode(errors="replace").strip()[-300:]
    how = f"it was ended ({ran.killed_reason})" if ran.killed_reason else f"it ended with {ran.code}"
    return f"{how}: {said}" if said else how
