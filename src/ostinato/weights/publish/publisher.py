"""Publishes the trainer's weights as named, durable, verified versions in the weight store. Publishing does not make a version live.

objects -> manifests -> ref ``version/<root>`` -> the requested ref (compare-and-swap). Each step is durable before the next, so a publisher
killed at any point leaves complete versions and, at worst, unreferenced objects. The base of the next delta advances only after the last
ref has moved. A version is a delta from its base if possible. From time to time a full snapshot and deltas over several versions are stored
with it, for followers that start or have fallen behind.

`Candidates` is the trainer's side: it publishes each step's weights, and offers a version for release every few steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.records import PolicyVersion
from ostinato.core.seams import WeightStore
from ostinato.core.weights import Form, Learned, WeightPart, Weights
from ostinato.weights.config import PublisherConfig
from ostinato.weights.follow.delta_apply import rebuild
from ostinato.weights.publish.chunk_source import Holder, How, PartHolder
from ostinato.weights.version.chain import Manifests, name_version
from ostinato.weights.version.content import check_ref, full_bytes, root_of_chunks, version_ref
from ostinato.weights.version.manifest import FORMAT, About, Manifest, Route, about, stored
from ostinato.weights.version.packing import PackedChunks, tensors_of
from ostinato.weights.version.signing import Signer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a publication wrote.

    `bytes`: what a follower that has the base must fetch (payloads and manifest); `stored`: everything written, including a full snapshot
    and squashed deltas that were due; `ratio`: `full_bytes` / `bytes`; `changed`: the share of elements that differ from the base, None
    without a base; `reason`: why a full snapshot was written, "" if none was. If the store had the version already, `bytes` and `stored`
    are 0, `changed` is None and `reason` is "published before".

    Example: ``Published(policy=v17, manifest="ab12...", kind="delta", bytes=4_300_000, stored=4_300_000, full_bytes=269_000_000,
    ratio=62.6, changed=0.0098, seconds=0.41, reason="")``
    """

    policy: PolicyVersion
    manifest: str
    kind: str
    bytes: int
    stored: int
    full_bytes: int
    ratio: float
    changed: float | None
    seconds: float
    reason: str


