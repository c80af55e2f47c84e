"""Copies a version from one weight store to another: to a mirror, from a backup, across clouds.

Objects are copied before the manifests that name them, routes and parents before the manifests that point to them, and refs last. A kill at
any instant therefore leaves no ref to an incomplete version, and a second call resumes where the first stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.parallel import for_each
from ostinato.core.records import PolicyVersion
from ostinato.core.seams import WeightStore
from ostinato.weights.store.interface import RefStore
from ostinato.weights.version.chain import Manifests, name_version
from ostinato.weights.version.content import check_ref, is_hash
from ostinato.weights.version.manifest import Manifest

OnBytes = Callable[[int, int], object]
"""Called with the payload bytes copied so far, and the total to copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """The result of a transfer. `objects`, `bytes`: what was copied, manifests included; `skipped`: payload bytes that existed already.

    Example: ``Transferred(policy=v17, manifest="ab12...", objects=9, bytes=4_300_000, skipped=269_000_000, seconds=1.9)``
    """

    policy: PolicyVersion
    manifest: str
    objects: int
    bytes: int
    skipped: int
    seconds: float


async def transfer(
    source: WeightStore,
    target: RefStore,
    version: str,
    *,
    ref: str | None = None,
    on_bytes: OnBytes = lambda done, total: None,
    parallel: int = 8,
) -> Transferred:
    """Copy everything that a version needs and `target` lacks; then write its version ref there, and move `ref` to it if one is given.

    `version` is a ref of the source, a root, or the hash of a manifest. A version needs its own manifest, those of its routes and all their
    objects, and the same for its parents back to the first one with a full snapshot. At most `parallel` objects are in memory. The target
    must not delete unreachable objects meanwhile.

    Raises:
        NotFound: the source has no such version, or lacks a part of it; the message names the part.
        Corrupt: a part of the version does not match its hash; the target's version ref was not written.
        Conflict: another writer moved `ref` meanwhile. The version is in the target; the ref stays where the other moved it.
        BadRequest: `version` or `ref` of the wrong form.
        StorageFull, Unavailable: from the stores. Call again: objects that arrived are not copied a second time.

    Example::

        done = await transfer(DirectoryStore(Path("weights")), mirror, "live", ref="live")
    """
    started = time.perf_counter()
    expected = await target.read_ref(check_ref(ref)) if ref is not None else None
    manifests = Manifests(source)
    hash = await _find(source, manifests, version)
    need = await _need(manifests, hash)
    copier = _Copier(source, target, on_bytes)
    await for_each(need.objects, parallel, copier.look)
    missing = {name: length for name, length in need.objects.items() if name in copier.missing}
    copier.begin(sum(missing.values()))
    await for_each(missing.items(), parallel, copier.copy)
    for name in reversed(need.manifests):
        if not await target.has(name):
            await copier.copy((name, 0))
    policy = (await manifests.read(hash)).policy
    await name_version(target, policy.hash, hash)
    if ref is not None and expected != policy.hash:
        await target.move_ref(ref, expected, policy.hash)
    return Transferred(
        policy=policy,
        manifest=hash,
        objects=copier.objects,
        bytes=copier.bytes,
        skipped=sum(need.objects.values()) - sum(missing.values()),
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True)
class _Need:
    """What a version needs: manifests, each before those that it points to, and objects with their minimum lengths."""

    manifests: list[str] = field(default_factory=list[str])
    objects: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, hash: str, manifest: Manifest) -> None:
        self.manifests.append(hash)
        for name, length in manifest.objects().items():
            self.objects[name] = max(self.objects.get(name, 0), length)


async def _find(source: WeightStore, manifests: Manifests, version: str) -> str:
    value = version if is_hash(version) else await source.read_ref(version)
    if value is None:
        raise NotFound(f"there is no ref {version} in the source; give a ref, a root or a manifest's hash", field="ref")
    return (await manifests.at(value))[0]


async def _need(manifests: Manifests, start: str) -> _Need:
    """Return everything that a version needs, read from the source. Raises Corrupt for a chain or route that contradicts itself."""
    need, at, links = _Need(), start, None
    while True:
        manifest = await manifests.read(at)
        if links is not None and manifest.links != links:
            raise Corrupt(f"manifest {at}: field links: {manifest.links}, its child needs {links}; publish it again")
        need.add(at, manifest)
        for route in manifest.routes:
            other = await manifests.read(route.manifest)
            if other.root != manifest.root or other.routes or (other.kind == "full") is not (route.base is None):
                raise Corrupt(f"manifest {at}: its route {route.manifest} does not lead to the same root; refused")
            need.add(route.manifest, other)
        if manifest.links == 0:
            return need
        assert manifest.parent is not None, "a parsed delta has a parent"
        at, links = manifest.parent, manifest.links - 1


class _Copier:
    """Copies objects and counts them."""

    def __init__(self, source: WeightStore, target: RefStore, on_bytes: OnBytes) -> None:
        self._source, self._target, self._on_bytes = source, target, on_bytes
        self._expected = self._arrived = 0
        self.missing: set[str] = set()
        self.objects = self.bytes = 0

    async def look(self, name: str) -> None:
        if not await self._target.has(name):
            self.missing.add(name)

    def begin(self, expected: int) -> None:
        self._expected = expected
        self._on_bytes(0, expected)

    async def copy(self, item: tuple[str, int]) -> None:
        """Copy an object of at least the given length. Its hash is checked before it counts as copied."""
        name, least = item
        data = await self._source.get(name)
        if len(data) < least:
            raise Corrupt(f"object {name} has {len(data)} bytes, a manifest needs {least}; publish the version again")
        if (kept := await self._target.put(data)) != name:
            raise Corrupt(f"object {name} arrived as {kept}: it was damaged on its way; transfer the version again")
        self.objects += 1
        self.bytes += len(data)
        self._arrived += least
        self._on_bytes(self._arrived, self._expected)
