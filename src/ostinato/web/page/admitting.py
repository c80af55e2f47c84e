"""Admits questions to the page: a tenant may ask little at a time, and the operator never waits for tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator

from ostinato.core.bucket import Bucket
from ostinato.core.errors import OstinatoError
from ostinato.core.in_turn import InTurn
from ostinato.core.seams import Clock
from ostinato.core.visitors import Visitor

MOST_ASKED = 4
"""How many pages of one tenant may wait or be answered at a time."""
PAGES_PER_S, PAGES_AT_ONCE = 2.0, 60.0
"""How many pages one tenant may load per second in the long run, and after a pause."""


class TooManyQuestions(OstinatoError):
    """A tenant asks for more pages than it may. `retry_after_s` says when to try again."""

    status = 429
    code = "too_many_questions"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Admission:
    """Tenants' questions are answered one at a time, and the tenants take turns; a visitor who sees the whole run is admitted at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rates = dict[Visitor, Bucket]()
        self._asked: Counter[Visitor] = Counter()
        self._answering = False
        self._waiting: InTurn[Visitor, asyncio.Future[None]] = InTurn()
        self._streams: defaultdict[Visitor, asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextlib.asynccontextmanager
    async def page(self, visitor: Visitor) -> AsyncGenerator[None]:
        """Admit one page. Raises TooManyQuestions."""
        if visitor.sees_all:
            yield
            return
        if self._asked[visitor] >= MOST_ASKED:
            raise TooManyQuestions(
                f"{MOST_ASKED} pages are already being loaded with this key; load this one again once they have arrived."
            )
        self._charge(visitor)
        self._asked[visitor] += 1
        try:
            async with self._turn(visitor):
                yield
        finally:
            self._asked[visitor] -= 1

    @contextlib.asynccontextmanager
    async def stream(self, visitor: Visitor) -> AsyncGenerator[None]:
        """Admit one look of an open page, which waits for the same key's other looks instead of being refused."""
        if visitor.sees_all:
            yield
            return
        async with self._streams[visitor], self._turn(visitor):
            yield

    @contextlib.asynccontextmanager
    async def _turn(self, visitor: Visitor) -> AsyncGenerator[None]:
        """Wait until it is this visitor's turn, which lasts as long as the context."""
        if self._answering:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.put(visitor, mine)
            try:
                await mine
            except asyncio.CancelledError:
                self._waiting.discard(visitor, mine)
                if not mine.cancelled():  # the turn had come
                    self._next()
                raise
        self._answering = True
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        """End a turn and begin the next."""
        self._answering = False
        while not self._answering and (turn := self._waiting.next()) is not None:
            self._answering = not turn.done()
            if self._answering:
                turn.set_result(None)

    def _charge(self, visitor: Visitor) -> None:
        now = self._clock()
        rate = self._rates.setdefault(visitor, Bucket(rate=PAGES_PER_S, size=PAGES_AT_ONCE, now=now))
        if wait_s := rate.take(1.0, now):
            raise TooManyQuestions(
                f"More than {PAGES_PER_S:g} pages a second were loaded with this key; load this one again in a moment.",
                wait_s,
            )
