"""Turns a ref or a policy version into verified full weights in memory, for serving, evaluation and export.

New weights are built beside those that are being served, and delivered only when every hash matches. A corrupt or missing object raises
an error that names it, and the old weights stay in service.

Also here: the live version as the trainer last saw it (`Released`), and the release controller's look-up of refs, roots and policy versions
(`StoreVersions`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from ostinato.core.arm_assignment import BRANCHES
from ostinato.core.errors import Corrupt, NotFound, OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.seams import WeightStore
from ostinato.core.weights import Snapshot, Weights
from ostinato.weights.config import FollowerConfig
from ostinato.weights.follow.delta_apply import rebuild
from ostinato.weights.follow.export import write_model
from ostinato.weights.follow.journal import Journal
from ostinato.weights.store.interface import RefStore
from ostinato.weights.version.chain import Loaded, Manifests
from ostinato.weights.version.content import VERSIONS, version_ref
from ostinato.weights.version.manifest import Manifest
from ostinato.weights.version.signing import check_signature

logger = logging.getLogger(__name__)

OnChange = Callable[[str, Snapshot], Awaitable[object]]
OnError = Callable[[str, Exception], None]


def _log_error(ref: str, error: Exception) -> None:
    logger.error("ref %s: the weights stay as they are: %s", ref, error)


class Follower:
    """Fetches and verifies versions from a weight store, and watches refs. Safe to share between tasks of one event loop.

    Example::

        follower = Follower(DirectoryStore(Path("weights")))
        live = await follower.resolve("live")
        weights = await follower.fetch(live)
    """

    def __init__(
        self, store: WeightStore, config: FollowerConfig | None = None, journal: Journal | None = None
    ) -> None:
        self._store = store
        self._journal = journal
        self._config = config or FollowerConfig()
        self._manifests = Manifests(store)
        self._kept: OrderedDict[str, Loaded] = OrderedDict()
        self._lock = asyncio.Lock()

    async def resolve(self, ref: str) -> PolicyVersion | None:
        """Return the version that a ref points to (by its root or its manifest's hash), or None if there is no such ref.

        Raises: BadRequest for an invalid ref name; NotFound or Corrupt if the manifest is missing or damaged; Corrupt if none of the
        trusted keys signed it.
        """
        value = await self._store.read_ref(ref)
        if value is None:
            return None
        return (await self._signed(value))[1].policy

    async def _signed(self, value: str) -> tuple[str, Manifest]:
        hash, manifest = await self._manifests.at(value)
        check_signature(manifest, hash, self._config.trusted)
        return hash, manifest

    async def fetch(self, policy: PolicyVersion) -> Weights:
        """Return the full weights of a version, with every chunk and the root verified. The arrays are read-only and shared with later
        versions.

        Raises: NotFound for a version or object that is not in the store; Corrupt, naming a damaged object.
        """
        return await self._fetch(policy.hash, None)

    async def _fetch(self, root: str, found: tuple[str, Manifest] | None) -> Weights:
        async with self._lock:
            if root in self._kept:
                self._kept.move_to_end(root)
                return self._kept[root].weights
            hash, manifest = found or await self._manifests.of_root(root)
            check_signature(manifest, hash, self._config.trusted)
            loaded = await rebuild(self._store, self._manifests, hash, self._known, self._config.max_bytes)
            self._kept[root] = loaded
            while len(self._kept) > self._config.keep:
                self._kept.popitem(last=False)
            return loaded.weights

    def _known(self, value: str) -> Loaded | None:
        return next((kept for kept in self._kept.values() if value in (kept.manifest.root, kept.hash)), None)

    async def watch(
        self,
        refs: Sequence[str],
        on_change: OnChange,
        interval_s: float | None = None,
        on_error: OnError = _log_error,
        *,
        at_start: Sequence[str] = (),
        on_recovered: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Call `on_change(ref, snapshot)` for each ref's version, now and whenever the ref moves, until cancelled. Only verified weights
        are delivered. Refs are checked in order; the first pass takes the order of `at_start`, if given.

        If a version cannot be fetched, or `on_change` raises OstinatoError or OSError, `on_error` is called, once per distinct message, and
        the version is retried; the other refs are not affected. `on_recovered` is called with a ref once a reported error is over, whether
        or not a version had to be delivered. An exception from `on_error` ends the watch.

        With a journal, a follower that starts and cannot fetch a ref's version first delivers the version that it had last, if that one can
        be fetched. A journal that cannot be written is also reported and retried, but delays no delivery.
        """
        delivered: dict[str, str] = {}
        reported: dict[str, str] = {}
        order = at_start or refs
        while True:
            for ref in order:
                try:
                    await self._deliver(ref, delivered, on_change)
                    if reported.pop(ref, None) is not None:
                        on_recovered(ref)
                except (OstinatoError, OSError) as error:
                    await self._fall_back(ref, delivered, on_change)
                    if reported.get(ref) != str(error):
                        on_error(ref, error)
                    reported[ref] = str(error)
            order = refs
            await asyncio.sleep(self._config.interval_s if interval_s is None else interval_s)

    async def _deliver(self, ref: str, delivered: dict[str, str], on_change: OnChange) -> None:
        value = await self._store.read_ref(ref)
        if value is None:
            if ref in delivered or self._had(ref) is not None:
                raise NotFound(f"ref {ref} is no longer in the weight store; point it to a version again", field="ref")
            return
        if delivered.get(ref) == value and self._noted(ref):
            return
        hash, manifest = await self._signed(value)
        policy = manifest.policy
        if delivered.get(ref) != value:
            if self._journal is not None:
                with contextlib.suppress(OSError):  # if the disk stays full, the write below reports it
                    await asyncio.to_thread(self._journal.want, ref, policy)
            await on_change(ref, Snapshot(policy=policy, weights=await self._fetch(policy.hash, (hash, manifest))))
            delivered[ref] = value
        if self._journal is not None:
            await asyncio.to_thread(self._journal.have, ref, policy)

    def _had(self, ref: str) -> PolicyVersion | None:
        """Return the version that was delivered last, according to the journal."""
        entry = self._journal.entries.get(ref) if self._journal is not None else None
        return entry.have.policy if entry is not None and entry.have is not None else None

    def _noted(self, ref: str) -> bool:
        """Return True if the journal records that the wanted version was delivered, or if there is no journal."""
        entry = self._journal.entries.get(ref) if self._journal is not None else None
        return self._journal is None or (entry is not None and entry.have is not None and entry.want is None)

    async def _fall_back(self, ref: str, delivered: dict[str, str], on_change: OnChange) -> None:
        """Deliver the version that was served before, if nothing was delivered for `ref` since the start."""
        had = self._had(ref)
        if ref in delivered or had is None:
            return
        with contextlib.suppress(OstinatoError, OSError):  # the error that led here is reported in any case
            await on_change(ref, Snapshot(policy=had, weights=await self.fetch(had)))
            delivered[ref] = had.hash
            logger.warning("ref %s: serving %s, which was served before", ref, had)

    async def log(self, ref: str, limit: int = 100) -> list[Manifest]:
        """Return the version that a ref points to and its ancestors, newest first. Raises NotFound if there is no such ref."""
        value = await self._store.read_ref(ref)
        if value is None:
            raise NotFound(f"there is no ref {ref} in the weight store; `ostinato status` lists them", field="ref")
        versions: list[Manifest] = []
        async for _, manifest in self._manifests.walk((await self._manifests.at(value))[0]):
            versions.append(manifest)
            if len(versions) >= limit:
                break
        return versions

    async def materialise(self, policy: PolicyVersion, directory: Path, files: Iterable[Path] = ()) -> Path:
        """Write a version as a plain model directory: model.safetensors and copies of `files` (config, tokenizer).

        Returns the path of the safetensors file. Raises StorageFull; NotFound and Corrupt like `fetch`.
        """
        weights = await self.fetch(policy)
        notes = {"format": "pt", "ostinato_root": policy.hash, "ostinato_number": str(policy.number)}
        return await asyncio.to_thread(write_model, weights, directory, tuple(files), notes)


# ---------------------------------------------------------------- the live ref


class Released:
    """Follows the ref `live`, and fetches weights of versions, for the trainer. The follower decides which ones stay in memory."""

    def __init__(self, follower: Follower, live: PolicyVersion) -> None:
        self.live = live
        self._follower = follower

    async def refresh(self) -> PolicyVersion:
        """Read the ref again. While the store is unavailable, `live` keeps its last value."""
        try:
            self.live = await self._follower.resolve("live") or self.live
        except Unavailable as error:
            logger.warning("the ref live cannot be read, and is assumed to be at %s still: %s", self.live, error)
        return self.live

    async def candidate(self) -> PolicyVersion | None:
        """Return the newest version that was offered for release, or None."""
        return await self._follower.resolve("candidate")

    async def snapshot(self, policy: PolicyVersion) -> Snapshot:
        """Return a version with its weights. Raises NotFound, Corrupt."""
        return Snapshot(policy=policy, weights=await self._follower.fetch(policy))


# ---------------------------------------------------------------- versions


class StoreVersions:
    """Implements `release.controller.Versions` over a weight store: refs hold the roots of weights, and a root is a version's hash."""

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


async def versions_between(store: RefStore, first: int, last: int, run: str) -> list[PolicyVersion]:
    """Return the stored versions with a number from `first` to `last`, by number, without those whose manifest cannot be read.

    A branch's run gets only the versions of that branch. Any other run gets all versions that belong to no branch, whatever the name of
    the run that published them, since a store may have been copied from another run.
    """
    manifests, versions = Manifests(store), list[PolicyVersion]()
    for ref, hash in (await store.refs()).items():
        if ref.startswith(VERSIONS):
            try:
                manifest = await manifests.read(hash)
            except (NotFound, Corrupt) as error:
                logger.warning("%s: %s", ref, error)
                continue
            if first <= manifest.number <= last and line_of(manifest.run) == line_of(run):
                versions.append(manifest.policy)
    return sorted(versions)


def line_of(run: str) -> str:
    """Return the line of versions that a run publishes to: the run's name for a branch, "" for the shared line."""
    return run if run.startswith(BRANCHES) else ""


async def run_of(store: WeightStore, policy: PolicyVersion) -> str:
    """Return the name of the run that published a version. Raises NotFound, Corrupt."""
    return (await Manifests(store).of_root(policy.hash))[1].run


async def parent_of(store: WeightStore, policy: PolicyVersion) -> str | None:
    """Return the manifest hash of the version that a version was published after, or None. Raises NotFound, Corrupt."""
    return (await Manifests(store).of_root(policy.hash))[1].parent
