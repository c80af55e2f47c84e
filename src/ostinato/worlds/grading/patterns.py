"""Grades the last message by a pattern, for toy worlds in which the text shows whether the task is done."""

from __future__ import annotations

import re

from ostinato.core.conversation import Role
from ostinato.core.errors import BadConfig
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task


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
