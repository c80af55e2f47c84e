"""Server-sent events: the changed parts of a page, for as long as it is open."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ostinato.core.errors import OstinatoError, Unavailable
from ostinato.core.seams import Clock
from ostinato.core.visitors import Visitor

logger = logging.getLogger(__name__)

EVERY_S = 2.0
MOST_VIEWERS = 64
MOST_OF_ONE = 16
"""The most open pages of one tenant, so that no tenant takes all places."""
OPERATORS_OWN = 16
"""Places that are kept for the operator, so that tenants together do not shut the operator out."""
HEADERS: Mapping[str, str] = {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}

Parts = Callable[[], Awaitable[Mapping[str, str]]]
"""Renders a page's parts: element ids and their contents."""


class Live:
    """The open streams. `close` ends all of them, so that no viewer holds up a stop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._closing = asyncio.Event()
        self._open: Counter[Visitor] = Counter()

    def close(self) -> None:
        """End every stream, and begin no other."""
        self._closing.set()

    def take(self, visitor: Visitor) -> ViewerPlace:
        """A place for one stream, held until it is given back. Raises Unavailable if none is free: the page then changes on reload only."""
        if self._closing.is_set() or self._full(visitor):
            raise Unavailable("Too many pages are open; this one does not update itself.")
        return ViewerPlace(self._open, visitor)

    def _full(self, visitor: Visitor) -> bool:
        crowded = self._open.total() >= MOST_VIEWERS
        if visitor.operator:
            return crowded
        others = sum(count for who, count in self._open.items() if not who.operator)
        of_one = visitor.tenant is not None and self._open[visitor] >= MOST_OF_ONE
        return crowded or of_one or others >= MOST_VIEWERS - OPERATORS_OWN

    async def events(self, parts: Parts, allowed: Callable[[], bool] = lambda: True) -> AsyncIterator[str]:
        """The changes, every other second, with a beat each time: silence means that the gateway is gone.

        The stream ends once `allowed` returns False, because a cookie may expire while the page is open.
        """
        sent: dict[str, str] = {}
        while not self._closing.is_set() and allowed():
            try:
                fresh = await parts()
            except OstinatoError as error:  # the page shows its age, and is tried again
                logger.warning("the page could not be brought up to date: %s", error)
                yield ": not now\n\n"
            else:
                changed = {name: body for name, body in fresh.items() if sent.get(name) != body}
                if changed:
                    yield message(changed)
                sent.update(changed)
                yield f"event: beat\ndata: {self._clock():.0f}\n\n"
            await self._pause()

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._closing.wait(), EVERY_S)
        except TimeoutError:
            return


class ViewerPlace:
    """One of the places of `Live`, taken on construction."""

    def __init__(self, open: Counter[Visitor], visitor: Visitor) -> None:
        self._open, self._visitor, self._held = open, visitor, True
        open[visitor] += 1

    def give_back(self) -> None:
        """Free the place. Idempotent."""
        if self._held:
            self._held = False
            self._open[self._visitor] -= 1


class EventStream(StreamingResponse):
    """A stream of events on a place, which is given back however the stream ends, even if the client leaves before the first byte."""

    def __init__(self, events: AsyncIterator[str], place: ViewerPlace, headers: Mapping[str, str]) -> None:
        super().__init__(events, 200, headers)
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. There is no await between taking the place and this `try`, so no cancellation can come in between."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._place.give_back()


def message(parts: Mapping[str, str]) -> str:
    """One event that replaces elements by their ids, and keeps the focus in them."""
    lines: list[str] = []
    for name, body in parts.items():
        text = f'<hx-partial hx-target="#{name}" hx-swap="innerMorph">{body}</hx-partial>'
        lines += [f"data: {line}" for line in text.splitlines()]
    return "\n".join(lines) + "\n\n"
