"""Mark-and-sweep garbage collection of a weight store: deletes old objects that no ref, pin, lease, recent version or release needs.

Marking goes from the refs and their manifests to every hash that must be kept. The order of steps makes collection safe alongside
publishers and followers, and against a kill at any instant:

1. List the objects, then the refs; read the manifests and mark. A manifest that cannot be read ends the collection here.
2. Delete the refs of versions that are not marked, so that nobody finds them any more.
3. List the refs again and mark again. A version that became needed meanwhile gets its ref back.
4. Delete the objects that neither pass has marked and that were not put again since they were listed.

The collector cannot see the base of a publication that has not written its manifest yet. A publisher that builds on an old version that
nothing keeps must hold it meanwhile (`pins.held`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.core.errors import BadConfig, Conflict, Corrupt, NotFound, OstinatoError
from ostinato.core.parallel import for_each
from ostinato.core.records import PolicyVersion
from ostinato.weights.config import CollectConfig
from ostinato.weights.store.interface import LEASES, KeptStore, ListedObject, ListedRef
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.content import VERSIONS
from ostinato.weights.version.manifest import Manifest

# ---------------------------------------------------------------- mark


@dataclass(frozen=True, slots=True)
class Node:
    """What marking needs of a manifest. `parent`: None if no ancestor is needed (no links)."""

    policy: PolicyVersion
    parent: str | None
    routes: tuple[str, ...]
    objects: frozenset[str]

    @classmethod
    def of(cls, manifest: Manifest) -> Node:
        """Return the node of a manifest."""
        routes = tuple(route.manifest for route in manifest.routes)
        parent = manifest.parent if manifest.links else None
        return cls(manifest.policy, parent, routes, frozenset(manifest.objects()))


@dataclass(frozen=True, slots=True)
class Rules:
    """What is kept in addition to the versions that refs name: the `newest` versions, and everything younger than `grace_s` seconds.

    A lease expires after `lease_s` seconds. `roots` are kept if they are in the store.
    """

    newest: int
    grace_s: float
    lease_s: float
    roots: tuple[str, ...] = ()


@dataclass(slots=True)
class Starts:
    """The GC roots: the manifests that marking starts from, each with the reasons to keep it, and the requested roots that are not in the
    store.
    """

    reasons: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    missing: list[str] = field(default_factory=list[str])

    def add(self, manifest: str, reason: str) -> None:
        """Add a reason to keep a manifest."""
        self.reasons.setdefault(manifest, []).append(reason)


def versions_of(refs: Mapping[str, ListedRef]) -> dict[str, str]:
    """Return {root: hash of its manifest} from the refs that name versions."""
    return {ref.removeprefix(VERSIONS): at.value for ref, at in refs.items() if ref.startswith(VERSIONS)}


def starts(
    refs: Mapping[str, ListedRef], versions: Mapping[str, str], numbers: Mapping[str, int], rules: Rules
) -> Starts:
    """Return where marking starts: named refs, unexpired leases, the newest versions, young versions, and the roots that the rules name.

    `versions` maps roots to manifests, `numbers` manifests to version numbers.

    Example: ``starts(refs, versions, numbers, rules).reasons == {"5c1e...": ["live", "newest 20"]}``
    """
    result = Starts()
    for ref, at in refs.items():
        if ref.startswith(VERSIONS):
            if at.age_s < rules.grace_s:
                result.add(at.value, "young")
        elif not ref.startswith(LEASES) or at.age_s <= rules.lease_s:
            result.add(versions.get(at.value, at.value), ref)
    for manifest in sorted(numbers, key=lambda hash: (-numbers[hash], hash))[: rules.newest]:
        result.add(manifest, f"newest {rules.newest}")
    for root in rules.roots:
        if root in versions:
            result.add(versions[root], "released")
        else:
            result.missing.append(root)
    return result


def marked(nodes: Mapping[str, Node], manifests: Iterable[str]) -> set[str]:
    """Return every hash of a manifest or object that these manifests need.

    A manifest needs itself, its routes, and its ancestors back to the first one with a full snapshot, with all their objects. It does not
    need the bases of routes. `nodes` must hold all these manifests.
    """
    seen: set[str] = set()
    needed: set[str] = set()
    for start in manifests:
        at: str | None = start
        while at is not None and at not in seen:
            seen.add(at)
            for hash in (at, *nodes[at].routes):
                needed.add(hash)
                needed |= nodes[hash].objects
            at = nodes[at].parent
    return needed


def expired(refs: Mapping[str, ListedRef], rules: Rules) -> list[str]:
    """Return the leases that have expired and are old enough to be deleted."""
    limit = max(rules.lease_s, rules.grace_s)
    return [ref for ref, at in refs.items() if ref.startswith(LEASES) and at.age_s > limit]


# ---------------------------------------------------------------- sweep


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GcProgress:
    """The progress of a collection: `done` of `total` (None: unknown), and the bytes so far.

    Example: ``GcProgress(stage="deleting objects", done=120, total=3_400, bytes=8_053_063_680)``
    """

    stage: str
    done: int
    total: int | None
    bytes: int


OnStep = Callable[[GcProgress], None]


@dataclass(slots=True)
class Tally:
    """A number of objects, and their total size."""

    objects: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, listed: Iterable[ListedObject]) -> Tally:
        """Return the tally of these objects."""
        sizes = [each.bytes for each in listed]
        return cls(len(sizes), sum(sizes))

    def add(self, listed: ListedObject) -> None:
        """Count one object."""
        self.objects += 1
        self.bytes += listed.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection kept and deleted or, if `dry_run`, would delete.

    `young`: unneeded objects that are too young to be deleted, counted in `kept`, too; `reasons`: why each kept version is kept; `gone`:
    the other versions; `missing`: the requested roots that are not in the store.

    Example: ``Collected(dry_run=False, reasons={v9: ("live", "newest 20")}, gone=(v1, v2), leases=("lease/gateway-3",),
    missing=(), kept=Tally(41, 1_200_000_000), young=Tally(2, 9_000_000), deleted=Tally(7, 310_000_000))``
    """

    dry_run: bool
    reasons: Mapping[PolicyVersion, tuple[str, ...]]
    gone: tuple[PolicyVersion, ...]
    leases: tuple[str, ...]
    missing: tuple[str, ...]
    kept: Tally
    young: Tally
    deleted: Tally


