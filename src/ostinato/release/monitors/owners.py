"""The owners of the newest turns: rewards and batches name turns, while monitors are about people. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.core.records import Arm, Person, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who was served a turn, within which episode, and whether by the live release.

    Example: ``Owner(person=("default", "ann"), episode="e1", live=True)``
    """

    person: Person
    episode: str
    live: bool


class TurnOwners:
    """The newest `most` turns' owners.

    Example: ``owners.see(turn); owners.get(turn.id)``
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._owners: OrderedDict[str, Owner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def see(self, turn: Turn) -> None:
        """Remember a turn's owner. Beyond `most` the oldest is dropped."""
        self._owners[turn.id] = Owner(person=turn.person, episode=turn.episode, live=turn.arm is Arm.LIVE)
        if len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def get(self, turn: str) -> Owner | None:
        """A turn's owner; None if it is not remembered."""
        return self._owners.get(turn)

    def snapshot(self) -> list[list[Any]]:
        """As JSON's types, oldest first."""
        return [[turn, *owner.person, owner.episode, owner.live] for turn, owner in self._owners.items()]

    def restore(self, rows: Sequence[Sequence[Any]]) -> None:
        """The inverse of `snapshot`. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._owners = OrderedDict(
            (str(turn), Owner(person=(str(tenant), str(user)), episode=str(episode), live=bool(live)))
            for turn, tenant, user, episode, live in rows
        )
