"""A namespace of refs in a shared weight store: what the run that trains a tenant's branch may read and move."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

from ostinato.core.arm_assignment import branch_ref
from ostinato.core.errors import BadRequest
from ostinato.weights.store.interface import LEASES, PINS, DamagedRefs, KeptStore, ListedObject, ListedRef
from ostinato.weights.version.content import VERSIONS

_SHARED = (VERSIONS, PINS, LEASES)
T = TypeVar("T")


class BranchStore:
    """A `KeptStore` whose objects, versions, pins and leases are the shared store's, and whose other refs are the branch's own.

    `control` is the shared live version, which a branch reads and never moves. Nothing is deleted through it: what a branch no longer needs
    is collected by the run that serves, which sees all refs.

    Example: ``await BranchStore(store, "acme").read_ref("live")`` reads the shared store's ``branch/acme``.
    """

    def __init__(self, shared: KeptStore, tenant: str) -> None:
        self._shared, self._tenant = shared, tenant

    @property
    def renews_s(self) -> float:
        return self._shared.renews_s

    async def put(self, data: bytes | memoryview) -> str:
        return await self._shared.put(data)

    async def get(self, hash: str) -> bytes:
        return await self._shared.get(hash)

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        return await self._shared.get_range(hash, start, length)

    async def has(self, hash: str) -> bool:
        return await self._shared.has(hash)

    def list_objects(self) -> AsyncIterator[ListedObject]:
        return self._shared.list_objects()

    async def read_ref(self, ref: str) -> str | None:
        return await self._shared.read_ref(self._named(ref))

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """As a store's, and raises BadRequest for `control`."""
        await self._shared.move_ref(self._own(ref), old, new)

    async def delete_ref(self, ref: str, old: str, stamp: str | None = None) -> None:
        """As a store's, and raises BadRequest for `control` and for versions."""
        if ref.startswith(VERSIONS):
            self._refuse(f"version {ref}")
        await self._shared.delete_ref(self._own(ref), old, stamp)

    async def delete(self, hash: str, stamp: str | None = None) -> bool:
        """Raises BadRequest."""
        return self._refuse(f"object {hash}")

    async def refs(self) -> dict[str, str]:
        """As a store's. A damaged ref that the branch does not see is passed over."""
        try:
            return self._seen(await self._shared.refs())
        except DamagedRefs as error:
            return self._unless_damaged(error)

    async def list_refs(self) -> dict[str, ListedRef]:
        """As a store's, and raises DamagedRefs for a damaged ref of others, too: sound ones have no ages then."""
        try:
            return self._seen(await self._shared.list_refs())
        except DamagedRefs as error:
            self._unless_damaged(error)
            raise DamagedRefs(error.errors, self._seen(error.sound)) from error

    def _unless_damaged(self, error: DamagedRefs) -> dict[str, str]:
        """The branch's sound refs. Raises DamagedRefs, under the branch's own names, if one that it sees is damaged."""
        sound = self._seen(error.sound)
        if damaged := self._seen(error.errors):
            raise DamagedRefs(damaged, sound) from error
        return sound

    def _seen(self, shared: Mapping[str, T]) -> dict[str, T]:
        """What the branch sees of the shared store's refs, under its own names."""
        names = {branch_ref(self._tenant, ref): ref for ref in ("live", "control")}
        before = branch_ref(self._tenant, "")
        found: dict[str, T] = {}
        for name, value in shared.items():
            own = name if name.startswith(_SHARED) else names.get(name)
            if name.startswith(before):
                own = name.removeprefix(before)
            if own is not None:
                found[own] = value
        return dict(sorted(found.items()))

    def _named(self, ref: str) -> str:
        return ref if ref.startswith(_SHARED) else branch_ref(self._tenant, ref)

    def _own(self, ref: str) -> str:
        if ref == "control":
            self._refuse("the ref control, the shared live version,")
        return self._named(ref)

    def _refuse(self, what: str) -> bool:
        raise BadRequest(
            f"{what} is not the branch's of {self._tenant} to move or delete: do it in the run that serves", field="ref"
        )
