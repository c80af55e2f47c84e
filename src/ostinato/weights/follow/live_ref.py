"""The live version as the trainer last saw it, and the weights of versions that the trainer compares itself with."""

from __future__ import annotations

import logging

from ostinato.core.errors import Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.weights import Snapshot
from ostinato.weights.follow.follower import Follower

logger = logging.getLogger(__name__)


class Released:
    """Follows the ref `live`, and fetches weights of versions. The follower decides which of them stay in memory."""

    def __init__(self, follower: Follower, live: PolicyVersion) -> None:
        self.live = live
        self._follower = follower

    async def refresh(self) -> PolicyVersion:
        """Read the ref again. While the store is away, `live` stays what it was."""
        try:
            self.live = await self._follower.resolve("live") or self.live
        except Unavailable as error:
            logger.warning("live is taken to be %s still: %s", self.live, error)
        return self.live

    async def candidate(self) -> PolicyVersion | None:
        """The newest version that was offered for release, or None."""
        return await self._follower.resolve("candidate")

    async def snapshot(self, policy: PolicyVersion) -> Snapshot:
        """A version with its weights. Raises NotFound, Corrupt."""
        return Snapshot(policy=policy, weights=await self._follower.fetch(policy))
