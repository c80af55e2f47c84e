"""The grade of a rollout, the `Grader` protocol, and two graders of text: a regular expression, and a suggestion that may be withheld."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import regex

from ostinato.core.conversation import Role
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A grade: `value` in [0, 1]; `parts`, its components; `why`, an explanation for people; `cheated`, attempts to fake the outcome;
    `verified`, the value before a judge or the cost of effort changed it (None: neither did).

    Example: ``Grade(value=1.0, parts={"fail_to_pass": 1.0, "pass_to_pass": 1.0}, why="2 of 2 and 11 of 11 tests pass")``
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    why: str = ""
    cheated: tuple[str, ...] = ()
    verified: float | None = None

    @property
    def solved(self) -> bool:
        """True if the value, before judges and the cost of effort, is 1 and nothing was faked."""
        return (self.value if self.verified is None else self.verified) >= 1.0 and not self.cheated


class Grader(Protocol):
    """Grades outcomes in its own sandboxes, never in the one that the model worked in."""

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        """Grade an outcome. Raises BadConfig for a task that it cannot grade, Unavailable if grading itself failed: a missing grade is not
        a grade of 0.
        """
        ...


# ---------------------------------------------------------------- graders of text


MAX_PATTERN = 1_000
MAX_TEXT = 20_000


def last_answer(rollout: Rollout) -> str:
    """Return the text of the model's last message, or "" if there is none."""
    texts = [message.text for message in rollout.messages if message.role is Role.ASSISTANT]
    return texts[-1] if texts else ""


def read_pattern(task: Task) -> regex.Pattern[str]:
    """Return the task's pattern, compiled. Raises BadConfig."""
    pattern = task.grading.data.get("pattern")
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
        raise BadConfig(f"task {task.id!r}: grader 'pattern' needs a string 'pattern' of 1 to {MAX_PATTERN} characters")
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise BadConfig(f"task {task.id!r}: pattern {pattern!r} is not a regular expression: {error}") from error


class PatternGrader:
    """Implements `Grader`: 1 if `grading.data["pattern"]`, a regular expression, matches within the last message's first 20,000 characters.

    The search runs on a thread without the GIL, for at most `grading.timeout_s`; after that, Unavailable is raised.
    """

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        search, longest = read_pattern(task).search, task.grading.timeout_s
        try:
            found = await asyncio.to_thread(search, last_answer(rollout)[:MAX_TEXT], concurrent=True, timeout=longest)
        except TimeoutError as error:
            raise Unavailable(
                f"task {task.id!r}: the pattern searched an answer for {longest:g} s (grading.timeout_s); "
                "write it without nested repetitions"
            ) from error
        return Grade(value=float(found is not None))


def read_suggestion(task: Task) -> tuple[str, str, float]:
    """Return the task's `meant`, `nothing` and `t`. Raises BadConfig."""
    meant, nothing, t = (task.grading.data.get(name) for name in ("meant", "nothing", "t"))
    if not (isinstance(meant, str) and isinstance(nothing, str) and isinstance(t, float) and 0.0 < t < 1.0):
        raise BadConfig(
            f"task {task.id!r}: grader 'suggestion' needs the strings 'meant' and 'nothing' and a 't' between 0 and 1"
        )
    return meant, nothing, t


class SuggestionGrader:
    """Implements `Grader`: 1 if the last message is `meant`, `t` if it is empty or `nothing` (no suggestion), and 0 for anything else.

    This is the reward of `ostinato.reward.functions.tab` plus t, so a policy's mean score is its mean reward plus t.
    """

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        meant, nothing, t = read_suggestion(task)
        answer = last_answer(rollout).strip()
        return Grade(value=t if answer in ("", nothing) else float(answer == meant))
