"""The demo's functions as tasks of the harness `repair`: two answers each, and between them a check that says what fails."""

import ast
from dataclasses import replace

from ostinato.app.worlds import function_tasks
from ostinato.core.sandbox import SandboxSpec
from ostinato.demo.tasks import Blank, load
from ostinato.worlds.tasks.task import Taskset
from ostinato.worlds.tasks.tasksets import taskset_of

SHOWN = 3
"""Asserts of a function's tests that the check runs; the others stay hidden."""


def repair_tasks() -> Taskset:
    """The functions, each with a check that runs some of its tests."""
    specs = {blank.id: SandboxSpec(files={"check.py": check_program(blank).encode()}) for blank in load()}
    tasks = [replace(task, harness="repair", turns=2, spec=specs[task.id]) for task in function_tasks().tasks]
    return taskset_of("repairs", tasks)


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
