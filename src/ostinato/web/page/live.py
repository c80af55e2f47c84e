"""Server-sent events: the parts of a page that changed, for as long as somebody looks."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from ostinato.core.errors import OstinatoError
from ostinato.core.seams import Clock

logger = logging.getLogger(__name__)

EVERY_S = 2.0
MOST_VIEWERS = 64
MOST_OF_ONE = 16
"""Open pages of one tenant, so that none takes the places of all."""
HEADERS: Mapping[str, str] = {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}

Parts = Callable[[], Awaitable[Mapping[str, str]]]
"""Renders a page's parts: the id of an element, and what stands in it."""


class Live:
    """The open streams. `close` ends all of them, so that nobody who looks holds up a stop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._closing = asyncio.Event()
        self._open: Counter[str | None] = Counter()

    def full(self, tenant: str | None) -> bool:
        """True if no more of this tenant's may look (None: the operator's); their pages stand still, and can be loaded again."""
        most = MOST_VIEWERS if tenant is None else MOST_OF_ONE
        crowded = self._open.total() >= MOST_VIEWERS or self._open[tenant] >= most
        return crowded or self._closing.is_set()

    def close(self) -> None:
        """End every stream, and begin no other."""
        self._closing.set()

    async def events(
        self, parts: Parts, tenant: str | None = None, allowed: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[str]:
        """What changed, every other second, and a beat each time: silence means that the gateway is gone.

        It ends once `allowed` says no: a cookie may have run out while the page was open.
        """
        self._open[tenant] += 1
        sent: dict[str, str] = {}
        try:
            while not self._closing.is_set() and allowed():
                try:
                    fresh = await parts()
                except OstinatoError as error:  # told at the next try, by the age of what is shown
                    logger.warning("the page could not be brought up to date: %s", error)
                    yield ": not now\n\n"
                else:
                    changed = {name: body for name, body in fresh.items() if sent.get(name) != body}
                    if changed:
                        yield message(changed)
                    sent.update(changed)
                    yield f"event: beat\ndata: {self._clock():.0f}\n\n"
                await self._pause()
        finally:
            self._open[tenant] -= 1

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._closing.wait(), EVERY_S)
        except TimeoutError:
            return


def message(parts: Mapping[str, str]) -> str:
    """One event that replaces elements by their ids, and keeps what is focused in them."""
    lines: list[str] = []
    for name, body in parts.items():
        text = f'<hx-partial hx-target="#{name}" hx-swap="innerMorph">{body}</hx-partial>'
        lines += [f"data: {line}" for line in text.splitlines()]
    return "\n".join(lines) + "\n\n"
