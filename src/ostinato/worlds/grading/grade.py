"""The grade of a rollout, the reason for it, and the simplest grader: a pattern that the last message must show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ostinato.core.conversation import Role
from ostinato.core.errors import BadConfig
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A grade: `value` is in [0, 1]; `parts` are its components; `why` is for people; `cheated` names attempts to fake the outcome.

    Example: ``Grade(value=1.0, parts={"fail_to_pass": 1.0, "pass_to_pass": 1.0}, why="2 of 2 and 11 of 11 tests pass")``
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    why: str = ""
    cheated: tuple[str, ...] = ()

    @property
    def solved(self) -> bool:
        """True if the value is 1 and nothing was faked."""
        return self.value >= 1.0 and not self.cheated


class Grader(Protocol):
    """Grades outcomes in sandboxes of its own, never in the one that the model worked in."""

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        """Raises BadConfig for a task that it cannot grade, Unavailable if grading itself failed: a missing grade is not a grade of 0."""
        ...


# ---------------------------------------------------------------- patterns


def read_pattern(task: Task) -> re.Pattern[str]:
    """The task's pattern, compiled. Raises BadConfig."""
    try:
        return re.compile(str(task.grading.data["pattern"]))
    except (KeyError, re.error) as error:
        raise BadConfig(f"task {task.id!r}: grading.data.pattern must be a regular expression: {error}") from error


class PatternGrader:
    """Implements `Grader`: 1 if `grading.data["pattern"]`, a regular expression, is found in the model's last message, else 0."""

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        pattern = read_pattern(task)
        said = [message.text for message in rollout.messages if message.role is Role.ASSISTANT]
        return Grade(value=float(bool(said) and pattern.search(said[-1]) is not None))
