"""Tasksets that come with Ostinato: the demo's functions as tasks of simulated worlds."""

from __future__ import annotations

import ast
from dataclasses import replace

from ostinato.core.conversation import Message, Role
from ostinato.core.sandboxing import SandboxSpec
from ostinato.demo.tasks import MAX_TOKENS, STOP, Blank, load, messages, split
from ostinato.worlds.tasks.task import Grading, Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import taskset_of

SHOWN = 3
"""Asserts of a function's tests that a repair task's check runs; the others stay hidden."""


def function_tasks() -> Taskset:
    """The functions that the demo's users ask for, as training tasks, and those of the held-out families.

    They are asked for as in the demo: the answer continues the function's head, and its hidden tests grade it.
    Example: ``save(function_tasks(), Path("functions.jsonl"))``
    """
    taught, held = split(load())
    tasks = [_task(blank, Split.TRAIN) for blank in taught] + [_task(blank, Split.HELD_OUT) for blank in held]
    return taskset_of("functions", tasks)


def repair_tasks() -> Taskset:
    """The same functions for the harness `repair`: two answers each, and between them a check that runs some of the tests and says what
    fails.
    """
    taught, held = split(load())
    tasks = [_repaired(blank, Split.TRAIN) for blank in taught] + [_repaired(blank, Split.HELD_OUT) for blank in held]
    return taskset_of("repairs", tasks)


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


def _repaired(blank: Blank, part: Split) -> Task:
    spec = SandboxSpec(files={"check.py": check_program(blank).encode()})
    return replace(_task(blank, part), harness="repair", turns=2, spec=spec)


def check_program(blank: Blank) -> str:
    """A program that imports the function from `answer.py`, tries the first `SHOWN` of its asserts, and exits with the message of the
    first failure.
    """
    name = blank.head.split("(")[0].removeprefix("def ").strip()
    shown = [(_call(test, name), ast.unparse(test.test)) for test in _asserts(blank.tests)[:SHOWN]]
    return _CHECK.format(name=name, shown=shown)


_CHECK = """import sys
try:
    from answer import {name}
except BaseException as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
for call, holds in {shown!r}:
    try:
        got = eval(call)
        right = eval(holds)
    except BaseException as error:
        sys.exit(f"{{call}} raises {{type(error).__name__}}: {{error}}")
    if not right:
        sys.exit(f"{{call}} gives {{got!r}}, but it must hold that {{holds}}")
"""


def _asserts(tests: str) -> list[ast.Assert]:
    return [node for node in ast.parse(tests).body if isinstance(node, ast.Assert)]


def _call(test: ast.Assert, name: str) -> str:
    calls = (node for node in ast.walk(test) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return next(ast.unparse(call) for call in calls if isinstance(call.func, ast.Name) and call.func.id == name)
