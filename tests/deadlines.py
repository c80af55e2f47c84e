"""The deadlines of waits in tests, and what a test may measure on a busy machine."""

import time

PATIENT_S = 45.0
"""Seconds that a test waits for what must happen soon, on a busy machine, too. Less than a minute, for which a fake hangs that must not be
waited for.
"""
WHOLE_PROGRAM_S = 300.0
"""The same where processes start, import torch and compile: minutes on a machine that others keep busy."""
LEARNING_S = 900.0
"""The same where a run learns from many simulated users until something comes of it."""


def withheld_s() -> float:
    """Seconds that this thread has waited for a processor while it could have run; 0 where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def own_time() -> float:
    """Seconds of a clock that stands still while a busy machine withholds the processor from this thread."""
    return time.monotonic() - withheld_s()


class OwnTime:
    """Seconds that passed, without those that a busy machine withheld from the loop's thread. For upper bounds on what takes seconds.

    Example: ``async with OwnTime() as own: await work(); assert own.seconds < 3``
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    async def __aenter__(self) -> "OwnTime":
        self._began = own_time()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.seconds = own_time() - self._began
