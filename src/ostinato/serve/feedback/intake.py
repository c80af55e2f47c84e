"""Writes signals to the log and reports the status of each.

An event about another tenant's turn is answered exactly like an event about a turn that does not exist, so that it does not reveal which
ids others have. Both are kept as they came; a reward function is never shown a signal of another tenant.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar

from ostinato.core.errors import OstinatoError, StorageFull, Unavailable
from ostinato.core.records import Quarantine, Reward, Signal, Turn, identity
from ostinato.serve.parts import Parts

_REMEMBERED = 100_000  # turns
_V = TypeVar("_V")


class Status(StrEnum):
    """The status of an event. Except for `changed`, the event is in the log.

    `early`: no turn of yours has this id so far. `repeated`: the same event was taken before. `changed`: a different event was taken
    under this id, and stays. `late`: the turn's reward was decided without it. `retracted`: the named event no longer counts.
    """

    ACCEPTED = "accepted"
    EARLY = "early"
    REPEATED = "repeated"
    CHANGED = "changed"
    LATE = "late"
    RETRACTED = "retracted"


class Intake:
    """Takes signals in.

    Example: ``statuses = await intake.take(parse_feedback(body, tenant="acme", now=now))``
    """

    def __init__(self, parts: Parts) -> None:
        self._log = parts.log
        self._writes = parts.writes
        self._metrics = parts.metrics
        self._timeout_s = parts.config.store_timeout_s
        self._room, self._least_free_mb = parts.room, parts.config.least_free_mb
        self._tenants: OrderedDict[str, str] = OrderedDict()  # turn -> its tenant
        self._decided: OrderedDict[str, None] = OrderedDict()  # turns whose reward is known to be decided

    def turn(self, turn: Turn) -> None:
        """Note a turn in the log, so that feedback about it needs no lookup."""
        _remember(self._tenants, turn.id, turn.tenant)

    async def take(self, signals: Sequence[Signal]) -> list[Status]:
        """Write one tenant's signals, durable on return. Returns their statuses in order. Raises StorageFull, Unavailable."""
        self._check_room()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._look_up({signal.turn for signal in signals}, signals[0].tenant)
                late = {signal.turn for signal in signals if signal.turn in self._decided}
                await asyncio.shield(self._writes.begin(self._log.append(*signals)))
                stored = await self._stored(signals)
        except TimeoutError:
            self._metrics.store_error()
            raise Unavailable(
                f"The log did not confirm the events within {self._timeout_s:g} s; they may be kept or not. "
                "Send them again with the same ids."
            ) from None
        except OstinatoError:
            self._metrics.store_error()
            raise
        statuses: list[Status] = []
        told: set[str] = set()
        for signal in signals:
            status = self._status(signal, stored, told, late)
            told.add(signal.id)
            foreign = self._tenants.get(signal.turn, signal.tenant) != signal.tenant
            self._metrics.event(signal.tenant, signal.name, status.value, foreign=foreign)
            statuses.append(status)
        return statuses

    def _check_room(self) -> None:
        """Raise StorageFull while what is left of the disk is for turns, which cannot be sent again."""
        if self._room is not None and self._room() < 1e6 * self._least_free_mb:
            raise StorageFull(
                f"The log's disk has less than {self._least_free_mb:g} MB left (serve.least_free_mb), which is kept for turns; free some "
                "space and send the events again with the same ids."
            )

    def _status(self, signal: Signal, stored: dict[str, Signal], told: set[str], late: set[str]) -> Status:
        kept = stored.get(signal.id, signal)
        if not _same(kept, signal):
            return Status.CHANGED
        if kept.received_at != signal.received_at or signal.id in told:
            return Status.REPEATED
        if self._tenants.get(signal.turn) != signal.tenant:
            return Status.EARLY
        if signal.turn in late:
            return Status.LATE
        if signal.retracts is not None:
            return Status.RETRACTED if signal.retracts in stored else Status.EARLY
        return Status.ACCEPTED

    async def _look_up(self, turns: Iterable[str], tenant: str) -> None:
        """Look up the turns' tenants and which turns are decided, where this is not yet known."""
        unknown = [(turn,) for turn in turns if self._tenants.get(turn) != tenant]
        if unknown:
            for turn in await self._log.find(Turn, unknown):
                self.turn(turn)
        open_ = [(turn,) for turn in turns if self._tenants.get(turn) == tenant and turn not in self._decided]
        if open_:
            for kind in (Reward, Quarantine):
                for row in await self._log.find(kind, open_):
                    _remember(self._decided, row.turn, None)

    async def _stored(self, signals: Sequence[Signal]) -> dict[str, Signal]:
        """The signals that the log now holds under the ids that these signals have or retract."""
        ids = dict.fromkeys(identity(signal) for signal in signals)
        ids |= dict.fromkeys((signal.tenant, signal.retracts) for signal in signals if signal.retracts is not None)
        return {row.id: row for row in await self._log.find(Signal, list(ids))}


def _same(one: Signal, other: Signal) -> bool:
    """True if both have the same content. `occurred_at` is compared only if both senders gave it: otherwise it is the arrival time."""
    told = one.occurred_at != one.received_at and other.occurred_at != other.received_at
    at = one.occurred_at if told else 0.0
    return replace(one, received_at=0.0, occurred_at=at) == replace(
        other, received_at=0.0, occurred_at=other.occurred_at if told else 0.0
    )


def _remember(known: OrderedDict[str, _V], key: str, value: _V) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
