"""The worker's side of the door: outcomes read over a connection that may be lost at any moment."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ostinato.core.records import Batch, Holdback, PolicyVersion, Row
from ostinato.core.seams import Cursor
from ostinato.worlds.harness.gateway import GatewayCalls
from ostinato.worlds.remote.rollout_server import OUTCOMES

_UNKNOWN = PolicyVersion(number=0, hash="")


class FarOutcomes:
    """Outcomes of this worker's turns, read through the door as `Spending` reads them from a log. A batch has only its step and our turns.

    Example: ``Spending(FarOutcomes(gateway), after=await FarOutcomes(gateway).end())``
    """

    def __init__(self, gateway: GatewayCalls) -> None:
        self._gateway = gateway

    async def end(self) -> Cursor:
        """Where the log ends now. Raises Unavailable."""
        return int((await self._gateway.call("GET", f"{OUTCOMES}?after=end"))["cursor"])

    async def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """Rows above `after`, page by page. A page counts as read with its last row. Raises Unavailable."""
        while True:
            page = await self._gateway.call("GET", f"{OUTCOMES}?after={after}")
            if page["cursor"] == after:
                return
            for turn, reason in page["held"]:
                yield after, Holdback(turn=str(turn), reason=str(reason), at=0.0)
            after = int(page["cursor"])
            taken = tuple(map(str, page["taken"]))
            yield after, Batch(step=int(page["step"]), turns=taken, credits=(), reference=_UNKNOWN, at=0.0)
