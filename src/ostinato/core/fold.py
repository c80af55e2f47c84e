"""Folds of the log with snapshots: a follower that restores a snapshot, checks it, catches up with the log and saves.

A snapshot is used only if the log still has the row that it ended with. Another log, or one restored from an older backup, is read
from the start. So a process that was killed at any instant continues as one that was not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Generic, Protocol, TypeVar

from ostinato.core.notices import Forgotten
from ostinato.core.records import Row, identity
from ostinato.core.seams import Cursor, Folds, Log

logger = logging.getLogger(__name__)

SAVE_S = 3600.0
"""Seconds after which a snapshot is saved even after few rows, because retention drops no row that no snapshot covers."""

_LAST = "last"  # the key of a snapshot under which the follower stores which row it ended with


class Fold(Protocol):
    """State that is a function of the log's rows alone, applied in order (a reducer)."""

    @property
    def kinds(self) -> Collection[type]:
        """The kinds of rows that it applies."""
        ...

    async def begin(self, horizon: Cursor) -> Cursor:
        """Reset the state. Returns the place after which to read: at least `horizon`, up to which rows were dropped."""
        ...

    def apply(self, seq: Cursor, row: Row) -> None:
        """Apply the row at place `seq`. Raises Corrupt if the log contradicts itself."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON types; a key ``last`` would be overwritten."""
        ...

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore the state from `state`; return False for another version's.

        Raises AttributeError, LookupError, TypeError or ValueError for damaged state. Unless it returns True, only `begin` may be called.
        """
        ...


F = TypeVar("F", bound=Fold)


class FoldFollower(Generic[F]):
    """Keeps a fold up to date with the log. Only one follower of a name may save.

    Args:
        log: the log to read.
        fold: applies the rows.
        name: the name of the snapshots.
        folds: where they are saved; None: nowhere.
        every: rows between two snapshots; new rows are also saved `SAVE_S` after the last snapshot.
        gaps: True if a snapshot may be used although retention has since dropped rows that it does not cover.

    Example::

        follower = FoldFollower(log, LedgerFold(config), name="desk", folds=folds, every=50_000)
        await follower.catch_up()
        follower.fold.ledger
    """

    def __init__(
        self, log: Log, fold: F, *, name: str, folds: Folds | None = None, every: int, gaps: bool = False
    ) -> None:
        self.fold = fold
        self.cursor: Cursor = 0
        self._log, self._folds = log, folds
        self._name, self._every, self._gaps = name, every, gaps
        self._started = False
        self._last: list[Any] = []  # kind and identity of the row at the cursor
        self._unsaved = 0
        self._saved_at = 0.0  # when the last snapshot was saved, or loaded, by the event loop's clock
        self._forgot = False  # the stored snapshot may name a person who was forgotten since

    async def catch_up(self, *, saving: bool = True) -> None:
        """Apply the new rows, and save regularly. Raises Corrupt, StorageFull, Unavailable."""
        async for _ in self.rows(saving=saving):
            pass

    async def rows(self, *, saving: bool = True) -> AsyncIterator[Row]:
        """Catch up as `catch_up` does, and yield each row after it was applied. A snapshot is saved once the caller asks for the next row,
        and at the end if the last one is old, or may name a person who was forgotten.
        """
        if not self._started:
            await self._start()
        async for seq, row in self._log.read(self.cursor, set(self.fold.kinds)):
            self.fold.apply(seq, row)
            self.cursor, self._last = seq, _row_key(row)
            self._unsaved += 1
            self._forgot |= isinstance(row, Forgotten)
            yield row
            if saving and self._unsaved >= self._every:
                await self.save()
        if saving and (self._forgot or asyncio.get_running_loop().time() - self._saved_at >= SAVE_S):
            await self.save()

    async def save(self) -> None:
        """Save a snapshot, if there are new rows. Raises StorageFull; then the previous one is kept."""
        if self._folds is not None and self._unsaved:
            self._saved_at = asyncio.get_running_loop().time()  # also if it fails: a full disk is not retried sooner
            await self._folds.save(self._name, self.cursor, {**self.fold.state(), _LAST: self._last})
            self._unsaved, self._forgot = 0, False

    async def _start(self) -> None:
        horizon = await self._log.horizon()
        found = None if self._folds is None else await self._folds.load(self._name)
        if (
            found is not None
            and await self._log_continues(*found, horizon)
            and restore_fold(self.fold, found[1], self._name)
        ):
            self.cursor, self._last = max(found[0], horizon), list(found[1][_LAST])
        else:
            self.cursor = await self.fold.begin(horizon)
        self._started, self._saved_at = True, asyncio.get_running_loop().time()

    async def _log_continues(self, cursor: Cursor, state: Mapping[str, Any], horizon: Cursor) -> bool:
        """Return True if the log continues where this snapshot ended."""
        if cursor <= horizon:
            return self._gaps or cursor == horizon
        found = await anext(aiter(self._log.read(cursor - 1, set(self.fold.kinds))), None)
        return found is not None and found[0] == cursor and _row_key(found[1]) == state.get(_LAST)


def restore_fold(fold: Fold, state: Mapping[str, Any], name: str) -> bool:
    """Restore a snapshot's state. Returns False if it is another version's, or, with a warning, if it is damaged."""
    try:
        if not isinstance(state[_LAST], list):
            raise ValueError(f"{_LAST!r} is no list")
        return fold.restore(state)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        logger.warning("snapshot %s cannot be used, the log is read instead: %s: %s", name, type(error).__name__, error)
        return False


def _row_key(row: Row) -> list[Any]:
    return [type(row).__name__, *identity(row)]
