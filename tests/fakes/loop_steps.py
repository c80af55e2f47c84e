"""What the event loop does at a time: the processor time of each of its steps."""

import asyncio
import contextlib
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One step: `seconds` of the loop's thread, and what it ran."""

    seconds: float
    what: str


@contextlib.contextmanager
def loop_steps(least_s=0.0):
    """The steps of this thread's asyncio loops inside the block that take at least so long, in a list that grows.

    It is processor time, so that a busy machine does not matter; what other threads do while they hold the interpreter is not in it.
    """
    steps: list[Step] = []
    usual = asyncio.Handle._run

    def timed(handle):
        began = time.thread_time()
        try:
            usual(handle)
        finally:
            seconds = time.thread_time() - began
            if seconds >= least_s:
                steps.append(Step(seconds, _what(handle)))

    asyncio.Handle._run = timed
    try:
        yield steps
    finally:
        asyncio.Handle._run = usual


def _what(handle):
    task = getattr(handle._callback, "__self__", None)
    return task.get_coro().__qualname__ if isinstance(task, asyncio.Task) else repr(handle._callback)[:120]
