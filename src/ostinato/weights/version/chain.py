"""Reads manifests from the store, and finds the cheapest route to a version from weights in memory or from nothing.

Readers trust nothing: a manifest is validated when it is parsed, the parser recomputes its root, and every decoded chunk must have the hash
in the manifest. If one route is damaged, another is taken.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from ostinato.core.errors import Conflict, Corrupt, NotFound
from ostinato.core.seams import WeightStore
from ostinato.core.weights import Weights
from ostinato.weights.version.content import MAX_LINKS, VERSIONS, hash_of, is_hash, version_ref
from ostinato.weights.version.manifest import Manifest, parse, plain

logger = logging.getLogger(__name__)

_KEPT_MANIFESTS = 64
_ATTEMPTS = 2  # at reading a manifest that arrives damaged
_HOP_BYTES = 1 << 20  # cost of the round trips of one more delta, in bytes


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A verified version in memory: every chunk has the hash in the manifest."""

    hash: str
    manifest: Manifest
    weights: Weights


Known = Callable[[str], Loaded | None]
"""Maps a root or a manifest's hash to weights that were verified before and are still in memory."""


class Manifests:
    """Reads manifests and caches the last few, which is safe because they never change."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._kept: OrderedDict[str, Manifest] = OrderedDict()

    async def read(self, hash: str) -> Manifest:
        """Return the manifest with this hash. Raises NotFound or Corrupt, naming the object."""
        if hash in self._kept:
            self._kept.move_to_end(hash)
            return self._kept[hash]
        data = await self._whole(hash)
        manifest = await asyncio.to_thread(lambda: parse(plain(data, f"manifest {hash}"), f"manifest {hash}"))
        self._kept[hash] = manifest
        while len(self._kept) > _KEPT_MANIFESTS:
            self._kept.popitem(last=False)
        return manifest

    async def _whole(self, hash: str) -> bytes:
        for last in range(_ATTEMPTS - 1, -1, -1):
            try:
                data = await self._store.get(hash)
            except Corrupt:
                if not last:
                    raise
                continue
            if hash_of(data) == hash:
                return data
        raise Corrupt(f"manifest {hash} does not match its hash. Restore it, or publish again")

    async def at(self, value: str) -> tuple[str, Manifest]:
        """Return the manifest, with its hash, that `value` (a root or a manifest's hash) stands for. Raises NotFound or Corrupt."""
        hash = await self._store.read_ref(version_ref(value))
        if hash is not None:
            return await self._of_version_ref(value, hash)
        try:
            return value, await self.read(value)
        except NotFound as error:
            raise NotFound(
                f"there is neither a ref {version_ref(value)} nor a manifest {value} in the weight store. "
                "Publish the version again",
                field="ref",
            ) from error

    async def of_root(self, root: str) -> tuple[str, Manifest]:
        """Return the manifest of a version, with its hash. Raises NotFound for a root that was never published."""
        hash = await self._store.read_ref(version_ref(root))
        if hash is None:
            raise NotFound(
                f"version {root} was never published to this weight store; `ostinato weights log` lists them",
                field="policy",
            )
        return await self._of_version_ref(root, hash)

    async def _of_version_ref(self, root: str, hash: str) -> tuple[str, Manifest]:
        """Return the manifest `hash` that the version ref of `root` points to. It must have this root; errors name the ref."""
        try:
            manifest = await self.read(hash)
        except NotFound as error:
            raise NotFound(f"ref {version_ref(root)} leads to manifest {hash}: {error}", field="hash") from error
        if manifest.root != root:
            raise Corrupt(
                f"ref {version_ref(root)} leads to manifest {hash}, which has root {manifest.root}. Publish it again"
            )
        return hash, manifest

    async def walk(self, hash: str) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield a manifest and its ancestors, newest first. Ends early if an ancestor of a full snapshot was garbage-collected."""
        at: str | None = hash
        needed = True
        while at is not None:
            try:
                manifest = await self.read(at)
            except NotFound:
                if needed:
                    raise
                return
            yield at, manifest
            needed = needed and manifest.links > 0
            at = manifest.parent


async def name_version(store: WeightStore, root: str, hash: str) -> None:
    """Point ``version/<root>`` to a manifest. A damaged ref is overwritten. Losing against another writer is no error, since that writer's
    manifest describes the same weights.
    """
    ref = version_ref(root)
    try:
        now = await store.read_ref(ref)
    except Corrupt:
        now = None
    if now == hash:
        return
    try:
        await store.move_ref(ref, now, hash)
    except Conflict:
        logger.info("another writer named version %s first; its manifest describes the same weights", root)


async def cheapest(
    manifests: Manifests, target: str, known: Known, avoid: frozenset[str], max_bytes: int
) -> tuple[Loaded | None, tuple[str, ...]]:
    """Return the route to a version with the fewest bytes (Dijkstra's algorithm): its start (None: no weights), and the manifests to apply,
    oldest first, without those in `avoid`.

    Raises NotFound or Corrupt if the target's manifest cannot be read, or if no route leads back to a start.
    """
    serial = itertools.count()
    queue: list[tuple[int, int, str | None, tuple[str, ...]]] = [(0, next(serial), target, ())]
    seen: set[str] = set()
    failed: NotFound | Corrupt | None = None
    while queue:
        cost, _, at, hops = heapq.heappop(queue)
        if at is None:
            return None, hops
        if at in seen or len(hops) > MAX_LINKS:
            continue
        seen.add(at)
        if (start := known(at.removeprefix(VERSIONS))) is not None:
            return start, hops
        try:
            hash, manifest = (
                (at, await manifests.read(at)) if is_hash(at) else await manifests.of_root(at[len(VERSIONS) :])
            )
            check_size(hash, manifest, max_bytes)
        except (NotFound, Corrupt) as error:
            if not hops:
                raise
            failed = failed or error
            continue
        if (start := known(manifest.root)) is not None:
            return start, hops
        for way, base, size in _ways(hash, manifest):
            if way not in avoid:
                heapq.heappush(queue, (cost + size + _HOP_BYTES, next(serial), base, (way, *hops)))
    raise failed or Corrupt(f"manifest {target} leads to no full snapshot")


def _ways(hash: str, manifest: Manifest) -> Iterator[tuple[str, str | None, int]]:
    """Yield the manifests that lead to this version, each with its base (None: no weights) and the bytes of its payloads."""
    yield hash, None if manifest.kind == "full" else manifest.parent, manifest.payload_bytes
    for route in manifest.routes:
        yield route.manifest, None if route.base is None else version_ref(route.base), route.bytes


def check_size(hash: str, manifest: Manifest, max_bytes: int) -> None:
    """Raise Corrupt for a version larger than `max_bytes`."""
    if manifest.full_bytes > max_bytes:
        raise Corrupt(
            f"manifest {hash}: declares {manifest.full_bytes} bytes of weights; the follower's max_bytes is {max_bytes}"
        )
