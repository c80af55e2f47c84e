"""Keeps the router up to date with the log: starts from its last snapshot, reads on from there, and saves it again regularly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.errors import OstinatoError
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Reward, Turn, identity
from ostinato.core.seams import Clock, Cursor, Folds, Log
from ostinato.release.auto.config import RouterConfig
from ostinato.release.auto.router import Router

logger = logging.getLogger(__name__)

NAME = "auto"
_KINDS = {Turn, Reward}


class FoldedRouter:
    """A router over a log. One writer: the process that serves.

    A snapshot is used only if the log still holds the row that it ended with; otherwise the whole log is read.

    Args:
        log: the log to read, and to write an alarm to if its propensities are refuted.
        folds: where the router's state is saved.
        clock: Unix seconds, for alarms.
        arms: the names of the arms.
        config: the router's settings.

    Example::

        folded = FoldedRouter(log, folds, clock, ["live", "large"], RouterConfig())
        await folded.catch_up()
        folded.router.odds({"live", "large"})
    """

    def __init__(self, log: Log, folds: Folds, clock: Clock, arms: Sequence[str], config: RouterConfig) -> None:
        self.router = Router(arms, config)
        self._log, self._folds, self._clock = log, folds, clock
        self._arms, self._config = arms, config
        self._cursor: Cursor | None = None
        self._last: list[Any] = []  # kind and identity of the row at the cursor
        self._unsaved = 0
        self._refuted: list[str] = []

    async def catch_up(self, *, telling: bool = True) -> None:
        """Read the new rows; with `telling`, also save regularly and write alarms, as the one writer may. Raises Corrupt, StorageFull."""
        if self._cursor is None:
            self._cursor = await self._start()
        async for seq, row in self._log.read(self._cursor, _KINDS):
            assert isinstance(row, Turn | Reward)
            self.router.apply(row)
            self._cursor, self._last = seq, [type(row).__name__, *identity(row)]
            self._unsaved += 1
            if telling and self._unsaved >= self._config.fold_rows:
                await self.save()
        if telling:
            await self._tell()

    async def save(self) -> None:
        """Save the router's state. Raises StorageFull; the previous snapshot is kept then."""
        if self._unsaved and self._cursor is not None:
            await self._folds.save(NAME, self._cursor, {"router": self.router.state(), "last": self._last})
            self._unsaved = 0

    async def run(self) -> None:
        """Keep up with the log until cancelled. Errors are logged and retried; the odds then stay as they are."""
        while True:
            try:
                await self.catch_up()
            except OstinatoError as error:
                logger.warning("auto: the shares stay as they are, the log was not read to its end: %s", error)
            await asyncio.sleep(self._config.poll_s)

    async def _start(self) -> Cursor:
        found = await self._folds.load(NAME)
        if found is not None and await self._continues(*found) and self._restore(found[1]):
            self._last = list(found[1]["last"])
            return found[0]
        self.router.forget()
        return await self._log.horizon()

    async def _continues(self, cursor: Cursor, state: Mapping[str, Any]) -> bool:
        """True if the log continues where this snapshot ended."""
        found = await anext(aiter(self._log.read(cursor - 1, _KINDS)), None)
        if found is None:
            return False
        seq, row = found
        return seq == cursor and [type(row).__name__, *identity(row)] == state.get("last")

    def _restore(self, state: Mapping[str, Any]) -> bool:
        try:
            self.router.restore(state["router"])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            logger.warning("auto: the saved router cannot be used, the log is read instead: %s", error)
            return False
        return True

    async def _tell(self) -> None:
        """Raise an alarm for propensities that are refuted; the same one is in the log once."""
        wrong = self.router.propensities.wrong(self._config.alpha)
        if wrong != self._refuted:
            await self._log.append(
                Alarm(
                    id=f"{NAME}:propensities:{','.join(wrong)}",
                    name=f"{NAME}:propensities",
                    state=AlarmState.RAISED,
                    reason=f"the logged propensities of {', '.join(wrong)} are not what was drawn; trust no estimate of them",
                    at=self._clock(),
                )
            )
            self._refuted = wrong
