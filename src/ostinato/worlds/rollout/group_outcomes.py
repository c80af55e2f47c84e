"""What became of the groups that were told, as read from the log: the trainer's batches, and the desk's reasons for holding back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

from ostinato.core.records import Batch, Holdback, Row
from ostinato.core.seams import Cursor

_OF_ONE_TURN = ("finish:", "arm:", "empty", "greedy", "top_p", "cold", "purpose:", "late_group", "gold", "gone")
"""Reasons that hold back a turn and not its group."""


class OutcomeRows(Protocol):
    """The run's log, or a remote view of it."""

    def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """As `Log.read`."""
        ...


class Spending:
    """Finds the groups that the trainer has taken, or that were held back.

    Args:
        log: holds the outcomes.
        after: the cursor after which there may be outcomes.

    Example::

        spending = Spending(log, after=0)
        spending.expect(3, ["chatcmpl-3f:0"])
        await spending.look()  # [3], once a batch holds it
    """

    def __init__(self, log: OutcomeRows, after: Cursor) -> None:
        self._log = log
        self.cursor = after
        self.steps = 0
        self._of: dict[str, int] = {}
        self._found: dict[int, None] = {}  # and not returned yet

    def expect(self, number: int, turns: Iterable[str]) -> None:
        """Expect the outcome of a group with these graded turns. Call this before the group is told, or its outcome may be missed."""
        self._of |= dict.fromkeys(turns, number)

    async def look(self) -> Sequence[int]:
        """The numbers of the groups that were spent since the last look. Raises Unavailable, Corrupt."""
        found = self._found  # what was found before a failure is returned the next time
        async for place, row in self._log.read(self.cursor, {Batch, Holdback}):
            self.cursor = place
            if isinstance(row, Batch):
                self.steps = max(self.steps, row.step)
                found.update(dict.fromkeys(self._of[turn] for turn in row.turns if turn in self._of))
            elif isinstance(row, Holdback) and row.turn in self._of and not row.reason.startswith(_OF_ONE_TURN):
                found[self._of[row.turn]] = None
        if found:
            self._of = {turn: number for turn, number in self._of.items() if number not in found}
        self._found = {}
        return list(found)
