"""Graders of the operator's own, as Python functions: ``grade(task, rollout)`` gives a number from 0 to 1, or a `Grade`."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from blake3 import blake3

from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.named_function import find_function
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task

_ROUNDING = 1e-9  # by which a sum of shares may miss 0 or 1
_MOST_STUCK = 32


class OwnGrader:
    """Implements `Grader` by a function, plain or async, which has the task's `grading.timeout_s` for one outcome.

    A plain function runs on a thread of its own, so that one that waits holds up no other; one that computes shares the interpreter, and
    one that never ends keeps its thread. What it raises, and no answer in time, is Unavailable: a missing grade is not a grade of 0.
    `identity` is the setting's value and a hash of the function's source.

    Example: ``await OwnGrader("worlds.graders.brevity", "yours:brevity", brevity).grade(task, rollout)``
    """

    def __init__(self, key: str, name: str, function: Callable[[Task, Rollout], Any]) -> None:
        self._key, self._function = key, function
        self.identity = f"{name}@{blake3(_source(function)).hexdigest()[:16]}"
        self._stuck = 0

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        where = f"task {task.id!r}: the grader of {self._key}"
        if self._stuck >= _MOST_STUCK:
            raise Unavailable(f"{where} has {self._stuck} calls that do not end; mend it and start again")
        time = asyncio.timeout(task.grading.timeout_s)
        try:
            async with time:
                found = await self._called(task, rollout)
        except Exception as error:
            if isinstance(error, TimeoutError) and time.expired():
                raise Unavailable(
                    f"{where} gave no grade in {task.grading.timeout_s:g} s (grading.timeout_s)"
                ) from error
            raise Unavailable(f"{where} raised {type(error).__name__}: {error}") from error
        grade = found if isinstance(found, Grade) else None
        given: Any = found if grade is None else grade.value
        try:
            value = -1.0 if isinstance(given, str | bytes) else float(given)  # numpy's numbers count, too
        except (TypeError, ValueError):
            value = -1.0
        if not -_ROUNDING <= value <= 1.0 + _ROUNDING:
            raise BadConfig(f"{where} gave {found!r}; it must give a number from 0 to 1, or a Grade of one")
        return grade or Grade(value=min(1.0, max(0.0, value)))

    async def _called(self, task: Task, rollout: Rollout) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(task, rollout)
        self._stuck += 1
        found, error = await _on_a_thread(lambda: self._function(task, rollout), self._ended)
        if error is not None:
            raise error
        return await found if inspect.isawaitable(found) else found

    def _ended(self) -> None:
        self._stuck -= 1


async def _on_a_thread(call: Callable[[], Any], ended: Callable[[], None]) -> tuple[Any, Exception | None]:
    """What a call gave or raised, on a daemon thread, which cannot keep the process from ending. `ended` is called when it has ended."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        ended()
        if not result.done():
            result.set_result((value, error))

    def run() -> None:
        value, failed = None, None
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 (raised where it is awaited)
            failed = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=run, name="grader", daemon=True).start()
    return await result


def _source(function: Callable[..., Any]) -> bytes:
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):  # not written in Python, or an object
        return b""


def own_graders(names: Mapping[str, str], built_in: tuple[str, ...]) -> dict[str, OwnGrader]:
    """The graders that `worlds.graders` names. Raises BadConfig for a name that a built-in grader has, or a function that is not there."""
    for name in names:
        if name in built_in:
            raise BadConfig(f"worlds.graders.{name}: a built-in grader has this name; choose another")
    keys = {name: f"worlds.graders.{name}" for name in names}
    return {name: OwnGrader(keys[name], place, find_function(keys[name], place)) for name, place in names.items()}
