"""Custom graders: the operator's own Python functions. ``grade(task, rollout)`` returns a number from 0 to 1, or a `Grade`.

Each runs in a child process, so that a function that hangs, exits or prints affects only the grades that it was asked for. The module is
also imported in this process, to report errors at startup and to hash the function's source. The child process runs this module: it reads
outcomes and writes grades, one JSON line each, many concurrently. When a grade is late, the child is killed with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, BinaryIO

from blake3 import blake3
from pydantic import ConfigDict, TypeAdapter

from ostinato.core.child_process import ChildProcess, read_until_end, take_over
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.named_function import find_function
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task

ROUNDING = 1e-9
"""Tolerance beyond [0, 1] for the rounding errors of a grade."""
LOAD_S = 60.0
"""Timeout of the import of a grader's module in its process."""
LONGEST_LINE = 1 << 22  # bytes of a response
LONGEST_TEXT = 500  # characters of the error that a function raised, or of the invalid value that it returned

# ---------------------------------------------------------------- wire format


READY = b'"Ready"\n'

_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")
_question = TypeAdapter(tuple[int, Task, Rollout], config=_config)
_grade = TypeAdapter(tuple[Grade], config=_config)


def answer_line(number: int, kind: str, told: Any) -> bytes:
    """Return the response to request `number` as a line. `kind` is "grade", "raised" (an error) or "unusable" (an invalid return value)."""
    if kind == "grade":
        told = _grade.dump_python((told,), mode="json")[0]
    elif len(told) > LONGEST_TEXT:
        told = f"{told[:LONGEST_TEXT]}..."
    return json.dumps([number, kind, told]).encode() + b"\n"


# ---------------------------------------------------------------- the child process, seen from its parent


