"""Candidates that have passed: they go live, or wait for a person's approval, which the ledger records before any ref moves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ostinato.core.errors import Conflict, NotFound
from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.release.ledger import Proposal, ReleaseLedger
from ostinato.release.moves import Moves

_CHECKS, _PAUSE_S = 50, 0.1


class Approvals:
    """Ships candidates that have passed, or, with `manual`, keeps them waiting for a person. The caller refreshes the ledger."""

    def __init__(self, ledger: ReleaseLedger, moves: Moves, *, manual: bool) -> None:
        self._ledger = ledger
        self._moves = moves
        self._manual = manual

    async def passed(
        self,
        candidate: PolicyVersion,
        live: PolicyVersion,
        reason: str,
        detail: Mapping[str, Any],
        *,
        ask: bool = False,
    ) -> ReleaseEvent:
        """Ship a candidate, or record that it waits for approval. With `ask`, it waits whatever the configuration says."""
        if self._manual or ask:
            return await self._ledger.append("awaits_approval", candidate, live, reason, detail)
        return await self._moves.ship(candidate, live, reason, detail)

    async def approve(self, policy: PolicyVersion | None, reason: str, actor: str) -> ReleaseEvent:
        """Ship the candidate that waits. If `policy` is given, the candidate must be that version.

        Raises:
            NotFound: nothing waits, another version waits, or the waiting version is no longer in the store.
            Conflict: live was moved, or a newer candidate took its place, at the same time; read the state again, then decide.
        """
        proposal = self._waiting(policy)
        # before the approval is written: the version must be there to ship
        await self._moves.manifest_of(proposal.candidate)
        if proposal.actor is None:
            await self._ledger.append("approved", proposal.candidate, proposal.against, reason, {"actor": actor})
        try:
            if self._still_waits(proposal):
                return await self.ship_approved(self._waiting(proposal.candidate))
        except Conflict:  # another process has read the approval and is shipping the candidate
            await self._settled(proposal)
        moved = self._ledger.moved
        if moved is None or self._ledger.state.live != proposal.candidate:
            raise Conflict(f"{proposal.candidate} no longer waits: live was moved, or a newer one passed; look again")
        return moved

    async def refuse(self, policy: PolicyVersion | None, reason: str, actor: str) -> ReleaseEvent:
        """Block the candidate that waits, so that it never ships automatically. Raises NotFound as `approve` does."""
        proposal = self._waiting(policy)
        return await self._ledger.append("blocked", proposal.candidate, proposal.against, reason, {"actor": actor})

    async def ship_approved(self, proposal: Proposal) -> ReleaseEvent:
        """Ship an approved candidate, also after a restart if the process was killed once the approval was recorded.

        A candidate that is no longer in the store is blocked, as it would keep others from being evaluated. Raises Conflict.
        """
        reason, detail = approval_line(proposal)
        try:
            return await self._moves.ship(proposal.candidate, proposal.against, reason, detail)
        except NotFound as error:
            why = f"approved, but no longer in the store: {error}"
            return await self._ledger.append("blocked", proposal.candidate, proposal.against, why, detail)

    def _still_waits(self, proposal: Proposal) -> bool:
        current = self._ledger.state.proposal
        return current is not None and current.candidate == proposal.candidate

    async def _settled(self, proposal: Proposal) -> None:
        """Wait for the process that moved live to write its ledger line, which follows the move."""
        for _ in range(_CHECKS):
            await self._ledger.refresh()
            if not self._still_waits(proposal):
                return
            await asyncio.sleep(_PAUSE_S)

    def _waiting(self, policy: PolicyVersion | None) -> Proposal:
        proposal = self._ledger.state.proposal
        if proposal is None:
            raise NotFound(
                "nothing waits for approval; `ostinato status` says what is live and what is judged", field="version"
            )
        if policy not in (None, proposal.candidate):
            raise NotFound(f"{policy} does not wait for approval; {proposal.candidate} does", field="version")
        return proposal


def approval_line(proposal: Proposal) -> tuple[str, dict[str, Any]]:
    """Return reason and detail of the ledger line of an approved candidate that goes live."""
    return f"approved: {proposal.why}; {proposal.reason}", {"actor": proposal.actor}
