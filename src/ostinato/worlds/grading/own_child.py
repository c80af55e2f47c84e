"""The process that runs a grader of the operator's own: outcomes in, grades out, one line of JSON each, many at a time.

Started by `own.py`, which kills it and all processes that it started when a grade is late. A plain function runs on a thread of its own for
each outcome, an async one in the event loop of this process.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, BinaryIO

from ostinato.core.child_process import read_until_end, take_over
from ostinato.core.errors import BadConfig
from ostinato.core.named_function import find_function
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.grading.own import READY, ROUNDING, answer_line, read_question
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task


def main() -> None:
    """Load the function that the first line names, then grade until the input ends."""
    questions, answers = take_over()
    hello = json.loads(questions.readline())
    sys.path[:] = hello["path"]
    if hello["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (hello["memory_bytes"], hello["memory_bytes"]))
    try:
        function = find_function(hello["key"], hello["name"])
    except BaseException as error:  # noqa: BLE001 - an import may raise anything, SystemExit too
        why = str(error) if isinstance(error, BadConfig) else f"importing it raised {type(error).__name__}: {error}"
        answers.write(json.dumps(why).encode() + b"\n")
        sys.exit(0)
    answers.write(READY)
    asyncio.run(_serve(function, questions, answers))


async def _serve(function: Callable[..., Any], questions: BinaryIO, answers: BinaryIO) -> None:
    loop, this = asyncio.get_running_loop(), os.getpid()
    tasks = set[asyncio.Task[None]]()

    async def answer(line: bytes) -> None:
        number, task, rollout = read_question(line)
        told = await _graded(function, task, rollout)
        if os.getpid() != this:
            os._exit(0)  # the function forked: the copy's answer would be a second one
        try:
            line = answer_line(number, *told)
        except (TypeError, ValueError) as error:  # a grade of things that are no JSON
            line = answer_line(number, "unusable", f"{told[1]!r} ({error})")
        answers.write(line)

    def begin(line: bytes) -> None:
        task = loop.create_task(answer(line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def take(line: bytes) -> None:
        loop.call_soon_threadsafe(begin, line)

    threading.Thread(target=read_until_end, args=(questions, take), daemon=True).start()
    await asyncio.Event().wait()


async def _graded(function: Callable[..., Any], task: Task, rollout: Rollout) -> tuple[str, Any]:
    """What kind of answer the function gave, and the answer: a grade, what it raised, or what is no grade."""
    try:
        if inspect.iscoroutinefunction(function):
            found = await function(task, rollout)
        else:
            found = await _on_a_thread(lambda: function(task, rollout))
            found = await found if inspect.isawaitable(found) else found
    except BaseException as error:  # noqa: BLE001 - the function may raise anything
        return "raised", f"{type(error).__name__}: {error}"
    grade = found if isinstance(found, Grade) else None
    given: Any = found if grade is None else grade.value
    try:
        value = -1.0 if isinstance(given, str | bytes) else float(given)  # numpy's numbers count, too
    except (TypeError, ValueError):
        value = -1.0
    if not -ROUNDING <= value <= 1.0 + ROUNDING:
        return "unusable", repr(found)
    if grade is None:
        return "grade", Grade(value=min(1.0, max(0.0, value)))
    return "grade", replace(grade, value=value, parts={str(name): float(part) for name, part in grade.parts.items()})


async def _on_a_thread(call: Callable[[], Any]) -> Any:
    """What a call gave, on a daemon thread of its own, so that one that waits holds up no other. Raises what it raised."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def run() -> None:
        value, failed = None, None
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            failed = error
        loop.call_soon_threadsafe(result.set_result, (value, failed))

    threading.Thread(target=run, name="grader", daemon=True).start()
    value, failed = await result
    if failed is not None:
        raise failed
    return value


if __name__ == "__main__":
    main()
