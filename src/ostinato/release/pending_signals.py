"""Signals about turns that are not in the log yet: kept for a limited time and in limited number. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace

from ostinato.core.records import Signal

_Said = tuple[float, list[Signal]]
"""When the first signal about a turn was read, and all signals about it."""


class EarlySignals:
    """Signals by tenant and turn, oldest first.

    When there are too many, those about the oldest turn of the tenant with most are dropped: no flood costs another tenant its signals.
    Time is the latest time in any row so far.

    Args:
        most: signals held at most.
        most_each: signals held about one turn at most; the first are kept.
        seconds: how long to wait for a turn.
    """

    def __init__(self, *, most: int, most_each: int, seconds: float) -> None:
        self._most, self._most_each, self._seconds = most, most_each, seconds
        self._turns: dict[str, OrderedDict[str, _Said]] = {}
        self._counts: Counter[str] = Counter()  # signals, by tenant
        self._time = 0.0

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, signal: Signal) -> None:
        """Keep a signal, without its comment and correction."""
        turns = self._turns.setdefault(signal.tenant, OrderedDict())
        _, said = turns.setdefault(signal.turn, (self._time, []))
        if len(said) >= self._most_each:
            return
        said.append(replace(signal, comment=None, correction=None))
        self._counts[signal.tenant] += 1
        if len(self) > self._most:
            tenant, _ = self._counts.most_common(1)[0]
            self.claim(tenant, next(iter(self._turns[tenant])))

    def claim(self, tenant: str, turn: str) -> list[Signal]:
        """The signals about a turn, in order; they are kept no longer."""
        turns = self._turns.get(tenant, {})
        _, said = turns.pop(turn, (0.0, []))
        self._counts[tenant] -= len(said)
        if not turns:
            self._turns.pop(tenant, None)
            del self._counts[tenant]
        return said

    def advance(self, at: float) -> None:
        """Advance the time to that of a row, and forget signals that have waited too long."""
        if at <= self._time:
            return
        self._time = at
        for tenant, turns in list(self._turns.items()):
            while turns:
                turn, (since, _) = next(iter(turns.items()))
                if at - since <= self._seconds:
                    break
                self.claim(tenant, turn)