class VersionPublisher:
    """Publishes versions of one model. Concurrent calls of `publish` run one after another.

    The base of the next delta is kept in a file in `config.scratch`. Without `scratch` the arrays in `weights` are kept, and must not
    change afterwards. The base is hashed before use; if it is no longer what was published, it is loaded from the store.

    `holder` wraps this process's own holder for several ranks (`ranks`): each rank encodes and stores its own chunks, and none has all
    of them. If a rank lacks the base then, a full snapshot is written instead of loading the base from the store.

    Example::

        publisher = VersionPublisher(DirectoryStore(Path("weights")))
        first = await publisher.publish(0, weights, run="demo", base=None, ref="candidate")
        second = await publisher.publish(1, better, run="demo", base=first.policy, ref="candidate")
    """

    def __init__(
        self,
        store: WeightStore,
        config: PublisherConfig | None = None,
        holder: Callable[[PartHolder], Holder] | None = None,
    ) -> None:
        self._store = store
        self._config = config or PublisherConfig()
        self._signer = Signer.load(self._config.key) if self._config.key else None
        self._manifests = Manifests(store)
        self._own = PartHolder(store, self._config)
        self._holder = self._own if holder is None else holder(self._own)
        self._lock = asyncio.Lock()

    async def publish(
        self,
        number: int,
        weights: Weights | WeightPart,
        *,
        run: str,
        base: PolicyVersion | None,
        meta: Mapping[str, Any] | None = None,
        numerics: str = "",
        ref: str | None = None,
    ) -> Published:
        """Store `weights` as a version named by its root; then move `ref` to the root if one is given.

        Idempotent: publishing the same weights again gives the same root. If the base is missing or damaged in the store, a full snapshot
        is written, and `reason` says what was wrong. While a delta is written, a concurrent garbage collection may delete an old base that
        nothing keeps; hold such a base with `pins.held`. The newest versions, and those of refs, pins and leases, are kept in any case.

        Raises:
            BadWeights: NaN, infinity, or an array that does not fill its shape; nothing was written.
            StorageFull: the disk refused a write; no ref moved to anything incomplete, and the call can be repeated.
            Conflict: another publisher moved `ref` meanwhile. The version is in the store; the ref stays where the other moved it.
            BadRequest: `number`, `run`, `meta` or `ref` of the wrong form.
        """
        if ref is not None:
            check_ref(ref)
        described = about(run, number, meta, numerics)
        async with self._lock:
            started = time.perf_counter()
            expected = await self._store.read_ref(ref) if ref is not None else None
            taken = await self._holder.take(number, weights, check=True, finite=self._config.finite)
            version = _Version(described, taken.forms, root_of_chunks(taken.forms, taken.hashes))
            stored, damage = await self._stored(version)
            written = stored or await self._write(version, base, damage)
            if ref is not None:
                await self._store.move_ref(ref, expected, version.root)
            await self._holder.keep(version.root, written.follows)
        total = full_bytes(weights)
        return Published(
            policy=written.manifest.policy,
            manifest=written.hash,
            kind=written.manifest.kind,
            bytes=written.bytes,
            stored=written.stored,
            full_bytes=total,
            ratio=total / max(written.bytes, 1),
            changed=written.changed,
            seconds=time.perf_counter() - started,
            reason=written.reason,
        )

    async def known(self, number: int, weights: Weights | WeightPart) -> PolicyVersion | None:
        """Return the stored version with exactly these weights, or None. It becomes the base of the next delta without being read."""
        async with self._lock:
            taken = await self._holder.take(number, weights, check=False, finite=False)
            root = root_of_chunks(taken.forms, taken.hashes)
            try:
                _, manifest = await self._manifests.of_root(root)
            except (NotFound, Corrupt):
                return None
            await self._holder.keep(root, None)
        return manifest.policy

    async def close(self) -> None:
        """Close the holder."""
        await self._holder.close()

    async def name(self, policy: PolicyVersion, ref: str) -> None:
        """Move `ref` to a version that was published before. Raises Conflict if another publisher moved it meanwhile."""
        async with self._lock:
            current = await self._store.read_ref(check_ref(ref))
            if current != policy.hash:
                await self._store.move_ref(ref, current, policy.hash)

    async def _stored(self, version: _Version) -> tuple[_Written | None, str]:
        """Return the same version if the store has it undamaged; otherwise None and, if it is damaged, what is wrong with it."""
        fresh = Manifests(self._store)  # without cached manifests, because publishing again repairs a damaged store
        try:
            hash = await self._store.read_ref(version_ref(version.root))
            if hash is None:
                return None, ""
            manifest = await fresh.read(hash)
            described = version.about
            if (manifest.number, manifest.run, manifest.root) != (described.number, described.run, version.root):
                return None, ""
            for way in (hash, *(route.manifest for route in manifest.routes)):
                for name in (await fresh.read(way)).objects():
                    await self._store.get(name)
            if self._holder.whole:
                await rebuild(self._store, fresh, hash, lambda root: None, self._config.max_bytes)
        except (NotFound, Corrupt) as error:
            return None, f"the stored version is damaged: {error}"
        return _Written(hash, manifest, 0, 0, None, "published before", None), ""

    async def _write(self, version: _Version, base: PolicyVersion | None, damage: str) -> _Written:
        """Write the objects, then the manifests, then the ref that leads to the version."""
        before, reason = await self._base(base, version)
        alone = damage or reason
        how = How(base=None if before is None or reason else before[1].root, delta=not alone, undo=not alone)
        packed = await self._holder.pack(how)
        size, routes = packed.payload_bytes, list[tuple[Route, int]]()
        if before is None or alone:
            manifest = _manifest(version, packed, before, full=True)
        else:
            reason = self._anchor_due(before[1], size)
            routes = await self._routes(version, before, anchor=bool(reason))
            manifest = _manifest(version, packed, before, full=False, routes=[route for route, _ in routes])
        data = stored(self._signer.sign(manifest) if self._signer else manifest)
        hash = await self._store.put(data)
        await name_version(self._store, version.root, hash)
        changed = None if packed.changed is None else packed.changed / max(packed.elements, 1)
        size += len(data)
        written = size + sum(route_bytes for _, route_bytes in routes)
        follows = None if before is None or alone else before[1].root
        return _Written(hash, manifest, size, written, changed, alone or reason, follows)

    def _anchor_due(self, base: Manifest, payload: int) -> str:
        """Return why a full snapshot is due in addition to the delta, or "" if none is."""
        if base.links >= self._config.anchor_every:
            return f"{base.links} deltas since the last full snapshot"
        chain = base.chain_bytes + payload
        if chain > self._config.anchor_share * base.full_bytes:
            return f"the deltas since the last full snapshot have {chain} bytes"
        return ""

    async def _routes(self, version: _Version, before: _Parent, *, anchor: bool) -> list[tuple[Route, int]]:
        """Store the other routes to a version: the full snapshot and the squashed deltas that are due."""
        routes = [await self._route(version, None, How())] if anchor else []
        for span, root in self._holder.due(before[1].root):
            try:
                target = await self._manifests.of_root(root)
                routes.append(await self._route(version, target, How(base=root, span=span, delta=True)))
            except (NotFound, Corrupt) as error:
                logger.warning("no delta over %d versions to %s: %s", span, version.root, error)
        return routes

    async def _route(self, version: _Version, parent: _Parent | None, how: How) -> tuple[Route, int]:
        """Store a route to a version. Returns it with the bytes written, its manifest included."""
        packed = await self._holder.pack(how)
        data = stored(_manifest(version, packed, parent, full=parent is None))
        hash = await self._store.put(data)
        base = None if parent is None else parent[1].root
        return Route(manifest=hash, base=base, bytes=packed.payload_bytes), packed.payload_bytes + len(data)

    async def _base(self, base: PolicyVersion | None, version: _Version) -> tuple[_Parent | None, str]:
        """Return the base, if memory still holds it unchanged or the store has it, and why no delta from it is possible ("" if one is)."""
        if base is None:
            return None, "no base"
        try:
            hash, manifest = await self._manifests.of_root(base.hash)
            if not await self._holder.holds(base.hash):
                if not self._holder.whole:
                    return None, f"not every rank has {base} in memory"
                loaded = await rebuild(self._store, self._manifests, hash, lambda root: None, self._config.max_bytes)
                await self._own.adopt(base.hash, loaded.weights)
        except (NotFound, Corrupt) as error:
            return None, f"the base cannot be used: {error}"
        forms = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
        return (hash, manifest), "" if forms == version.forms else "the tensors are not those of the base"


