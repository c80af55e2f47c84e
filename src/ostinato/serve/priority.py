"""Priority of people over machines: calls of simulated worlds and of the gate wait while people are served too slowly.

The limit on concurrent machine calls is adjusted once a second. It is halved if more than a tenth of people's recent calls waited too long
for a first token (or have waited too long already), or got the rest too slowly; otherwise it grows by one (AIMD). A call that has begun is
never cut off; an agent's next call waits.

It also measures the demand for answers, and the wait for the first token in calls that more servers would speed up.
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


_WINDOW_S = 10.0
_LATE_SHARE = 0.1
_LATE_CALLS = 3  # fewer late calls may be due to a single long prompt
_LATE_USERS = 2  # a single user's waits do not justify calling servers back


def _forget(seen: deque[Any], now: float) -> None:
    """Drop observations that are too old. Each begins with its time."""
    while seen and seen[0][0] < now - _WINDOW_S:
        seen.popleft()


class LatencyWindow:
    """Tracks people's calls from the moment that the engine is asked. `clock` returns seconds.

    Example::

        with waits.asked(answers=1, user="acme/u42") as first:
            first()  # the first token has arrived
        waits.delay_s()
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[float, str]] = {}  # calls without a first token: start time and user
        self._recent: deque[tuple[float, float, str]] = deque()  # first tokens: time, wait and user
        self.answers = 0

    @contextmanager
    def asked(self, answers: int, user: str | None) -> Generator[Callable[[], None]]:
        """Track a person's call for this number of answers; call the yielded function at the first token. With `user` None the call is only
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
                _forget(self._recent, now)
                self._recent.append((now, now - came, user))

        try:
            yield first
        finally:
            self._waiting.pop(number, None)

    def delay_s(self) -> float:
        """Return the wait, in seconds, that the slowest tenth of recent calls (including those still waiting) reached or exceeded.

        If that tenth is fewer than three calls, or all of one user, it is extended by the next shorter waits; 0 if there are too few.
        """
        now = self._clock()
        _forget(self._recent, now)
        waits = [(wait, user) for _, wait, user in self._recent]
        waits += [(now - came, user) for came, user in self._waiting.values()]
        waits.sort(reverse=True)
        late = max(_LATE_CALLS, len(waits) - int((1 - _LATE_SHARE) * len(waits) - 1e-9))
        users = set[str]()
        for count, (wait, user) in enumerate(waits, 1):
            users.add(user)
            if count >= late and len(users) >= _LATE_USERS:
                return wait
        return 0.0


_ADJUST_S = 1.0
_SHORT_ANSWER = 8  # answers of at most this many tokens say nothing about speed
_SHARE_OF_LEFT = 0.25  # the largest share of the time left until a call's deadline that it waits


def _nothing(*_: int) -> None:
    """Do nothing."""


# ---------------------------------------------------------------- priority


_Seen = deque[tuple[float, bool]]
"""Recent observations of people's calls: when, and whether it was too slow."""


def _too_slow(seen: _Seen, overdue: int = 0) -> bool:
    """True if the share of slow observations is too large, including `overdue` calls that are still waiting and already too slow."""
    return overdue + sum(late for _, late in seen) > _LATE_SHARE * (overdue + len(seen))


@dataclass(frozen=True, slots=True)
class Person:
    """Callbacks for a person's call: call `first` at the first token, and `last` with the token count at the last. Call both again for each
    further answer of the call (its summary, another arm's). The defaults do nothing, for calls that are not a person's.
    """

    first: Callable[[], None] = _nothing
    last: Callable[[int], None] = _nothing

    def also(self, waited: Callable[[], None]) -> Person:
        """Return a copy that also calls `waited` at the first token."""

        def first() -> None:
            waited()
            self.first()

        return Person(first, self.last)


class PeopleFirst:
    """Tracks how long people wait, and decides when a machine's call may start.

    Args:
        longest_s: longest acceptable wait of a person for the first token; 0: no limit.
        least: lowest acceptable tokens per second after the first token; 0: no limit.
        patience_s: longest wait of a machine's call; then it starts however long people wait.
        tell: called with the number of waiting machine calls whenever it changes.
        clock: seconds.

    `waits` counts the calls at the engine (see `asks`), even if machine calls never wait (both limits 0).

    Example::

        with people.person() as person:
            person.first()  # the first token has arrived
            person.last(64)  # the last of 64 tokens has arrived
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
        self._asking: dict[int, float] = {}  # people's calls without a first token -> arrival time
        self._waits, self._speeds = _Seen(), _Seen()  # people's recent waits for the first token, and speeds after it
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
            if self._asking.pop(number, None) is not None:  # count only the call's first answer
                self._observe(self._waits, began, late=began - came > self._longest_s)

        def last(tokens: int) -> None:
            now = self._clock()
            if tokens > _SHORT_ANSWER:
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
        """Wait until a machine's call may start. `left_s`: the time until its own deadline, of which at most a quarter is spent waiting."""
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
                        async with asyncio.timeout(min(_ADJUST_S, left_s)):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
                    self._look()
        finally:
            self._count(-1)

    @staticmethod
    def _observe(seen: _Seen, now: float, *, late: bool) -> None:
        _forget(seen, now)  # here, since without machine calls `_look` never runs
        seen.append((now, late))

    def _count(self, change: int) -> None:
        self._waiting += change
        self._tell(self._waiting)

    def _look(self) -> None:
        """Adjust the limit at most once a second, down if too many people wait too long, else up."""
        now = self._clock()
        if now - self._looked < _ADJUST_S:
            return
        self._looked = now
        overdue = sum(now - came > self._longest_s for came in self._asking.values())
        for seen in (self._waits, self._speeds):
            _forget(seen, now)
        if _too_slow(self._waits, overdue) or _too_slow(self._speeds):
            self._limit = max(1, min(self._limit, self._open) // 2)
            for seen in (self._waits, self._speeds):
                seen.clear()  # so that the same observations do not halve the limit again
        elif self._open or self._waiting:
            self._limit += 1
