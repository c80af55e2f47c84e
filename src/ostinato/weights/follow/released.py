"""What is live, as the trainer last saw it, and the weights of a version that it measures itself against."""

from __future__ import annotations

from ostinato.core.records import PolicyVersion
from ostinato.core.weights import Snapshot
from ostinato.weights.follow.follower import Follower


class Released:
    """Follows the ref `live`; fetches a version's weights and keeps the last one fetched."""

    def __init__(self, follower: Follower, live: PolicyVersion) -> None:
        self.live = live
        self._follower = follower
        self._held: Snapshot | None = None

    async def refresh(self) -> PolicyVersion:
        """Look at the ref again."""
        self.live = await self._follower.resolve("live") or self.live
        return self.live

    async def candidate(self) -> PolicyVersion | None:
        """The newest version that was offered for release, or None."""
        return await self._follower.resolve("candidate")

    async def snapshot(self, policy: PolicyVersion) -> Snapshot:
        """A version with its weights. Raises NotFound, Corrupt."""
        if self._held is None or self._held.policy != policy:
            self._held = Snapshot(policy=policy, weights=await self._follower.fetch(policy))
        return self._held
