"""The deadlines of waits in tests, and what a test may measure on a busy machine."""

import asyncio
import time

PATIENT_S = 45.0
"""Seconds that a test waits for what must happen soon, on a busy machine, too. Less than a minute, for which a fake hangs that must not be
waited for.
"""
WHOLE_PROGRAM_S = 300.0
"""The same where processes start, import torch and compile: minutes on a machine that others keep busy."""
LEARNING_S = 900.0
"""The same where a run learns from many simulated users until something comes of it."""


class OwnTime:
    """Seconds that an event loop has had: what a busy machine withholds from it is not counted. For upper bounds on what takes seconds.

    Example: ``async with OwnTime() as own: await work(); assert own.seconds < 3``
    """

    _TICK_S = 0.01

    def __init__(self) -> None:
        self.seconds = 0.0

    async def __aenter__(self) -> "OwnTime":
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ticking.cancel()

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(self._TICK_S)
            self.seconds += min(time.monotonic() - began, 2 * self._TICK_S)
