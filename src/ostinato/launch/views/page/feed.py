"""Fills the page's index from the log, in slices, and never takes more than a share of the time.

Turns are read from both ends: new rows first, then the rows below those already read, so that the newest turns of an old log can be
found at once. Decisions (releases and alarms) are few rows, and are read upwards, because their order matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ostinato.core.records import Row
from ostinato.core.seams import Cursor
from ostinato.launch.views.page.index import DECIDED, SERVED, PageIndex, is_damaged, is_expected
from ostinato.record.rowlog import RowLog

logger = logging.getLogger(__name__)

SLICE = 1_000
"""Rows of one transaction."""
BUSY, IDLE = 0.5, 0.05
"""Share of the time that the feed may take while the page is watched, and while it is not."""
_LOOK_S = 1.0


class Feed:
    """Keeps one index up to date with one log. `watched` says whether somebody watches the page."""

    def __init__(self, log: RowLog, index: PageIndex, watched: Callable[[], bool]) -> None:
        self._log = log
        self._index = index
        self._watched = watched
        self._cursors: dict[str, int] | None = None
        self.unread_turns = 0
        self.unread_decisions = 0

    async def keep(self) -> None:
        """Run until cancelled. A failed step is tried again; a damaged index is rebuilt."""
        loop, failing = asyncio.get_running_loop(), ""
        while True:
            began, more = loop.time(), False
            try:
                more = await self.step()
                failing = ""
            except Exception as error:
                if str(error) != failing:
                    failing = str(error)
                    logger.warning("the page's index: %s", failing, exc_info=not is_expected(error))
                self._cursors = None
                if is_damaged(error):
                    await self._start_over()
            spent = loop.time() - began
            share = BUSY if self._watched() else IDLE
            await asyncio.sleep(spent * (1 / share - 1) if more else _LOOK_S)

    async def decided(self) -> None:
        """Read all decisions. Raises the log's and the driver's errors."""
        newest = await asyncio.to_thread(self._log.newest)
        at = await self._start(newest)
        while await self._decisions(at, newest):
            pass
        self.unread_decisions = 0

    async def step(self) -> bool:
        """Read one slice of each kind that is due; True if more is due. Raises the log's and the driver's errors."""
        newest = await asyncio.to_thread(self._log.newest)
        at = await self._start(newest)
        more = await self._decisions(at, newest)
        more = await self._newer(at, newest) or more
        if not more:
            more = await self._older(at)
        horizon = await self._log.horizon()
        if horizon:
            more = await asyncio.to_thread(self._index.drop, horizon) > 0 or more
        self.unread_decisions = newest - at["decided"]
        self.unread_turns = newest - at["high"] + max(0, at["low"] - horizon)
        return more

    async def _start_over(self) -> None:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._index.start_over)

    async def _start(self, newest: Cursor) -> dict[str, int]:
        at = self._cursors
        if at is None:
            at = await asyncio.to_thread(self._index.cursors)
        if not at or max(at.values()) > newest:  # a log that was restored is another log
            if at:
                await self._start_over()
            at = {"decided": 0, "low": newest, "high": newest}
        self._cursors = at
        return at

    async def _decisions(self, at: dict[str, int], newest: Cursor) -> bool:
        if at["decided"] >= newest:
            return False
        rows, upto = await self._slice(at["decided"], newest, DECIDED)
        await self._write(at, rows, decided=upto)
        return upto < newest

    async def _newer(self, at: dict[str, int], newest: Cursor) -> bool:
        if at["high"] >= newest:
            return False
        rows, upto = await self._slice(at["high"], newest, SERVED)
        await self._write(at, rows, high=upto)
        return upto < newest

    async def _older(self, at: dict[str, int]) -> bool:
        low = at["low"]
        if low <= 0 or low <= await self._log.horizon():
            return False
        start = max(0, low - SLICE)
        rows, upto = await self._slice(start, low, SERVED)
        assert upto == low  # a slice spans `SLICE` cursors at most, so it holds no more rows
        await self._write(at, rows, low=start)
        return start > 0

    async def _slice(
        self, after: Cursor, end: Cursor, kinds: frozenset[type]
    ) -> tuple[list[tuple[Cursor, Row]], Cursor]:
        """At most `SLICE` rows above `after`, and the cursor up to which they are complete."""
        rows: list[tuple[Cursor, Row]] = []
        async for seq, row in self._log.read(after, set(kinds)):
            if seq > end:
                break
            rows.append((seq, row))
            if len(rows) == SLICE:
                return rows, seq
        return rows, end

    async def _write(self, at: dict[str, int], rows: list[tuple[Cursor, Row]], **cursors: int) -> None:
        await asyncio.to_thread(self._index.write, rows, {**at, **cursors})
        at.update(cursors)
