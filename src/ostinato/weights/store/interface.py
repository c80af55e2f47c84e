"""Protocols of weight stores that extend `core.seams.WeightStore` with listing, deletion and ages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from ostinato.core.errors import BadRequest, Corrupt
from ostinato.core.seams import WeightStore
from ostinato.weights.version.content import MAX_OBJECT_BYTES

PINS: Final = "pin/"
LEASES: Final = "lease/"

Fence = Callable[[], None]
"""Called between reading a ref and writing it, to check that this process may still move refs. May wait. Raises LeaseLost if not."""


def unfenced() -> None:
    """The fence of a process that may move refs as long as it lives."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object as a listing saw it: its size, its age by the store's own clock, and a stamp that changes when it is put again.

    Example: ``ListedObject(hash="9f3a...", bytes=4_300_000, age_s=90_000.0, stamp="1760000000000000000.77")``
    """

    hash: str
    bytes: int
    age_s: float
    stamp: str


@dataclass(frozen=True, slots=True)
class ListedRef:
    """A ref as a listing saw it: the hash that it points to, the seconds since it was last moved there, and its stamp."""

    value: str
    age_s: float
    stamp: str


class DamagedRefs(Corrupt):
    """Some refs hold no hash: `errors`, by ref. `sound`: all others and the hashes that they point to."""

    def __init__(self, errors: Mapping[str, Corrupt], sound: Mapping[str, str]) -> None:
        super().__init__("; ".join(map(str, errors.values())))
        self.errors, self.sound = dict(errors), dict(sound)


class RefStore(WeightStore, Protocol):
    """A weight store that can also list its refs and say whether it has an object, as checking, copying and listing need."""

    async def has(self, hash: str) -> bool:
        """True if an object of this name is there; its bytes are not verified."""
        ...

    async def refs(self) -> dict[str, str]:
        """Every ref and the hash that it points to, sorted by name. Raises DamagedRefs."""
        ...


class KeptStore(RefStore, Protocol):
    """A weight store that can also list everything it holds and delete, as collecting and holding need.

    Ages are measured with the store's own clock, never with a reader's. They are never negative.
    """

    @property
    def renews_s(self) -> float:
        """`put` renews an object that exists already if it is older than this many seconds."""
        ...

    async def delete(self, hash: str, stamp: str | None = None) -> bool:
        """Remove an object; with `stamp`, only if it was not put again since the listing that gave the stamp.

        True if it was removed; False if it stays or did not exist, which is not an error.
        """
        ...

    def list_objects(self) -> AsyncIterator[ListedObject]:
        """Every object, in no order. Objects put or deleted meanwhile may or may not be among them."""
        ...

    async def list_refs(self) -> dict[str, ListedRef]:
        """Like `refs`, with ages and stamps."""
        ...

    async def delete_ref(self, ref: str, old: str, stamp: str | None = None) -> None:
        """Compare-and-delete: only from `old`, and only if it was not moved (even to the same hash) since `stamp` was listed.

        Raises Conflict.
        """
        ...


def check_range(start: int, length: int) -> None:
    """Refuse a range that cannot be part of an object. Raises BadRequest."""
    if start < 0 or not 0 <= length <= MAX_OBJECT_BYTES:
        raise BadRequest(f"bytes {start} to {start + length} are no part of an object", field="length")
