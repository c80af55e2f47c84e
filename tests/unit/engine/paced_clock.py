"""A clock by which a test holds an engine's thread: no test may depend on which of two threads is the faster."""

import asyncio
import threading

from tests.deadlines import WHOLE_PROGRAM_S


class PacedClock:
    """Goes on when it is told to. While it is `held`, the engine, which looks at it before each step, takes one step at each `step`."""

    def __init__(self):
        self.now, self.held = 100.0, False
        self._test, self._waits, self._turns = threading.get_ident(), False, threading.Semaphore(0)

    def __call__(self):
        if self.held and threading.get_ident() != self._test:
            self._waits = True
            self._turns.acquire()
        return self.now

    def step(self):
        """Let the engine take its next step, if it waits for that."""
        if self._waits:
            self._waits = False
            self._turns.release()

    def go_on(self):
        """Hold the engine no longer."""
        self.held = False
        self._turns.release()

    async def until(self, condition):
        """Step by step, until this holds."""
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while not condition():
                self.step()
                await asyncio.sleep(0.001)

    async def first(self, stream):
        """The first chunk of a stream, with no more steps than it takes."""
        task = asyncio.ensure_future(anext(stream))
        await self.until(task.done)
        return await task
