"""Tells the door which turns in the log belong to a worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from ostinato.core.records import Arm, Batch, Holdback, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.worlds.remote.worker_requests import belongs

_KEPT = 200_000
_PAGE = 500


class OwnTurns:
    """Reads a worker's own turns and their outcomes from the run's log.

    Example: ``await OwnTurns(log).groups("acme", ["chatcmpl-3f:0"])  # {"chatcmpl-3f:0": "acme/w3f.0"}``
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: OrderedDict[str, tuple[Arm, str, str | None]] = OrderedDict()

    async def groups(self, worker: str, turns: Iterable[str]) -> dict[str, str | None]:
        """The worker's own turns among `turns`, each with its group's name in the log. Raises Unavailable."""
        asked = list(dict.fromkeys(turns))
        unknown = [turn for turn in asked if turn not in self._known]
        for turn in await self._log.find(Turn, [(turn,) for turn in unknown]) if unknown else ():
            self._known[turn.id] = (turn.arm, turn.episode, turn.group)
        found = {
            turn: known[2]
            for turn in asked
            if (known := self._known.get(turn)) is not None and belongs(worker, known[0], known[1])
        }
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    def episode(self, turn: str) -> str | None:
        """The episode of a turn that `groups` looked up recently, or None."""
        known = self._known.get(turn)
        return None if known is None else known[1]

    async def end(self) -> Cursor:
        """Where the log ends now. Raises Unavailable."""
        return await self._log.append()

    async def outcomes(self, worker: str, after: Cursor) -> dict[str, Any]:
        """Outcomes of the worker's turns in the next rows of the log: `taken` by the trainer, or `held` back with the reason. `cursor` is
        where to continue, `step` the highest step in these rows. Raises Unavailable.
        """
        cursor, step, seen = after, 0, 0
        taken, held = list[str](), list[tuple[str, str]]()
        async for place, row in self._log.read(after, {Batch, Holdback}):
            cursor, seen = place, seen + 1
            if isinstance(row, Batch):
                step = max(step, row.step)
                taken += row.turns
            elif isinstance(row, Holdback):
                held.append((row.turn, row.reason))
            if seen >= _PAGE:
                break
        own = await self.groups(worker, [*taken, *(turn for turn, _ in held)])
        return {
            "cursor": cursor,
            "step": step,
            "taken": [turn for turn in taken if turn in own],
            "held": [[turn, reason] for turn, reason in held if turn in own],
        }