async def collect(
    store: KeptStore,
    config: CollectConfig | None = None,
    *,
    roots: Sequence[str] = (),
    dry_run: bool = False,
    on_step: OnStep = lambda step: None,
) -> Collected:
    """Delete what nothing needs. `roots`, the versions that were live, are also kept if they are in the store.

    Ages are measured with the store's clock only.

    Raises:
        Corrupt: the manifest of a version cannot be read, so it is unknown what it needs; nothing was deleted.
        Conflict: another collection, or a publisher, moved refs meanwhile; run it again.
        BadConfig: the grace period is too short for this store.
        Unavailable, StorageFull: the store refused; everything needed is still there, and the call can be repeated.

    Example: ``report = await collect(DirectoryStore(Path("weights")), CollectConfig(keep=5), dry_run=True)``
    """
    config = config or CollectConfig()
    rules = Rules(config.keep, 3600 * config.grace_hours, config.lease_s, tuple(roots))
    if rules.grace_s < 2 * store.renews_s:
        raise BadConfig(
            f"collect.grace_hours: {config.grace_hours:g} is too short for a store that does not renew objects younger than "
            f"{store.renews_s:g} s; give at least {store.renews_s / 1800:g}, or a smaller weights.renew_s"
        )
    return await _Collection(store, rules, config.parallel, on_step).run(dry_run)


@dataclass(slots=True)
class _Look:
    """The result of one pass over the refs."""

    refs: dict[str, ListedRef]
    versions: dict[str, str]
    starts: Starts
    marked: set[str]