_Parent = tuple[str, Manifest]  # the manifest's hash, and the manifest


@dataclass(frozen=True, slots=True)
class _Version:
    about: About
    forms: Mapping[str, Form]
    root: str


@dataclass(frozen=True, slots=True)
class _Written:
    hash: str
    manifest: Manifest
    bytes: int
    stored: int
    changed: float | None
    reason: str
    follows: str | None  # the root of the previous version if this one continues its line


def _manifest(
    version: _Version, packed: PackedChunks, parent: _Parent | None, *, full: bool, routes: Sequence[Route] = ()
) -> Manifest:
    """Build the manifest. A full snapshot may have a `parent`, too: the version that it was compared with."""
    described, payload = version.about, packed.payload_bytes
    anchors = [route.manifest for route in routes if route.base is None]
    first = full or bool(anchors)
    return Manifest(
        format=FORMAT,
        run=described.run,
        number=described.number,
        meta=described.meta,
        parent=None if parent is None else parent[0],
        kind="full" if full else "delta",
        links=0 if first or parent is None else parent[1].links + 1,
        payload_bytes=payload,
        chain_bytes=0 if first or parent is None else parent[1].chain_bytes + payload,
        anchor=anchors[0] if anchors else None if full or parent is None else parent[1].anchor or parent[0],
        numerics=described.numerics,
        root=version.root,
        signature=None,
        routes=tuple(routes),
        tensors=tensors_of(version.forms, packed.chunks),
    )


# ---------------------------------------------------------------- candidates


