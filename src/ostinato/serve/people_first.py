"""People before machines: calls of simulated worlds and of the gate give way while people are served too slowly.

What is let through at once is halved each second in which more than a tenth of the people who asked lately waited too long for a first
token, or still wait, or got the rest too slowly, and grows by one in each other second. Nothing that was begun is cut off: a call is one
answer, and an agent's next one waits.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from ostinato.serve.waits import Waits

_LATELY_S = 10.0
_EACH_S = 1.0
_LATE_SHARE = 0.1
_SHORT = 8  # an answer of so few tokens says nothing of speed
_SHARE_OF_LEFT = 0.25  # of a call's own deadline, the most that is spent on waiting


def _nothing(*_: int) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who waits: is told of the first token, once, and of how many there were at the last. As it is made here, nobody's call."""

    first: Callable[[], None] = _nothing
    last: Callable[[int], None] = _nothing

    def also(self, waited: Callable[[], None]) -> Person:
        """The same, and somebody else is told of the first token."""

        def first() -> None:
            waited()
            self.first()

        return Person(first, self.last)


class PeopleFirst:
    """Counts people who wait, and says when a machine's call may go on.

    Args:
        longest_s: what people may wait for a first token; 0: any time.
        least: tokens a second that people are to get after the first; 0: any speed.
        patience_s: what a machine's call waits at most; then it goes on whatever people wait.
        tell: told how many calls wait, whenever that changes.
        clock: seconds.

    `waits` is told by whoever asks the engine, whether or not anybody gives way to people.

    Example::

        with people.person() as person:
            person.first()  # the first token is here
            person.last(64)  # the last of 64 tokens is
        async with people.machine(left_s=None):
            ...
    """

    def __init__(
        self,
        longest_s: float,
        least: float,
        patience_s: float,
        tell: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._longest_s, self._least = longest_s or math.inf, least
        self._off = not (longest_s or least)
        self._patience_s, self._tell, self._clock = patience_s, tell, clock
        self.waits = Waits(clock)
        self._numbers = itertools.count()
        self._asking: dict[int, float] = {}  # people without a first token: when they came
        self._lately: deque[tuple[float, bool]] = deque()  # what people got: when, and whether it was too slow
        self._changed = asyncio.Condition()
        self._looked = -math.inf
        self._limit = math.inf
        self._open = self._waiting = 0

    @contextmanager
    def person(self) -> Generator[Person]:
        """A person's call."""
        if self._off:
            yield Person()
            return
        number, came = next(self._numbers), self._clock()
        self._asking[number] = came
        began = came

        def first() -> None:
            nonlocal began
            began = self._clock()
            del self._asking[number]
            self._lately.append((began, began - came > self._longest_s))

        def last(tokens: int) -> None:
            now = self._clock()
            if tokens > _SHORT:
                self._lately.append((now, tokens - 1 < self._least * (now - began)))

        try:
            yield Person(first, last)
        finally:
            self._asking.pop(number, None)

    @contextmanager
    def asks(self, person: Person, answers: int, user: str | None) -> Generator[Person]:
        """The engine is asked for this person. See `Waits.asked`."""
        with self.waits.asked(answers, user) as waited:
            yield person.also(waited)

    @asynccontextmanager
    async def machine(self, left_s: float | None) -> AsyncGenerator[None]:
        """A machine's call: waits until it may go on. `left_s`: until its own deadline, of which it spends no more than a quarter."""
        if self._off:
            yield
            return
        patience_s = self._patience_s if left_s is None else min(self._patience_s, _SHARE_OF_LEFT * left_s)
        await self._turn(self._clock() + patience_s)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            async with self._changed:
                self._changed.notify()

    async def _turn(self, ends: float) -> None:
        self._look()
        if self._open < self._limit:
            return
        self._count(+1)
        try:
            async with self._changed:
                while self._open >= self._limit and (left_s := ends - self._clock()) > 0:
                    try:
                        async with asyncio.timeout(min(_EACH_S, left_s)):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
                    self._look()
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._waiting += change
        self._tell(self._waiting)

    def _look(self) -> None:
        """Once a second: does anybody wait too long?"""
        now = self._clock()
        if now - self._looked < _EACH_S:
            return
        self._looked = now
        while self._lately and self._lately[0][0] < now - _LATELY_S:
            self._lately.popleft()
        overdue = sum(now - came > self._longest_s for came in self._asking.values())
        late = overdue + sum(late for _, late in self._lately)
        if late > _LATE_SHARE * (overdue + len(self._lately)):
            self._limit = max(1, min(self._limit, self._open) // 2)
            self._lately.clear()  # what was seen before this would halve again
        elif self._open or self._waiting:
            self._limit += 1
