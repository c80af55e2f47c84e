"""Protocols that extend `core.seams.WeightStore` with listing, deletion and ages."""

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
"""Called between reading a ref and writing it, to check that this process may still move refs. May block. Raises LeaseLost if it may
not.
"""


def unfenced() -> None:
    """Do nothing: the fence of a process that may always move refs."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in a listing: its size, its age by the store's own clock, and a stamp that changes when it is put again.

    Example: ``ListedObject(hash="9f3a...", bytes=4_300_000, age_s=90_000.0, stamp="1760000000000000000.77")``
    """

    hash: str
    bytes: int
    age_s: float
    stamp: str


@dataclass(frozen=True, slots=True)
class ListedRef:
    """A ref in a listing: the hash that it points to, the seconds since it was last moved there, and a stamp that changes with each
    move.
    """

    value: str
    age_s: float
    stamp: str


class DamagedRefs(Corrupt):
    """Some refs do not hold a hash. `errors`: the errors by ref; `sound`: all other refs, with the hashes that they point to."""

    def __init__(self, errors: Mapping[str, Corrupt], sound: Mapping[str, str]) -> None:
        super().__init__("; ".join(map(str, errors.values())))
        self.errors, self.sound = dict(errors), dict(sound)


class RefStore(WeightStore, Protocol):
    """A weight store that can also list its refs and look up objects. Verification, copying and listing need this."""

    async def has(self, hash: str) -> bool:
        """Return True if the store has an object of this name. Its bytes are not verified."""
        ...

    async def refs(self) -> dict[str, str]:
        """Return every ref and the hash that it points to, sorted by name. Raises DamagedRefs."""
        ...


class KeptStore(RefStore, Protocol):
    """A weight store that can also list everything that it holds, and delete. Garbage collection, pins and leases need this.

    Ages are measured with the store's own clock, never with a client's. They are never negative.
    """

    @property
    def renews_s(self) -> float:
        """`put` renews an existing object that is older than this many seconds."""
        ...

    async def delete(self, hash: str, stamp: str | None = None) -> bool:
        """Delete an object; with `stamp`, only if it was not put again since the listing that gave the stamp.

        Returns True if it was deleted, False if it stays or did not exist, which is not an error.
        """
        ...

    def list_objects(self) -> AsyncIterator[ListedObject]:
        """Yield every object, in no particular order. Objects put or deleted meanwhile may or may not be among them."""
        ...

    async def list_refs(self) -> dict[str, ListedRef]:
        """Return every ref, as `refs`, with ages and stamps."""
        ...

    async def delete_ref(self, ref: str, old: str, stamp: str | None = None) -> None:
        """Delete a ref atomically (compare-and-delete): only if it is at `old`, and, with `stamp`, was not moved (not even to the same
        hash) since the listing that gave the stamp.

        Raises Conflict otherwise.
        """
        ...


def check_range(start: int, length: int) -> None:
    """Raise BadRequest for a range that cannot be part of an object."""
    if start < 0 or not 0 <= length <= MAX_OBJECT_BYTES:
        raise BadRequest(f"bytes {start} to {start + length} are not a valid range of an object", field="length")
