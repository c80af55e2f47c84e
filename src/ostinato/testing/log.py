"""`MemoryLog`: the append-only log in memory, for tests of code that writes to a log or reads from one.

It keeps the contract of `core.seams.Log`, but nothing outlives the process, and a test can make it slow or full.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ostinato.core.errors import StorageFull
from ostinato.core.records import Identity, Row, Signal, Turn, identity
from ostinato.core.seams import Cursor, R


class MemoryLog:
    """Implements `core.seams.Log`.

    Controls: `delay_s` is slept before each write; `full = True` makes `append` raise StorageFull with nothing written.
    Observations: `rows` (in order; the row at position i has sequence number i + 1), `appends` (calls that wrote).

    Example::

        log = MemoryLog()
        await log.append(turn, signal)
        assert [row async for _, row in log.read(0, {Signal})] == [signal]
    """

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.full = False
        self.rows: list[Row] = []
        self.appends = 0
        self._known: dict[tuple[type, Identity], Row] = {}

    async def append(self, *rows: Row) -> Cursor:
        """Write all rows or none. A row whose identity is already in the log is ignored. Raises StorageFull."""
        if rows:
            await asyncio.sleep(self.delay_s)
        if self.full:
            raise StorageFull("The log is full; free some space and send again. Nothing of this call was kept.")
        for row in rows:
            key = (type(row), identity(row))
            if key not in self._known:
                self._known[key] = row
                self.rows.append(row)
        self.appends += bool(rows)
        return len(self.rows)

    async def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """Yield the rows of the given kinds above `after`, in order, up to the moment of the call."""
        for sequence, row in enumerate(self.rows[after:], after + 1):
            if type(row) in kinds:
                yield sequence, row

    async def find(self, kind: type[R], identities: Sequence[Identity]) -> list[R]:
        """Return the rows of one kind with these identities, in the requested order; unknown ones are left out."""
        found = (self._known.get((kind, each)) for each in identities)
        return [row for row in found if isinstance(row, kind)]

    async def places(self, kind: type[Row], identities: Sequence[Identity]) -> list[Cursor]:
        """Return the sequence numbers of the rows of one kind with these identities; unknown ones are left out."""
        wanted = {(kind, each) for each in identities if (kind, each) in self._known}
        found = dict[tuple[type, Identity], Cursor]()
        for place in range(len(self.rows), 0, -1):  # backwards, since most requested rows are new
            if len(found) == len(wanted):
                break
            row = self.rows[place - 1]
            if type(row) is kind and (key := (kind, identity(row))) in wanted:
                found[key] = place
        return [found[kind, each] for each in identities if (kind, each) in found]

    async def horizon(self) -> Cursor:
        """Return 0: no row is ever dropped."""
        return 0

    async def before_last(self, count: int, kind: type[Row]) -> Cursor:
        """Return the cursor above which the newest `count` rows of a kind are; 0 if there are fewer."""
        left = count
        for place in range(len(self.rows) - 1, -1, -1) if count > 0 else ():
            left -= type(self.rows[place]) is kind
            if not left:
                return place
        return 0

    def turns(self) -> list[Turn]:
        """Return all turns in the order of writing."""
        return [row for row in self.rows if isinstance(row, Turn)]

    def signals(self) -> list[Signal]:
        """Return all signals in the order of writing."""
        return [row for row in self.rows if isinstance(row, Signal)]


class MemoryFolds:
    """Implements `core.seams.Folds`. Observations: `kept` (name -> cursor and state as JSON text)."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Cursor, str]] = {}

    async def save(self, name: str, cursor: Cursor, state: Mapping[str, Any]) -> None:
        """Save a copy of the state as JSON."""
        self.kept[name] = (cursor, json.dumps(state))

    async def load(self, name: str) -> tuple[Cursor, dict[str, Any]] | None:
        """Return a copy of the saved cursor and state, or None."""
        cursor, text = self.kept.get(name, (0, ""))
        return (cursor, json.loads(text)) if text else None
