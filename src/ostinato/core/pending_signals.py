"""Pending signals, which arrive before their turn: kept for a limited time and within bounds per tenant. Also orders signals. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ostinato.core.records import Signal

S = TypeVar("S")

OVERHEAD = 128  # approximate bytes of the signals about a turn besides their ids


def order_of(signal: Signal) -> tuple[float, float, str]:
    """Return the sort key of a signal: when the event happened, but not after its arrival, since a client's clock may be ahead; then when
    the client says it happened; then the id.
    """
    return min(signal.occurred_at, signal.received_at), signal.occurred_at, signal.id


class _TenantSignals(Generic[S]):
    """One tenant's signals by turn, oldest first: the arrival time of the first signal, and all signals."""

    __slots__ = ("bytes", "count", "turns")

    def __init__(self) -> None:
        self.turns: OrderedDict[str, tuple[float, list[S]]] = OrderedDict()
        self.count = 0
        self.bytes = 0


class PendingSignals(Generic[S]):
    """Signals by the turn that they are about; `expired` and `dropped` count those that were discarded.

    When there are too many, those about the oldest turn of the tenant with most signals are dropped, so that no flood costs another
    tenant its signals. Time is the latest time in any row so far, so that every reader of the same rows discards the same signals.

    Args:
        most: most signals kept.
        seconds: how long a signal waits for its turn.
        most_each: most signals kept about one turn, the first ones; None: any number.
        most_bytes: most bytes kept, including ids of tenants and turns; None: any number.
        size: returns the bytes of a signal.

    Example::

        pending = PendingSignals[Signal](most=1000, seconds=3600.0)
        pending.add("acme", "t7:0", signal)
        pending.claim("acme", "t7:0")  # [signal], once the turn has come
    """

    def __init__(
        self,
        *,
        most: int,
        seconds: float,
        most_each: int | None = None,
        most_bytes: int | None = None,
        size: Callable[[S], int] = lambda signal: 0,
    ) -> None:
        self._most, self._seconds = most, seconds
        self._most_each, self._most_bytes, self._size = most_each, most_bytes, size
        self._tenants: dict[str, _TenantSignals[S]] = {}
        self.time = 0.0
        self.count = 0
        self.bytes = 0
        self.expired = 0
        self.dropped = 0

    def add(self, tenant: str, turn: str, signal: S) -> None:
        """Keep a signal about an unknown turn."""
        held = self._tenants.get(tenant)
        if held is not None and turn in held.turns and len(held.turns[turn][1]) == self._most_each:
            self.dropped += 1
            return
        self._put(tenant, turn, self.time, signal)
        while self.count > self._most or (self._most_bytes is not None and self.bytes > self._most_bytes):
            by = "count" if self.count > self._most else "bytes"
            largest, most = max(self._tenants.items(), key=lambda each: (getattr(each[1], by), each[0]))
            self.dropped += len(self.claim(largest, next(iter(most.turns))))

    def claim(self, tenant: str, turn: str) -> list[S]:
        """Remove and return the signals about a turn that has arrived, in order."""
        held = self._tenants.get(tenant)
        if held is None or turn not in held.turns:
            return []
        _, signals = held.turns.pop(turn)
        self._count(held, -len(signals), -_overhead_bytes(tenant, turn) - sum(map(self._size, signals)))
        if not held.turns:
            del self._tenants[tenant]
        return signals

    def advance(self, at: float) -> None:
        """Advance the time to that of a row, and discard the signals that have waited too long."""
        if at <= self.time:
            return
        self.time = at
        for tenant, held in list(self._tenants.items()):
            while held.turns:
                turn, (since, _) = next(iter(held.turns.items()))
                if at - since <= self._seconds:
                    break
                self.expired += len(self.claim(tenant, turn))

    def snapshot(self) -> dict[str, Any]:
        """Return everything but the time, as JSON types if the signals are."""
        held = [
            [tenant, turn, since, list(signals)]
            for tenant, theirs in self._tenants.items()
            for turn, (since, signals) in theirs.turns.items()
        ]
        return {"held": held, "expired": self.expired, "dropped": self.dropped}

    def restore(self, state: Mapping[str, Any], time: float, read: Callable[[Sequence[Any]], S]) -> None:
        """Restore the state from a `snapshot`, at a time; `read` makes a signal of its JSON."""
        self._tenants, self.count, self.bytes, self.time = {}, 0, 0, time
        for tenant, turn, since, signals in state["held"]:
            for signal in signals:
                self._put(tenant, turn, float(since), read(signal))
        self.expired, self.dropped = int(state["expired"]), int(state["dropped"])

    def _put(self, tenant: str, turn: str, since: float, signal: S) -> None:
        held = self._tenants.setdefault(tenant, _TenantSignals())
        fresh = turn not in held.turns
        held.turns.setdefault(turn, (since, []))[1].append(signal)
        self._count(held, 1, self._size(signal) + (_overhead_bytes(tenant, turn) if fresh else 0))

    def _count(self, held: _TenantSignals[S], signals: int, size: int) -> None:
        held.count += signals
        held.bytes += size
        self.count += signals
        self.bytes += size


def _overhead_bytes(tenant: str, turn: str) -> int:
    return len(tenant.encode()) + len(turn.encode()) + OVERHEAD
