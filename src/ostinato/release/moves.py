"""Moves of refs: live by compare-and-swap, each followed by its ledger line, and the controller's own refs."""

from __future__ import annotations

from collections.abc import Mapping
from secrets import token_hex
from typing import Any, Protocol

from ostinato.core.errors import Conflict
from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.seams import Evals
from ostinato.release.ledger import ReleaseLedger

# ---------------------------------------------------------------- interfaces


class Refs(Protocol):
    """The part of `core.seams.WeightStore` that a controller may use."""

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """Compare and swap. Raises Conflict."""
        ...

    async def read_ref(self, ref: str) -> str | None:
        """Return the hash of the manifest that a ref points to; None if there is no such ref."""
        ...


class Versions(Protocol):
    """Maps refs to policy versions, and policy versions to manifests."""

    async def resolve(self, ref: str) -> tuple[PolicyVersion, str] | None:
        """Return the version that a ref points to and its manifest's hash; None if there is no such ref."""
        ...

    async def manifest_of(self, policy: PolicyVersion) -> str:
        """Return the hash of a published version's manifest. Raises NotFound."""
        ...


class GateJudge(Evals, Protocol):
    """Evaluation whose scores the ledger can keep and restore."""

    def evidence(self) -> Mapping[str, Any]:
        """Return the draws of the evaluation that is not decided yet, as JSON types."""
        ...

    def restore(self, evidence: Mapping[str, Any]) -> None:
        """Take over what `evidence` returned."""
        ...


class Moves:
    """Moves live and the controller's other refs. If the process dies between moving live and its line, the controller adds the line later.

    `holdback`: the share of users who stay on the version that a tried release replaces.
    """

    def __init__(self, ledger: ReleaseLedger, store: Refs, versions: Versions, *, holdback: float) -> None:
        self._ledger = ledger
        self._holdback = holdback
        self._store = store
        self._versions = versions

    async def ship(
        self, candidate: PolicyVersion, live: PolicyVersion, reason: str, detail: Mapping[str, Any]
    ) -> ReleaseEvent:
        """Put a candidate live. Raises Conflict if another version than `live` is live, NotFound if the candidate was never published."""
        manifest = await self._swap_live(live, candidate)
        return await self._ledger.append(
            "shipped", candidate, live, reason, {"manifest": manifest, **self.staying(candidate), **detail}
        )

    async def take_back(
        self, target: PolicyVersion, live: PolicyVersion, reason: str, detail: Mapping[str, Any]
    ) -> ReleaseEvent:
        """Put an earlier version live again. Raises as `ship` does."""
        manifest = await self._swap_live(live, target)
        return await self._ledger.append("rolled_back", target, live, reason, {**detail, "manifest": manifest})

    def staying(self, policy: PolicyVersion) -> dict[str, Any]:
        """Return the fields of a tried release's ledger line that say who stays on the version before it."""
        state = self._ledger.state
        if policy == state.canary:
            return {"share": 1.0 - self._holdback}
        proposal = state.proposal
        if proposal is None or proposal.candidate != policy or proposal.salt is None:
            return {}
        # assign users anew: those of the trial were back on live meanwhile
        return {"share": 1.0 - self._holdback, "salt": token_hex(16)}

    async def manifest_of(self, policy: PolicyVersion) -> str:
        """Return the hash of a version's manifest. Raises NotFound if the version was never published or is no longer in the store."""
        return await self._versions.manifest_of(policy)

    async def version_at(self, ref: str) -> PolicyVersion | None:
        """Return the version that a ref points to; None if there is no such ref."""
        found = await self._versions.resolve(ref)
        return None if found is None else found[0]

    async def point(self, ref: str, policy: PolicyVersion) -> None:
        """Move a ref that no other process moves, unless it points there already."""
        manifest, old = await self._versions.manifest_of(policy), await self._store.read_ref(ref)
        if old != manifest:
            await self._store.move_ref(ref, old, manifest)

    async def _swap_live(self, live: PolicyVersion, target: PolicyVersion) -> str:
        """Compare and swap the live ref; return the new manifest's hash. The ref is read before the version behind it is checked."""
        manifest, held = await self._versions.manifest_of(target), await self._store.read_ref("live")
        if await self.version_at("live") != live:
            raise Conflict(f"live is no longer {live}; look again")
        await self._store.move_ref("live", held, manifest)
        return manifest
