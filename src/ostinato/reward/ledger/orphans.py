"""Signals about turns that are not in the log yet: remembered by id, for a limited time and in limited number. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ostinato.core.records import Signal
from ostinato.core.seams import Cursor
from ostinato.reward.ledger.entries import Said

OVERHEAD = 128  # bytes that an entry costs besides its ids, roughly

Key = tuple[str, str]
"""Tenant and turn."""


@dataclass(slots=True)
class _Held:
    """One tenant's signals: by turn, oldest first, the time of the first signal and all signals."""

    turns: OrderedDict[str, tuple[float, list[Said]]] = field(
        default_factory=OrderedDict[str, tuple[float, list[Said]]]
    )
    count: int = 0
    bytes: int = 0


class Orphans:
    """Ids of signals by the turn that they are about; `expired` and `dropped` count those that were forgotten.

    When there are too many, the oldest of the tenant that holds most are dropped, so that no flood costs another tenant its signals.
    Time is the latest time in any row so far, so that every reader of the same rows forgets the same signals.

    Args:
        most: signals held at most.
        most_bytes: bytes of ids held at most.
        seconds: how long a signal is held.
    """

    def __init__(self, *, most: int, most_bytes: int, seconds: float) -> None:
        self._most, self._most_bytes, self._seconds = most, most_bytes, seconds
        self._tenants: dict[str, _Held] = {}
        self.count = 0
        self.bytes = 0
        self.expired = 0
        self.dropped = 0

    def add(self, seq: Cursor, signal: Signal, now: float) -> None:
        """Remember a signal about an unknown turn."""
        held = self._tenants.setdefault(signal.tenant, _Held())
        self._put((signal.tenant, signal.turn), held, now, (seq, signal.id, signal.retracts))
        while self.count > self._most or self.bytes > self._most_bytes:
            by = "count" if self.count > self._most else "bytes"
            tenant, most = max(self._tenants.items(), key=lambda each: (getattr(each[1], by), each[0]))
            self.dropped += len(self._forget((tenant, next(iter(most.turns)))))

    def claim(self, tenant: str, turn: str) -> list[Said]:
        """The signals about a turn that has come, in order; they are held no longer."""
        held = self._tenants.get(tenant)
        return [] if held is None or turn not in held.turns else self._forget((tenant, turn))

    def expire(self, now: float) -> None:
        """Forget the signals of turns that have been awaited too long."""
        for tenant, held in list(self._tenants.items()):
            while held.turns:
                turn, (since, _) = next(iter(held.turns.items()))
                if now - since <= self._seconds:
                    break
                self.expired += len(self._forget((tenant, turn)))

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        held = [
            [tenant, turn, since, [list(each) for each in said]]
            for tenant, theirs in self._tenants.items()
            for turn, (since, said) in theirs.turns.items()
        ]
        return {"held": held, "expired": self.expired, "dropped": self.dropped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`."""
        self._tenants, self.count, self.bytes = {}, 0, 0
        for tenant, turn, since, said in state["held"]:
            held = self._tenants.setdefault(tenant, _Held())
            for seq, id, retracts in said:
                self._put((tenant, turn), held, float(since), (seq, id, retracts))
        self.expired, self.dropped = int(state["expired"]), int(state["dropped"])

    def _put(self, key: Key, held: _Held, since: float, said: Said) -> None:
        fresh = key[1] not in held.turns
        held.turns.setdefault(key[1], (since, []))[1].append(said)
        self._count(held, 1, _size(said) + (_room(key) if fresh else 0))

    def _forget(self, key: Key) -> list[Said]:
        held = self._tenants[key[0]]
        _, said = held.turns.pop(key[1])
        self._count(held, -len(said), -_room(key) - sum(map(_size, said)))
        if not held.turns:
            del self._tenants[key[0]]
        return said

    def _count(self, held: _Held, signals: int, size: int) -> None:
        held.count += signals
        held.bytes += size
        self.count += signals
        self.bytes += size


def _room(key: Key) -> int:
    return len(key[0].encode()) + len(key[1].encode()) + OVERHEAD


def _size(said: Said) -> int:
    return len(said[1].encode()) + len((said[2] or "").encode())
