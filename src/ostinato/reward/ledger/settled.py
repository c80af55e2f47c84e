"""Decided turns, remembered for a while to recognise signals that come too late. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum


class Fate(StrEnum):
    """What became of a turn."""

    MOOT = "moot"  # an evaluation's, or cut short: no signal about it ever counts
    DECIDED = "decided"  # its reward, or why it has none, is written; its outcome may be open
    TRAINED = "trained"
    HELD = "held"


class Settled:
    """The most recently decided turns, by id; the oldest are dropped. `forgot`: some were."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._fates: OrderedDict[str, tuple[str, Fate]] = OrderedDict()
        self.forgot = False

    def get(self, turn: str) -> tuple[str, Fate] | None:
        """A turn's tenant and fate; None if it is not remembered."""
        return self._fates.get(turn)

    def put(self, turn: str, tenant: str, fate: Fate) -> None:
        """Remember a turn's fate, or update it."""
        self._fates[turn] = (tenant, fate)
        if len(self._fates) > self._most:
            self._fates.popitem(last=False)
            self.forgot = True

    def __len__(self) -> int:
        return len(self._fates)

    def snapshot(self) -> list[list[str]]:
        """[turn, tenant, fate], the earliest decided first."""
        return [[turn, tenant, fate.value] for turn, (tenant, fate) in self._fates.items()]

    def restore(self, rows: Sequence[Sequence[str]], *, forgot: bool) -> None:
        """The inverse of `snapshot`."""
        self._fates = OrderedDict((turn, (tenant, Fate(fate))) for turn, tenant, fate in rows)
        self.forgot = forgot
