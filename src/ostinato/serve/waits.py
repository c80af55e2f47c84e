"""How many answers people ask for, and how long they wait for the first token."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

_LATELY_S = 10.0
_LATE_SHARE = 0.1


class Waits:
    """Counts people's calls. `clock` gives seconds.

    Example::

        with waits.asked(answers=1) as first:
            first()  # the first token is here
        waits.delay_s()
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, float] = {}  # who has no first token: when they came
        self._lately: deque[tuple[float, float]] = deque()  # first tokens: when, and after how long
        self.answers = 0

    @contextmanager
    def asked(self, answers: int) -> Generator[Callable[[], None]]:
        """A person's call for so many answers; what it gives is to be called at the first token."""
        number, came = next(self._numbers), self._clock()
        self._waiting[number] = came
        self.answers += answers

        def first() -> None:
            now = self._clock()
            if self._waiting.pop(number, None) is not None:
                self._forget(now)
                self._lately.append((now, now - came))

        try:
            yield first
        finally:
            self._waiting.pop(number, None)

    def delay_s(self) -> float:
        """The seconds that a tenth of those who asked lately waited longer than, or wait already; 0 if nobody asked."""
        now = self._clock()
        self._forget(now)
        found = sorted([*(wait for _, wait in self._lately), *(now - came for came in self._waiting.values())])
        return found[int((1 - _LATE_SHARE) * len(found) - 1e-9)] if found else 0.0

    def _forget(self, now: float) -> None:
        while self._lately and self._lately[0][0] < now - _LATELY_S:
            self._lately.popleft()