class Candidates:
    """The training loop's `Publisher` over the weight store: stores each version, and moves the ref `candidate` every few steps.

    Args:
        publisher: stores versions.
        run: the run's name, recorded with each version.
        every: steps between two candidates.
        on_published: called with each version that was stored.
        numerics: the id of the trainer's numerics contract.
        newest: a ref that is moved to each version as soon as it is stored, for rollouts and the learner arm; None: no such ref.
    """

    def __init__(
        self,
        publisher: VersionPublisher,
        run: str,
        every: int,
        on_published: Callable[[Published], None],
        *,
        numerics: str = "",
        newest: str | None = None,
    ) -> None:
        self._publisher, self._run, self._every, self._on_published = publisher, run, every, on_published
        self._numerics, self._newest = numerics, newest
        self._moves_refs = True
        self._due: PolicyVersion | None = None  # the newest version that is or should be the candidate
        self.last: PolicyVersion | None = None

    @contextlib.asynccontextmanager
    async def repeating(self, named: PolicyVersion | None) -> AsyncGenerator[None]:
        """Suspend moving refs while the block repeats steps. `named` stays the candidate unless a newer one is due at the end.

        Otherwise the release gate would evaluate and ship versions that are older than the live one.
        """
        self._moves_refs = False
        try:
            yield
        finally:
            self._moves_refs = True
        await self._follow()
        if self._due is not None and (named is None or self._due.number > named.number):
            await self._publisher.name(self._due, "candidate")

    async def publish(self, learned: Learned) -> PolicyVersion:
        """Store the version under its root. Idempotent."""
        due = learned.step % self._every == 0
        done = await self._publisher.publish(
            learned.policy_number,
            learned.weights,
            run=self._run,
            base=self.last,
            meta={"step": learned.step},
            numerics=self._numerics,
            ref="candidate" if due and self._moves_refs else None,
        )
        self.last = done.policy
        self._due = done.policy if due else self._due
        await self._follow()
        self._on_published(done)
        return done.policy

    async def known(self, learned: Learned) -> PolicyVersion | None:
        """Return the stored version with exactly these weights, or None."""
        return await self._publisher.known(learned.policy_number, learned.weights)

    async def close(self) -> None:
        """Close the publisher."""
        await self._publisher.close()

    async def _follow(self) -> None:
        """Move the ref of the newest version to the last one, but never back while steps are repeated."""
        if self._newest is not None and self._moves_refs and self.last is not None:
            await self._publisher.name(self.last, self._newest)

    async def offer(self) -> None:
        """Make the last stored version, if any, the candidate, even if none is due."""
        if self.last is not None:
            await self._publisher.name(self.last, "candidate")


class Overlapped:
    """Publishes in the background: a version is stored while the trainer computes the next step.

    Cancelling a waiting caller does not cancel the publication. `settle` must be called before the end, or the last step may be lost.
    """

    def __init__(self, inner: Candidates) -> None:
        self._inner = inner
        self._under_way: asyncio.Task[PolicyVersion] | None = None

    @property
    def trouble(self) -> str | None:
        """Why the last publication failed, until `begin` or `settle` raises it. None if it succeeded or is in progress."""
        task = self._under_way
        error = task.exception() if task is not None and task.done() and not task.cancelled() else None
        return None if error is None else f"the last version is not stored: {type(error).__name__}: {error}"

    async def begin(self, learned: Learned) -> None:
        """Start to publish a version after the previous one, and wait until the previous one is stored.

        Raises the error of the previous publication, if any; the new one runs all the same.
        """
        before = self._under_way
        self._under_way = asyncio.create_task(self._publish(learned, before))
        if before is not None:
            await asyncio.wait({before})
            before.result()

    async def settle(self) -> None:
        """Wait until all versions are stored. Raises the error of the last publication."""
        if (task := self._under_way) is not None:
            await asyncio.wait({task})
            self._under_way = None
            task.result()

    async def _publish(self, learned: Learned, before: asyncio.Task[PolicyVersion] | None) -> PolicyVersion:
        if before is not None:
            await asyncio.wait({before})
        return await self._inner.publish(learned)
