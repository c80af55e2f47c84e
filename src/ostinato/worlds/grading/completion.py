"""Grades a function body that a model wrote by hidden tests, in a sandbox, so that the body cannot forge the verdict.

The demo's simulated users and the evaluation runner call `python_tests` and get 0.0 or 1.0. Each sandbox run has two processes: one runs
the body and only answers calls; the judge runs the tests, holds the nonce and owns stdout. Arguments and results cross a pipe as Python
literals, so printing "ok", `sys.exit(0)`, replacing `__eq__` or walking the stack has no effect: only correct answers pass.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

from ostinato.core.errors import BadConfig, BadRequest
from ostinato.core.sandbox import ExecResult
from ostinato.worlds.grading.grade import Grade, last_answer
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task

BODY_CHARS = 20_000

# The judge. It forks the body's process before it reads the tests and the nonce, so neither is in that process's memory.
_JUDGE = """
import ast, json, os
size, rest = (int(n) for n in os.read(0, 32).split())
def take(n):
    data = b""
    while len(data) < n:
        data += os.read(0, n - len(data))
    return data
source, name = json.loads(take(size))
calls, answers = os.pipe(), os.pipe()
if os.fork() == 0:
    os.dup2(calls[0], 20); os.dup2(answers[1], 21)
    os.closerange(0, 20); os.closerange(22, 256)
    null = os.open("/dev/null", os.O_RDWR); os.dup2(null, 1); os.dup2(null, 2)
    space = {"__name__": "copilot"}
    exec(compile(source, "body.py", "exec"), space)
    lines, function = os.fdopen(20, "rb"), space[name]
    for line in lines:
        result = repr(function(*ast.literal_eval(line.decode()))).encode("ascii", "backslashreplace")
        os.write(21, b"%d\\n" % len(result) + result)
    os._exit(0)
os.close(calls[0]); os.close(answers[1])
replies = os.fdopen(answers[0], "rb")
def ask(*args):
    os.write(calls[1], repr(args).encode("ascii", "backslashreplace") + b"\\n")
    size = int(replies.readline(16))
    assert 0 <= size <= 65536
    return ast.literal_eval(replies.read(size).decode())
tests, nonce = json.loads(take(rest))
exec(compile(tests, "tests.py", "exec"), {name: ask})
print(nonce)
"""


class Runs(Protocol):
    """The part of a sandbox that grading needs."""

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        timeout: float,
    ) -> ExecResult: ...


def truncate_body(text: str) -> str:
    r"""Return the function body at the start of a completion: everything before the first unindented line or closing code fence.

    The inline copilot shows completions by the same rule. Example: ``"    return 1\nprint(f())"`` -> ``"    return 1\n"``.
    """
    kept: list[str] = []
    for line in text.split("\n"):
        if line.strip() and (line[0] not in " \t" or line.lstrip().startswith("```")):
            break
        kept.append(line)
    return "\n".join(kept).rstrip() + "\n" if any(line.strip() for line in kept) else ""


async def python_tests(head: str, body_text: str, tests: str, sandbox: Runs, timeout: float = 4.0) -> float:
    """Return 1.0 if the function `head` + body passes every assert of `tests` within `timeout` seconds, else 0.0.

    `head` is ``def name(args):`` with its docstring, ending in a newline. `body_text` is the completion, which `truncate_body` cuts.
    `tests` is Python source that calls the function with literals and asserts. Raises BadRequest if `head` defines no function,
    SandboxRefused.
    """
    definition = re.match(r"def (\w+)\(", head)
    if definition is None:
        raise BadRequest("head: must start with 'def name('", field="head")
    body = truncate_body(body_text)
    if not body or len(body) > BODY_CHARS:
        return 0.0
    nonce = secrets.token_hex(16)
    first = json.dumps([head + body, definition[1]]).encode()
    second = json.dumps([tests, nonce]).encode()
    sizes = f"{len(first)} {len(second)}".ljust(32).encode()
    result = await sandbox.run(_JUDGE, stdin=sizes + first + second, timeout=timeout)
    return float(result.code == 0 and result.stdout.strip() == nonce.encode())


def read_completion(task: Task) -> tuple[str, str]:
    """Return the function's head and its tests. Raises BadConfig."""
    head, tests = task.grading.data.get("head"), task.grading.data.get("tests")
    if not isinstance(head, str) or re.match(r"def \w+\(", head) is None:
        raise BadConfig(f"task {task.id!r}: grader 'python_tests' needs a 'head' that starts with 'def name('")
    if not isinstance(tests, str) or not tests.strip():
        raise BadConfig(f"task {task.id!r}: grader 'python_tests' needs 'tests', Python source with asserts")
    return head, tests


class CompletionGrader:
    """Implements `Grader` for the copilot's tasks: `Grading.data` has `head` and `tests`; the last message is the completion."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        head, tests = read_completion(task)
        value = await python_tests(head, last_answer(rollout), tests, self._runs, task.grading.timeout_s)
        return Grade(value=value, why="every assert passed" if value else "not every assert passed")