class _GradingProcess:
    """A child process that has loaded the function, and the requests that it has not answered yet."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.ended = self._retired = False

    async def ask(self, task: Task, rollout: Rollout) -> tuple[str, Any]:
        """Send a request. Returns the kind of the response, and its content. Raises Unavailable."""
        if self.ended:
            raise Unavailable(f"its process ended ({self._child.process.returncode})")
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            await self._child.send([_question.dump_json((number, task, rollout)) + b"\n"])
            return await answer
        finally:
            del self._pending[number]
            await self._close_if_done()

    async def retire(self) -> None:
        """Kill the child once its pending requests are done. No more requests may be sent."""
        self._retired = True
        await self._close_if_done()

    async def _close_if_done(self) -> None:
        if self._retired and not self._pending and not self.ended:
            await self.close()

    async def close(self) -> None:
        """Kill the child and all that it started. Idempotent."""
        self.ended = True
        self._reading.cancel()
        await self._child.kill()

    async def _read(self) -> None:
        with contextlib.suppress(ValueError, TypeError):  # an invalid or overlong line ends the child
            while line := await self._child.answers.readline():
                number, kind, told = json.loads(line)
                answer = self._pending.get(number)
                if answer is not None and not answer.done():
                    answer.set_result((kind, told))
        self.ended = True
        await self._child.kill()
        why = Unavailable(f"its process ended ({self._child.process.returncode})")
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(why)


# ---------------------------------------------------------------- the grader


class OwnGrader:
    """Implements `Grader` by a function, plain or async, with the task's `grading.timeout_s` for each outcome.

    Each call of a plain function runs on its own thread, so that a call that waits does not block the others. When a grade is late, the
    child process gets no more requests and is killed once its other pending requests are done. An error that the function raises, a
    timeout, and the end of the child process are Unavailable: a missing grade is not a grade of 0. `identity` is the setting's value with
    a hash of the function's source.

    `key` is the setting, and `name` its value, "module:function". Beyond `memory_bytes` of private memory (None: no limit) the function
    gets a MemoryError.
    """

    def __init__(self, key: str, name: str, function: Callable[..., Any], memory_bytes: int | None = None) -> None:
        self._key, self._name, self._memory_bytes = key, name, memory_bytes
        self.identity = f"{name}@{blake3(_source(function)).hexdigest()[:16]}"
        self._starting = asyncio.Lock()
        self._process: _GradingProcess | None = None

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        where = f"task {task.id!r}: the grader of {self._key}"
        process = await self._running(where)
        try:
            async with asyncio.timeout(task.grading.timeout_s):
                kind, told = await process.ask(task, rollout)
        except TimeoutError as error:
            if self._process is process:
                self._process = None
            await process.retire()
            why = f"{where} gave no grade in {task.grading.timeout_s:g} s (grading.timeout_s)"
            raise Unavailable(why) from error
        except Unavailable as error:
            raise Unavailable(f"{where}: {error}") from error
        if kind == "raised":
            raise Unavailable(f"{where} raised {told}")
        if kind != "grade":
            raise BadConfig(f"{where} gave {told}; it must give a number from 0 to 1, or a Grade of one")
        return _grade.validate_python((told,))[0]

    async def close(self) -> None:
        """Kill the child process, if there is one. Idempotent. `grade` may be called again afterwards."""
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    async def _running(self, where: str) -> _GradingProcess:
        """Return the child process, started if there is none. Raises Unavailable."""
        async with self._starting:
            if self._process is None or self._process.ended:
                child = await ChildProcess.start("ostinato.worlds.grading.own", longest_line=LONGEST_LINE)
                hello = {"key": self._key, "name": self._name, "path": sys.path, "memory_bytes": self._memory_bytes}
                try:
                    async with asyncio.timeout(LOAD_S):
                        await child.send([json.dumps(hello).encode() + b"\n"])
                        line = await child.answers.readline()
                except BaseException as error:
                    await child.kill()
                    if isinstance(error, TimeoutError):
                        raise Unavailable(f"{where}: the import of its module took more than {LOAD_S:g} s") from error
                    raise
                if line != READY:
                    await child.kill()
                    why = json.loads(line) if line else f"its process ended ({child.process.returncode})"
                    raise Unavailable(f"{where}: {why}")
                self._process = _GradingProcess(child)
            return self._process


def _source(function: Callable[..., Any]) -> bytes:
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):  # not written in Python, or a callable object
        return b""


def own_graders(
    names: Mapping[str, str], built_in: tuple[str, ...], memory_bytes: int | None = None
) -> dict[str, OwnGrader]:
    """Return the graders that `worlds.graders` names. Raises BadConfig for the name of a built-in grader, or for a missing function."""
    for name in names:
        if name in built_in:
            raise BadConfig(f"worlds.graders.{name}: a built-in grader has this name; choose another")
    keys = {name: f"worlds.graders.{name}" for name in names}
    return {
        name: OwnGrader(keys[name], place, find_function(keys[name], place), memory_bytes)
        for name, place in names.items()
    }


# ---------------------------------------------------------------- inside the child process


def main() -> None:
    """Load the function that the first line names, then grade until the input ends."""
    questions, answers = take_over()
    hello = json.loads(questions.readline())
    sys.path[:] = hello["path"]
    if hello["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (hello["memory_bytes"], hello["memory_bytes"]))
    try:
        function = find_function(hello["key"], hello["name"])
    except BaseException as error:  # noqa: BLE001 - an import may raise anything, also SystemExit
        why = str(error) if isinstance(error, BadConfig) else f"importing it raised {type(error).__name__}: {error}"
        answers.write(json.dumps(why).encode() + b"\n")
        sys.exit(0)
    answers.write(READY)
    asyncio.run(_serve(function, questions, answers))


async def _serve(function: Callable[..., Any], questions: BinaryIO, answers: BinaryIO) -> None:
    loop, this = asyncio.get_running_loop(), os.getpid()
    tasks = set[asyncio.Task[None]]()

    async def answer(line: bytes) -> None:
        number, task, rollout = _question.validate_json(line)
        graded = await _graded(function, task, rollout)
        if os.getpid() != this:
            os._exit(0)  # the function forked, and the forked copy must not answer a second time
        try:
            line = answer_line(number, *graded)
        except (TypeError, ValueError) as error:  # a grade that cannot be written as JSON
            line = answer_line(number, "unusable", f"{graded[1]!r} ({error})")
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
    """Call the function. Returns the kind and the content of the response: a grade, an error, or an invalid return value."""
    try:
        if inspect.iscoroutinefunction(function):
            result = await function(task, rollout)
        else:
            result = await _on_a_thread(lambda: function(task, rollout))
            result = await result if inspect.isawaitable(result) else result
    except BaseException as error:  # noqa: BLE001 - the function may raise anything
        return "raised", f"{type(error).__name__}: {error}"
    grade = result if isinstance(result, Grade) else None
    number: Any = result if grade is None else grade.value
    try:
        value = -1.0 if isinstance(number, str | bytes) else float(number)  # accepts numpy's numbers
        parts = {str(name): float(part) for name, part in grade.parts.items()} if grade is not None else {}
    except (TypeError, ValueError, AttributeError, OverflowError):
        value, parts = -1.0, {}
    if not -ROUNDING <= value <= 1.0 + ROUNDING:
        return "unusable", repr(result)
    return "grade", replace(grade or Grade(value=value), value=min(1.0, max(0.0, value)), parts=parts)


async def _on_a_thread(call: Callable[[], Any]) -> Any:
    """Run a call on a new daemon thread, so that a call that waits does not block others. Returns or raises what it does."""
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
