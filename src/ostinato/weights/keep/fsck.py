"""fsck for a weight store: reads and verifies everything that the refs reach. Reports all problems and raises for none."""

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
    """Counts of what was read, and the problems found (one sentence each; empty when the store is sound).

    Example: ``FsckFindings(refs=4, manifests=12, objects=13, bytes=291_000_000, rebuilt=3, problems=[])``
    """

    refs: int = 0
    manifests: int = 0
    objects: int = 0
    bytes: int = 0
    rebuilt: int = 0
    problems: list[str] = field(default_factory=list[str])


async def verify(store: RefStore, *, every: bool = False) -> FsckFindings:
    """Read each manifest and object that a ref reaches, and rebuild the weights of the named refs (live, candidate, ...).

    With `every`, the weights of all versions are rebuilt, which takes as long as fetching each.
    """
    findings = FsckFindings()
    refs = await _listed(store, findings)
    manifests = Manifests(store)
    lengths: dict[str, int | None] = {}
    versions: dict[str, PolicyVersion] = {}
    seen: set[str] = set()
    for ref, value in refs.items():
        try:
            hash, manifest = await manifests.at(value)
            await _reach(store, manifests, hash, seen, lengths, findings)
            policy = manifest.policy
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


async def _listed(store: RefStore, findings: FsckFindings) -> dict[str, str]:
    try:
        refs = await store.refs()
    except DamagedRefs as error:
        findings.problems += map(str, error.errors.values())
        refs = error.sound
    except OstinatoError as error:
        findings.problems.append(str(error))
        return {}
    findings.refs = len(refs)
    return refs


async def _reach(
    store: RefStore,
    manifests: Manifests,
    start: str,
    seen: set[str],
    lengths: dict[str, int | None],
    findings: FsckFindings,
) -> None:
    """Verify the manifests from `start` back to a full snapshot or to the first already seen manifest, and their objects."""
    async for hash, manifest in manifests.walk(start):
        if hash in seen:
            return
        seen.add(hash)
        for way in (hash, *(route.manifest for route in manifest.routes)):
            try:
                await _check_objects(store, way, await manifests.read(way), lengths, findings)
            except OstinatoError as error:
                findings.problems.append(f"version {manifest.policy}: {error}")
        if manifest.links == 0:
            return


async def _check_objects(
    store: RefStore, hash: str, manifest: Manifest, lengths: dict[str, int | None], findings: FsckFindings
) -> None:
    findings.manifests += 1
    for name, need in manifest.objects().items():
        if name not in lengths:
            lengths[name] = await _length(store, name, findings)
        have = lengths[name]
        if have is not None and have < need:
            findings.problems.append(f"manifest {hash}: object {name} has {have} bytes, the manifest needs {need}")


async def _length(store: RefStore, name: str, findings: FsckFindings) -> int | None:
    try:
        data = await store.get(name)
    except OstinatoError as error:
        findings.problems.append(str(error))
        return None
    findings.objects += 1
    findings.bytes += len(data)
    return len(data)
