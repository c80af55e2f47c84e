"""A namespace of refs in a shared weight store, for the run that trains a tenant's branch."""

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
    """A `KeptStore` that shares its objects, versions, pins and leases with the shared store, and whose other refs are the branch's own.

    `control` is the shared live version, which a branch may read but never move. Objects and versions cannot be deleted through it: the run
    that serves, which sees all refs, collects what a branch no longer needs.

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
        """Move a ref, as any store. Raises BadRequest for `control`."""
        await self._shared.move_ref(self._own(ref), old, new)

    async def delete_ref(self, ref: str, old: str, stamp: str | None = None) -> None:
        """Delete a ref, as any store. Raises BadRequest for `control` and for versions."""
        if ref.startswith(VERSIONS):
            self._refuse(f"version {ref}")
        await self._shared.delete_ref(self._own(ref), old, stamp)

    async def delete(self, hash: str, stamp: str | None = None) -> bool:
        """Refused: raises BadRequest."""
        return self._refuse(f"object {hash}")

    async def refs(self) -> dict[str, str]:
        """Return the branch's refs, as any store. Damaged refs that the branch does not see are ignored."""
        try:
            return self._visible(await self._shared.refs())
        except DamagedRefs as error:
            return self._unless_damaged(error)

    async def list_refs(self) -> dict[str, ListedRef]:
        """Return the branch's refs with ages, as any store. Raises DamagedRefs for any damaged ref of the shared store, also one that the
        branch does not see, because the error carries the sound refs without ages.
        """
        try:
            return self._visible(await self._shared.list_refs())
        except DamagedRefs as error:
            self._unless_damaged(error)
            raise DamagedRefs(error.errors, self._visible(error.sound)) from error

    def _unless_damaged(self, error: DamagedRefs) -> dict[str, str]:
        """Return the branch's sound refs. Raises DamagedRefs, with the branch's names, if a ref that it sees is damaged."""
        sound = self._visible(error.sound)
        if damaged := self._visible(error.errors):
            raise DamagedRefs(damaged, sound) from error
        return sound

    def _visible(self, shared: Mapping[str, T]) -> dict[str, T]:
        """Return the refs of the shared store that the branch sees, under the branch's names."""
        names = {branch_ref(self._tenant, ref): ref for ref in ("live", "control")}
        prefix = branch_ref(self._tenant, "")
        visible: dict[str, T] = {}
        for name, value in shared.items():
            own = name if name.startswith(_SHARED) else names.get(name)
            if name.startswith(prefix):
                own = name.removeprefix(prefix)
            if own is not None:
                visible[own] = value
        return dict(sorted(visible.items()))

    def _named(self, ref: str) -> str:
        return ref if ref.startswith(_SHARED) else branch_ref(self._tenant, ref)

    def _own(self, ref: str) -> str:
        if ref == "control":
            self._refuse("the ref control, the shared live version,")
        return self._named(ref)

    def _refuse(self, what: str) -> bool:
        raise BadRequest(
            f"{what} may not be moved or deleted by the branch of {self._tenant}: do it in the run that serves",
            field="ref",
        )
