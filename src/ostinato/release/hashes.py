"""A persistent set of hashes: earlier states stay unchanged, and adding to the newest copies nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import islice
from typing import Self


class Hashes(Set[str]):
    """The first `count` keys of a dictionary that newer sets share.

    Adding to the newest set extends the dictionary; adding to an older set, or removing, copies it.

    Example: ``Hashes(["9f", "a1"]) | {"b2"} == {"9f", "a1", "b2"}``
    """

    __slots__ = ("_count", "_places")

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        self._places = {name: place for place, name in enumerate(dict.fromkeys(hashes))}
        self._count = len(self._places)

    def __contains__(self, name: object) -> bool:
        return self._places.get(name, self._count) < self._count  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __iter__(self) -> Iterator[str]:
        return islice(self._places, self._count)

    def __len__(self) -> int:
        return self._count

    def adding(self, name: str) -> Self:
        """This set with one more hash."""
        if name in self:
            return self
        made = type(self)()
        made._places = (
            self._places if len(self._places) == self._count else dict(islice(self._places.items(), self._count))
        )
        made._places[name] = self._count
        made._count = self._count + 1
        return made
