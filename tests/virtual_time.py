"""Tests of what time brings about, on a clock that no busy machine can advance."""

import asyncio
import selectors
import time
from functools import partial, wraps

from tests.deadlines import WHOLE_PROGRAM_S

_LOOK_S = 1.0  # of real waiting at a time, for what wakes the loop at once


class _Selector(selectors.DefaultSelector):
    """Waits for threads and sockets as any other, and for no timer: where only those are left, its clock advances to the next."""

    def __init__(self, *, jumps):
        super().__init__()
        self.now = 0.0  # not the machine's clock: added to months of seconds, nanoseconds would be lost
        self.began, self.threads, self._jumps = time.monotonic(), 0, jumps

    def select(self, timeout=None):
        if time.monotonic() - self.began > WHOLE_PROGRAM_S:
            self.began = time.monotonic()  # what is cancelled now has as long to end
            raise TimeoutError(f"nothing that could end this test has come within {WHOLE_PROGRAM_S:g} s")
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        if timeout is not None and self._jumps and not self.threads:
            self.now += timeout
            return []
        return super().select(_LOOK_S)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while anything can be done, and passes at once when all that is left is to wait.

    A step takes no time, however long it takes; a timeout of 0.05 s passes when nothing else can happen, and never before. Work in
    executors counts as a step. With `jumps=False` time passes by `advance` alone: for tests with sockets, processes or other threads,
    for which a loop whose time jumps would not wait.
    """

    def __init__(self, *, jumps=True):
        self._selecting = _Selector(jumps=jumps)
        super().__init__(self._selecting)

    def time(self):
        return self._selecting.now

    def advance(self, seconds):
        """Let so much time have passed; the timers that it makes due run in the loop's next round."""
        self._selecting.now += seconds

    def run_in_executor(self, executor, func, *args):
        done = super().run_in_executor(executor, func, *args)
        self._selecting.threads += 1
        done.add_done_callback(self._came_back)
        return done

    async def shutdown_default_executor(self, *timeout):
        self._selecting.threads += 1  # which waits for the others
        await super().shutdown_default_executor(*timeout)

    def _came_back(self, _):
        self._selecting.threads -= 1


def _on(loop_factory, test):
    @wraps(test)
    def run(**given):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**given))

    return run


def in_virtual_time(test):
    """Run an asynchronous test, whose fixtures are synchronous, where time passes when nothing else can happen."""
    return _on(VirtualTimeLoop, test)


def in_held_time(test):
    """Run an asynchronous test, whose fixtures are synchronous, where time passes by `advance` alone."""
    return _on(partial(VirtualTimeLoop, jumps=False), test)


async def advance(seconds):
    """Let so much time have passed in a test of held time, and do what that makes due."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    time.sleep(0.001)  # noqa: ASYNC251 - what was sent over a socket comes, where a test goes on by small steps
    loop.advance(seconds)
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the timers ran in the round before; what they woke runs in this one


async def until(condition):
    """Wait in held time for what has no event, as in `gateway_world.eventually`."""
    while not condition():
        time.sleep(0.001)  # noqa: ASYNC251 - no timer of the loop's would end
        await asyncio.sleep(0)
