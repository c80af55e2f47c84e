"""The grader of toy worlds."""

import pytest

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig
from ostinato.worlds.grading.grade import PatternGrader
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.task import Grading, Task


def rollout(*said):
    messages = [Message(role=Role.USER, text="say yes"), *(Message(role=Role.ASSISTANT, text=text) for text in said)]
    return Rollout(task="t", harness="single@h", ended=Ended.SUBMITTED, messages=tuple(messages), turns=("c:0",))


def task(**data):
    return Task(id="t", family="f", messages=(), grading=Grading(grader="pattern", data=data))


@pytest.mark.parametrize(("said", "value"), [(("no", "yes"), 1.0), (("yes", "no"), 0.0), ((), 0.0)])
async def test_the_models_last_message_counts(said, value):
    assert (await PatternGrader().grade(task(pattern="^y"), rollout(*said))).value == value


@pytest.mark.parametrize("data", [{}, {"pattern": "("}])
async def test_a_task_without_a_pattern_cannot_be_graded(data):
    with pytest.raises(BadConfig, match=r"task 't': grading\.data\.pattern"):
        await PatternGrader().grade(task(**data), rollout("yes"))
