"""Looks up refs, roots and policy versions for the release controller."""

from __future__ import annotations

from ostinato.core.errors import NotFound
from ostinato.core.records import PolicyVersion
from ostinato.core.seams import WeightStore
from ostinato.weights.follow.follower import Follower
from ostinato.weights.version.content import version_ref


class StoreVersions:
    """`release.controller.Versions` over a weight store: refs hold the roots of weights, and a root is a version's hash."""

    def __init__(self, store: WeightStore, follower: Follower) -> None:
        self._store, self._follower = store, follower

    async def resolve(self, ref: str) -> tuple[PolicyVersion, str] | None:
        value = await self._store.read_ref(ref)
        policy = await self._follower.resolve(ref)
        return None if policy is None or value is None else (policy, value)

    async def manifest_of(self, policy: PolicyVersion) -> str:
        if await self._store.read_ref(version_ref(policy.hash)) is None:
            raise NotFound(f"{policy} is not in the weight store; see `ostinato weights log`", field="policy")
        return policy.hash
