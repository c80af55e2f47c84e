"""Tasksets that come with Ostinato: the demo's functions as tasks of simulated worlds."""

from __future__ import annotations

from ostinato.core.conversation import Message, Role
from ostinato.demo.tasks import MAX_TOKENS, STOP, Blank, load, messages, split
from ostinato.worlds.tasks.task import Grading, Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import taskset_of


def function_tasks() -> Taskset:
    """The functions that the demo's users ask for, as training tasks, and those of the held-out families.

    They are asked for as in the demo: the answer continues the function's head, and its hidden tests grade it.
    Example: ``save(function_tasks(), Path("functions.jsonl"))``
    """
    taught, held = split(load())
    tasks = [_task(blank, Split.TRAIN) for blank in taught] + [_task(blank, Split.HELD_OUT) for blank in held]
    return taskset_of("functions", tasks)


def _task(blank: Blank, part: Split) -> Task:
    return Task(
        id=blank.id,
        family=blank.family,
        messages=tuple(Message(role=Role(each["role"]), text=each["content"]) for each in messages(blank)),
        grading=Grading(grader="python_tests", data={"head": blank.head, "tests": blank.tests}, timeout_s=4.0),
        split=part,
        tokens=MAX_TOKENS,
        stop=STOP,
        timeout_s=120.0,
    )
