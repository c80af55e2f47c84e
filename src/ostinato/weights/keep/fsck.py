"""fsck for a weight store: reads and verifies everything that is reachable from the refs. Reports all problems instead of raising."""

from __future__ import annotations

from dataclasses import dataclass, field

from ostinato.core.errors import OstinatoError
from ostinato.core.records import PolicyVersion
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.store.interface import DamagedRefs, RefStore
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.content import VERSIONS, version_ref
from ostinato.weights.version.manifest import Manifest


@dataclass(slots=True, kw_only=True)
class FsckFindings:
    """Counts of what was read, and the problems found (one sentence each; empty if the store is sound).

    Example: ``FsckFindings(refs=4, manifests=12, objects=13, bytes=291_000_000, rebuilt=3, problems=[])``
    """

    refs: int = 0
    manifests: int = 0
    objects: int = 0
    bytes: int = 0
    rebuilt: int = 0
    problems: list[str] = field(default_factory=list[str])


async def verify(store: RefStore, *, every: bool = False) -> FsckFindings:
    """Read each manifest and object that is reachable from a ref, and rebuild the weights of the named refs (live, candidate, ...).

    With `every`, rebuild the weights of all versions, which takes as long as fetching each of them.
    """
    check = _Check(store)
    findings, versions = check.findings, dict[str, PolicyVersion]()
    for ref, value in (await check.refs()).items():
        try:
            policy = await check.reach(value)
            if ref.startswith(VERSIONS) and ref != version_ref(policy.hash):
                findings.problems.append(f"ref {ref} leads to a manifest of root {policy.hash}")
            if every or not ref.startswith(VERSIONS):
                versions[policy.hash] = policy
        except OstinatoError as error:
            findings.problems.append(f"ref {ref}: {error}")
    follower = Follower(store, FollowerConfig(keep=1))
    for policy in sorted(versions.values()):
        try:
            await follower.fetch(policy)
            findings.rebuilt += 1
        except OstinatoError as error:
            findings.problems.append(f"version {policy}: {error}")
    return findings


class _Check:
    """Reads manifests and objects, each once, and records their problems."""

    def __init__(self, store: RefStore) -> None:
        self.findings = FsckFindings()
        self._store, self._manifests = store, Manifests(store)
        self._seen: set[str] = set()
        self._lengths: dict[str, int | None] = {}

    async def refs(self) -> dict[str, str]:
        try:
            refs = await self._store.refs()
        except DamagedRefs as error:
            self.findings.problems += map(str, error.errors.values())
            refs = error.sound
        except OstinatoError as error:
            self.findings.problems.append(str(error))
            return {}
        self.findings.refs = len(refs)
        return refs

    async def reach(self, value: str) -> PolicyVersion:
        """Verify manifests and their objects, from a ref's manifest back to a full snapshot or to a manifest verified before.

        Returns the ref's version. Raises NotFound or Corrupt if a manifest cannot be read.
        """
        start, version = await self._manifests.at(value)
        async for hash, manifest in self._manifests.walk(start):
            if hash in self._seen:
                break
            self._seen.add(hash)
            for way in (hash, *(route.manifest for route in manifest.routes)):
                try:
                    await self._check_objects(way, await self._manifests.read(way))
                except OstinatoError as error:
                    self.findings.problems.append(f"version {manifest.policy}: {error}")
            if manifest.links == 0:
                break
        return version.policy

    async def _check_objects(self, hash: str, manifest: Manifest) -> None:
        self.findings.manifests += 1
        for name, need in manifest.objects().items():
            if name not in self._lengths:
                self._lengths[name] = await self._length(name)
            have = self._lengths[name]
            if have is not None and have < need:
                self.findings.problems.append(
                    f"manifest {hash}: object {name} has {have} bytes, the manifest needs {need}"
                )

    async def _length(self, name: str) -> int | None:
        try:
            data = await self._store.get(name)
        except OstinatoError as error:
            self.findings.problems.append(str(error))
            return None
        self.findings.objects += 1
        self.findings.bytes += len(data)
        return len(data)
