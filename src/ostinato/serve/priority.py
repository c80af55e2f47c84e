"""People before machines: calls of simulated worlds and of the gate give way while people are served too slowly.

The limit on concurrent machine calls changes once a second. It is halved if more than a tenth of the recent calls of people waited too
long for a first token (or are still waiting too long), or got the rest too slowly; otherwise it grows by one. A call that has begun is
never cut off; an agent's next call waits.

It also measures how many answers people request, and how long they wait for the first token in calls that more servers would speed up.
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
from typing import Any

# ---------------------------------------------------------------- latency window


_LATELY_S = 10.0
_LATE_SHARE = 0.1
_LATE_CALLS = 3  # fewer late calls may be due to a single long prompt
_LATE_USERS = 2  # waits of a single user are no reason to return servers


def _forget(seen: deque[Any], now: float) -> None:
    """Drop observations, each of which begins with its time, that are too old."""
    while seen and seen[0][0] < now - _LATELY_S:
        seen.popleft()


class LatencyWindow:
    """Tracks people's calls from the moment the engine is asked. `clock` gives seconds.

    Example::

        with waits.asked(answers=1, user="acme/u42") as first:
            first()  # the first token is here
        waits.delay_s()
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[float, str]] = {}  # calls without a first token: start time and user
        self._lately: deque[tuple[float, float, str]] = deque()  # first tokens: time, wait and user
        self.answers = 0

    @contextmanager
    def asked(self, answers: int, user: str | None) -> Generator[Callable[[], None]]:
        """A person's call for so many answers; the yielded function must be called at the first token. With `user` None the call is only
        counted, because its wait says nothing about the live slot's servers.
        """
        self.answers += answers
        if user is None:
            yield lambda: None
            return
        number, came = next(self._numbers), self._clock()
        self._waiting[number] = came, user

        def first() -> None:
            now = self._clock()
            if self._waiting.pop(number, None) is not None:
                _forget(self._lately, now)
                self._lately.append((now, now - came, user))

        try:
            yield first
        finally:
            self._waiting.pop(number, None)

    def delay_s(self) -> float:
        """The wait, in seconds, that the slowest tenth of recent calls (those still waiting included) reached or exceeded; 0 without calls.

        If that tenth is fewer than three calls, or all of one user, it is extended by the next shorter waits; 0 if there are none.
        """
        now = self._clock()
        _forget(self._lately, now)
        found = [(wait, user) for _, wait, user in self._lately]
        found += [(now - came, user) for came, user in self._waiting.values()]
        found.sort(reverse=True)
        late = max(_LATE_CALLS, len(found) - int((1 - _LATE_SHARE) * len(found) - 1e-9))
        users = set[str]()
        for count, (wait, user) in enumerate(found, 1):
            users.add(user)
            if count >= late and len(users) >= _LATE_USERS:
                return wait
        return 0.0


_EACH_S = 1.0
_SHORT = 8  # an answer of at most so many tokens says nothing about speed
_SHARE_OF_LEFT = 0.25  # the largest share of the time until a call's own deadline that is spent waiting


def _nothing(*_: int) -> None:
    """Do nothing."""


# ---------------------------------------------------------------- priority


_Seen = deque[tuple[float, bool]]
"""Recent observations of people's calls: when, and whether it was too slow."""


def _too_many(seen: _Seen, overdue: int = 0) -> bool:
    """Whether too large a share was too slow, with those that are not over and are so already."""
    return overdue + sum(late for _, late in seen) > _LATE_SHARE * (overdue + len(seen))


@dataclass(frozen=True, slots=True)
class Person:
    """Callbacks for a person's call: `first` is called at the first token, and `last` with the token count at the last. Both are called
    again for each further answer of one call (its summary, another arm's). The defaults do nothing, for a call that is not a person's.
    """

    first: Callable[[], None] = _nothing
    last: Callable[[int], None] = _nothing

    def also(self, waited: Callable[[], None]) -> Person:
        """A copy that also calls `waited` at the first token."""

        def first() -> None:
            waited()
            self.first()

        return Person(first, self.last)


class PeopleFirst:
    """Tracks how long people wait, and decides when a machine's call may go on.

    Args:
        longest_s: longest acceptable wait of a person for a first token; 0: any time.
        least: tokens per second that people should get after the first token; 0: any speed.
        patience_s: longest wait of a machine's call; after that it goes on however long people wait.
        tell: called with the number of waiting machine calls whenever it changes.
        clock: seconds.

    `waits` counts the calls at the engine (see `asks`), even if machine calls never give way (both limits 0).

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
        self.waits = LatencyWindow(clock)
        self._numbers = itertools.count()
        self._asking: dict[int, float] = {}  # people's calls without a first token: when they arrived
        self._waits, self._speeds = _Seen(), _Seen()  # of people's recent calls: for the first token, and of the rest
        self._changed = asyncio.Condition()
        self._looked = -math.inf
        self._limit = math.inf
        self._open = self._waiting = 0

    @contextmanager
    def person(self) -> Generator[Person]:
        """Track a person's call."""
        if self._off:
            yield Person()
            return
        number, came = next(self._numbers), self._clock()
        self._asking[number] = came
        began = came

        def first() -> None:
            nonlocal began
            began = self._clock()
            if self._asking.pop(number, None) is not None:  # what comes later is no wait for a first token
                self._observe(self._waits, began, late=began - came > self._longest_s)

        def last(tokens: int) -> None:
            now = self._clock()
            if tokens > _SHORT:
                self._observe(self._speeds, now, late=tokens - 1 < self._least * (now - began))

        try:
            yield Person(first, last)
        finally:
            self._asking.pop(number, None)

    @contextmanager
    def asks(self, person: Person, answers: int, user: str | None) -> Generator[Person]:
        """Count this person's call at the engine. See `LatencyWindow.asked`."""
        with self.waits.asked(answers, user) as waited:
            yield person.also(waited)

    @asynccontextmanager
    async def machine(self, left_s: float | None) -> AsyncGenerator[None]:
        """A machine's call: waits until it may go on. `left_s` is the time until its own deadline; it waits at most a quarter of that."""
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

    @staticmethod
    def _observe(seen: _Seen, now: float, *, late: bool) -> None:
        _forget(seen, now)  # a gateway without calls of machines never looks
        seen.append((now, late))

    def _count(self, change: int) -> None:
        self._waiting += change
        self._tell(self._waiting)

    def _look(self) -> None:
        """Adjust the limit, at most once a second, to whether too many people wait too long."""
        now = self._clock()
        if now - self._looked < _EACH_S:
            return
        self._looked = now
        overdue = sum(now - came > self._longest_s for came in self._asking.values())
        for seen in (self._waits, self._speeds):
            _forget(seen, now)
        if _too_many(self._waits, overdue) or _too_many(self._speeds):
            self._limit = max(1, min(self._limit, self._open) // 2)
            for seen in (self._waits, self._speeds):
                seen.clear()  # else the same observations would halve the limit again
        elif self._open or self._waiting:
            self._limit += 1
