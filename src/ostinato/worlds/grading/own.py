"""Graders of the operator's own, as Python functions: ``grade(task, rollout)`` gives a number from 0 to 1, or a `Grade`."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.named_function import find_function
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task


class OwnGrader:
    """Implements `Grader` by a function, plain or async, which has the task's `grading.timeout_s` for one outcome.

    A plain function runs on a thread of its own, so that one that does not end holds up no other. What it raises, and no answer in time, is
    Unavailable: a missing grade is not a grade of 0.

    Example: ``await OwnGrader("worlds.graders.brevity", brevity).grade(task, rollout)``
    """

    def __init__(self, key: str, function: Callable[[Task, Rollout], Any]) -> None:
        self._key, self._function = key, function

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        where = f"task {task.id!r}: the grader of {self._key}"
        try:
            async with asyncio.timeout(task.grading.timeout_s):
                if inspect.iscoroutinefunction(self._function):
                    found = await self._function(task, rollout)
                else:
                    found = await _on_a_thread(self._function, task, rollout)
        except TimeoutError as error:
            raise Unavailable(f"{where} gave no grade in {task.grading.timeout_s:g} s (grading.timeout_s)") from error
        except Exception as error:
            raise Unavailable(f"{where} raised {type(error).__name__}: {error}") from error
        grade = found if isinstance(found, Grade) else None
        value = found if grade is None else grade.value
        if isinstance(value, bool | int | float) and math.isfinite(value) and 0.0 <= value <= 1.0:
            return grade or Grade(value=float(value))
        raise BadConfig(f"{where} gave {value!r}; it must give a number from 0 to 1, or a Grade of one")


async def _on_a_thread(function: Callable[..., Any], *args: object) -> Any:
    """The function's result from a daemon thread, which cannot keep the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if not result.done():
            result.set_exception(error) if error is not None else result.set_result(value)

    def run() -> None:
        value, failed = None, None
        try:
            value = function(*args)
        except Exception as error:  # noqa: BLE001 (raised where it is awaited)
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=run, name="grader", daemon=True).start()
    return await result


def own_graders(names: Mapping[str, str], built_in: tuple[str, ...]) -> dict[str, OwnGrader]:
    """The graders that `worlds.graders` names. Raises BadConfig for a name that a built-in grader has, or a function that is not there."""
    for name in names:
        if name in built_in:
            raise BadConfig(f"worlds.graders.{name}: a built-in grader has this name; choose another")
    keys = {name: f"worlds.graders.{name}" for name in names}
    return {name: OwnGrader(keys[name], find_function(keys[name], place)) for name, place in names.items()}
