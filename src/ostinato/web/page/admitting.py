"""Admits questions to the page: a tenant may ask little at a time, and the operator never waits for tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator

from ostinato.core.errors import OstinatoError
from ostinato.core.visitors import Visitor

MOST_ASKED = 4
"""How many pages of one tenant may wait or be answered at a time."""


class TooManyQuestions(OstinatoError):
    """A tenant asks for more pages at once than it may. `retry_after_s` says when to try again."""

    status = 429
    code = "too_many_questions"
    retry_after_s = 1.0


class Admission:
    """Tenants' questions are answered one at a time, in order of arrival; a visitor who sees the whole run is admitted at once."""

    def __init__(self) -> None:
        self._asked: Counter[Visitor] = Counter()
        self._one = asyncio.Lock()
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
        self._asked[visitor] += 1
        try:
            async with self._one:
                yield
        finally:
            self._asked[visitor] -= 1

    @contextlib.asynccontextmanager
    async def stream(self, visitor: Visitor) -> AsyncGenerator[None]:
        """Admit one look of an open page, which waits for the same key's other looks instead of being refused."""
        if visitor.sees_all:
            yield
            return
        async with self._streams[visitor], self._one:
            yield
