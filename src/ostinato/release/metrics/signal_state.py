"""The signals about one turn, independent of the order in which they arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ostinato.core.records import Signal

MOST_SIGNALS = 100
"""The most signals kept of one turn: the first to be written."""


@dataclass(slots=True)
class _Kept:
    """A signal, whose retraction may arrive before it. `received_at` and `retracted_at` are times of receipt by the server's clock."""

    name: str = ""
    value: float = math.nan
    occurred_at: float = 0.0
    received_at: float = math.inf
    retracted_at: float | None = None


class Said:
    """The signals about one turn.

    Of several signals with the same name the last to have occurred counts, so that a changed value replaces the earlier one, in
    whatever order they arrive. A retracted signal does not count.
    """

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[str, _Kept] = {}

    def __len__(self) -> int:
        """How many signals are remembered."""
        return len(self._by_id)

    def hear(self, signal: Signal) -> None:
        """Add a signal. Beyond `MOST_SIGNALS`, only retractions of known signals are taken."""
        about = signal.retracts or signal.id
        kept = self._by_id.get(about)
        if kept is None:
            if len(self._by_id) >= MOST_SIGNALS:
                return
            kept = self._by_id[about] = _Kept()
        if signal.retracts is not None:
            before = signal.received_at if kept.retracted_at is None else kept.retracted_at
            kept.retracted_at = min(before, signal.received_at)
        elif not kept.name:
            kept.name, kept.value = signal.name, signal.value
            kept.occurred_at, kept.received_at = signal.occurred_at, signal.received_at

    def values(self, until: float = math.inf) -> dict[str, float]:
        """By name, the value that stood at `until`: signals and retractions received later are ignored."""
        standing = [
            (kept.occurred_at, id, kept)
            for id, kept in self._by_id.items()
            if kept.received_at <= until
            and (kept.retracted_at is None or kept.retracted_at > until)
            and not math.isnan(kept.value)
        ]
        if len(standing) > 1:
            standing.sort(key=lambda each: each[:2])
        return {kept.name: kept.value for _, _, kept in standing}
