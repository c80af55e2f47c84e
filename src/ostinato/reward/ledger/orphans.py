"""Signals about turns that are not in the log yet: remembered by id, for a while, and not without bound. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.records import Signal
from ostinato.core.seams import Cursor
from ostinato.reward.ledger.entries import Said

OVERHEAD = 128  # bytes that an entry costs besides its ids, roughly

Key = tuple[str, str]
"""Tenant and turn."""


class Orphans:
    """Ids of signals by the turn that they are about. The oldest make room; `expired` and `dropped` count what was forgotten.

    Time is the log's own: the latest time that any row named so far. So whoever reads the same rows forgets the same signals.

    Args:
        most: signals held at most.
        most_bytes: bytes of ids held at most.
        seconds: how long a signal is held.
    """

    def __init__(self, *, most: int, most_bytes: int, seconds: float) -> None:
        self._most, self._most_bytes, self._seconds = most, most_bytes, seconds
        self._held: OrderedDict[Key, tuple[float, list[Said]]] = OrderedDict()  # when the first came, and all
        self.count = 0
        self.bytes = 0
        self.expired = 0
        self.dropped = 0

    def add(self, seq: Cursor, signal: Signal, now: float) -> None:
        """Remember a signal about an unknown turn."""
        key = (signal.tenant, signal.turn)
        said: Said = (seq, signal.id, signal.retracts)
        _, held = self._held.setdefault(key, (now, []))
        self.bytes += _size(said) if held else _size(said) + _room(key)
        held.append(said)
        self.count += 1
        while self.count > self._most or self.bytes > self._most_bytes:
            self.dropped += self._forget(next(iter(self._held)))

    def claim(self, tenant: str, turn: str) -> list[Said]:
        """What was said about a turn that has come, in order; it is held no longer."""
        found = self._held.get((tenant, turn))
        if found is None:
            return []
        self._forget((tenant, turn))
        return found[1]

    def expire(self, now: float) -> None:
        """Forget what has waited too long."""
        while self._held:
            key, (since, _) = next(iter(self._held.items()))
            if now - since <= self._seconds:
                return
            self.expired += self._forget(key)

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        held = [[*key, since, [list(each) for each in said]] for key, (since, said) in self._held.items()]
        return {"held": held, "expired": self.expired, "dropped": self.dropped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`."""
        held: Sequence[Sequence[Any]] = state["held"]
        self._held = OrderedDict(
            ((tenant, turn), (float(since), [(seq, id, retracts) for seq, id, retracts in said]))
            for tenant, turn, since, said in held
        )
        self.count = sum(len(said) for _, said in self._held.values())
        self.bytes = sum(_room(key) + sum(map(_size, said)) for key, (_, said) in self._held.items())
        self.expired, self.dropped = int(state["expired"]), int(state["dropped"])

    def _forget(self, key: Key) -> int:
        _, said = self._held.pop(key)
        self.count -= len(said)
        self.bytes -= _room(key) + sum(map(_size, said))
        return len(said)


def _room(key: Key) -> int:
    return len(key[0].encode()) + len(key[1].encode()) + OVERHEAD


def _size(said: Said) -> int:
    return len(said[1].encode()) + len((said[2] or "").encode())