@dataclass(slots=True)
class _Collection:
    store: KeptStore
    rules: Rules
    parallel: int
    on_step: OnStep
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    old: dict[str, ListedObject] = field(default_factory=dict[str, ListedObject])
    total: Tally = field(default_factory=Tally)
    young: list[ListedObject] = field(default_factory=list[ListedObject])

    async def run(self, dry_run: bool) -> Collected:
        await self._list()
        look = await self._look({})
        dead = {root: hash for root, hash in look.versions.items() if hash not in look.marked}
        if dry_run:
            deleted = Tally.of(self._unneeded(look.marked))
            return self._report(look, dead, expired(look.refs, self.rules), deleted, dry_run=True)
        removed = dict[str, str]()
        try:
            for root, hash in dead.items():
                removed[root] = hash  # before the deletion, because one that fails halfway must be restored, too
                if not await self._drop(look, VERSIONS + root):
                    del removed[root]
            leases = [ref for ref in expired(look.refs, self.rules) if await self._drop(look, ref)]
            again = await self._look(removed)
        except (OstinatoError, OSError):
            await self._restore(removed)
            raise
        look.marked |= again.marked
        saved = {root: hash for root, hash in removed.items() if hash in look.marked}
        await self._restore(saved)
        gone = {root: hash for root, hash in removed.items() if root not in saved}
        deleted = await self._delete(gone, look.marked)
        again.marked = look.marked
        return self._report(again, gone, leases, deleted, dry_run=False)

    async def _list(self) -> None:
        async for listed in self.store.list_objects():
            self.total.add(listed)
            if listed.age_s >= self.rules.grace_s:
                self.old[listed.hash] = listed
            else:
                self.young.append(listed)
            self.on_step(GcProgress("listing objects", self.total.objects, None, self.total.bytes))

    async def _look(self, removed: Mapping[str, str]) -> _Look:
        """Read refs and manifests, and mark. `removed`: versions whose refs were deleted, but that may still be needed."""
        refs = await self.store.list_refs()
        versions = {**removed, **versions_of(refs)}
        try:
            await self._read(versions.values())
            numbers = {hash: self.nodes[hash].policy.number for hash in versions.values()}
            origins = starts(refs, versions, numbers, self.rules)
            await self._read_needed(origins.reasons)
        except Corrupt as error:
            if await self.store.refs() != {ref: at.value for ref, at in refs.items()}:
                raise Conflict(
                    "refs moved while their manifests were read: another collection or a publisher is running; run it again"
                ) from error
            raise
        return _Look(refs, versions, origins, marked(self.nodes, origins.reasons))

    async def _read_needed(self, manifests: Iterable[str]) -> None:
        todo, seen = set(manifests), set[str]()
        while todo:  # one link of all chains at a time; most manifests are in `nodes` already
            await self._read(todo)
            seen |= todo
            nodes = [self.nodes[hash] for hash in todo]
            await self._read(route for node in nodes for route in node.routes)
            todo = {node.parent for node in nodes if node.parent is not None} - seen

    async def _read(self, hashes: Iterable[str]) -> None:
        manifests = Manifests(self.store)
        new = [hash for hash in dict.fromkeys(hashes) if hash not in self.nodes]

        async def one(hash: str) -> int:
            try:
                self.nodes[hash] = Node.of(await manifests.read(hash))
            except (NotFound, Corrupt) as error:
                raise Corrupt(
                    f"manifest {hash} cannot be read, so it is unknown what it needs: {error}. Nothing was deleted. "
                    f"Restore it or publish the version again; delete the ref that leads to it if the version may go"
                ) from error
            return 0

        await self._each("reading manifests", new, one)

    async def _drop(self, look: _Look, ref: str) -> bool:
        at = look.refs[ref]
        try:
            await self.store.delete_ref(ref, at.value, at.stamp)
        except Conflict:  # the ref was moved meanwhile, so it is still in use
            return False
        return True

    async def _restore(self, versions: Mapping[str, str]) -> None:
        for root, hash in versions.items():
            logger.info("version %s is needed again and stays", root)
            try:
                await self.store.move_ref(VERSIONS + root, None, hash)
            except Conflict:
                logger.info("version %s was published again meanwhile", root)

    async def _delete(self, gone: Mapping[str, str], keep: set[str]) -> Tally:
        """Delete the manifests of the `gone` versions first, then all other unneeded objects."""
        first = {hash for manifest in gone.values() for hash in (manifest, *self.nodes[manifest].routes)}
        unneeded = {listed.hash: listed for listed in self._unneeded(keep)}
        deleted = Tally()

        async def one(hash: str) -> int:
            if await self.store.delete(hash, unneeded[hash].stamp):
                deleted.add(unneeded[hash])
            return unneeded[hash].bytes

        await self._each("deleting manifests", [hash for hash in unneeded if hash in first], one)
        await self._each("deleting objects", [hash for hash in unneeded if hash not in first], one)
        return deleted

    def _unneeded(self, keep: set[str]) -> list[ListedObject]:
        return [listed for hash, listed in self.old.items() if hash not in keep]

    async def _each(self, stage: str, names: Sequence[str], work: Callable[[str], Awaitable[int]]) -> None:
        """Call `work`, which returns the bytes that it processed, for each name, `parallel` at a time."""
        done, size = 0, 0

        async def one(name: str) -> None:
            nonlocal done, size
            size += await work(name)
            done += 1
            self.on_step(GcProgress(stage, done, len(names), size))

        await for_each(names, self.parallel, one)

    def _report(
        self, look: _Look, gone: Mapping[str, str], leases: Sequence[str], deleted: Tally, *, dry_run: bool
    ) -> Collected:
        kept = [hash for root, hash in look.versions.items() if root not in gone]
        reasons = {
            self.nodes[hash].policy: tuple(look.starts.reasons.get(hash, ["a later version builds on it"]))
            for hash in kept
        }
        return Collected(
            dry_run=dry_run,
            reasons=dict(sorted(reasons.items(), reverse=True)),
            gone=tuple(sorted(self.nodes[hash].policy for hash in gone.values())),
            leases=tuple(leases),
            missing=tuple(look.starts.missing),
            kept=Tally(self.total.objects - deleted.objects, self.total.bytes - deleted.bytes),
            young=Tally.of(listed for listed in self.young if listed.hash not in look.marked),
            deleted=deleted,
        )
