"""A pull-through cache: a weight store that reads an upstream store through a local directory, as a host's cache or a site's relay.

Each object is fetched from upstream once, however many readers ask for it, and is verified and stored locally before any reader gets it.
Refs come from upstream. When upstream cannot be reached, local objects and the last known refs are served, and the log says so. A relay
need not be trusted, because its readers verify everything against the root.

`relay_app` serves a relay over HTTP in a bucket's layout: ``/objects/ab/cdef...`` (with ranges), ``/refs/NAME``, ``/refs``, ``/healthz``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from blake3 import blake3
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ostinato.core.errors import Conflict, Corrupt, NotFound, OstinatoError, StorageFull, Unauthorized, Unavailable
from ostinato.core.seams import Clock
from ostinato.weights.config import RelayConfig
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.disk import unread
from ostinato.weights.store.interface import DamagedRefs, RefStore, check_range
from ostinato.weights.store.readonly import read_only
from ostinato.weights.version.content import VERSIONS, check_hash, check_ref, hash_of, is_hash

# ---------------------------------------------------------------- the cache


logger = logging.getLogger(__name__)

_REVERIFY_S: Final = 60.0
"""Opening a file hashes it again if it was last hashed longer ago than this, because disks can corrupt data."""

_READ_BYTES: Final = 1 << 20


class Shelf:
    """An LRU cache of objects in a directory store, at most `max_bytes` large. The order of use survives a restart, as the files' access
    times.

    Example::

        shelf = Shelf(DirectoryStore(Path("cache")), max_bytes=1 << 36)
        await shelf.put(name, data)
        async with shelf.opened(name) as path: ...
    """

    def __init__(self, store: DirectoryStore, max_bytes: int, clock: Clock = time.monotonic) -> None:
        self._store, self._max_bytes, self._clock = store, max_bytes, clock
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._checked: dict[str, float] = {}
        self._pins: Counter[str] = Counter()
        self.bytes = self.evicted = 0
        for name, size in _cached_objects(store.root):
            self._sizes[name] = size
            self.bytes += size
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, hash: str) -> bool:
        return hash in self._sizes

    async def get(self, hash: str) -> bytes | None:
        """Return an object's verified bytes, or None if it is missing or damaged. Raises Unavailable as its store."""
        if hash not in self._sizes:
            return None
        try:
            data = await self._store.get(hash)
        except (NotFound, Corrupt) as error:
            self._drop(hash, error)
            return None
        self._touch(hash)
        return data

    @contextlib.asynccontextmanager
    async def opened(self, hash: str) -> AsyncGenerator[Path | None]:
        """Yield the verified file of an object, which is not evicted while the block runs, or None if it is missing or damaged."""
        self._pins[hash] += 1
        try:
            yield self._path(hash) if await self._is_sound(hash) else None
        finally:
            self._pins[hash] -= 1
            if not self._pins[hash]:
                del self._pins[hash]

    async def put(self, hash: str, data: bytes) -> None:
        """Store verified bytes. Raises StorageFull, also if there is no room because all other objects are being read."""
        if hash in self._sizes:
            return
        self._make_room(len(data))
        self.bytes += len(data)  # reserve the room, since other objects may arrive meanwhile
        try:
            await self._store.put(data)
        except BaseException:
            self.bytes -= len(data)
            raise
        if hash in self._sizes:  # another caller put it meanwhile
            self.bytes -= len(data)
            return
        self._sizes[hash] = len(data)
        self._checked[hash] = self._clock()
        self._touch(hash)  # the time that the file system gave it may be some milliseconds behind

    def _path(self, hash: str) -> Path:
        return self._store.root / "objects" / hash[:2] / hash[2:]

    async def _is_sound(self, hash: str) -> bool:
        if hash not in self._sizes:
            return False
        checked = self._checked.get(hash)
        if checked is None or self._clock() - checked > _REVERIFY_S:
            try:
                await asyncio.to_thread(_check, self._path(hash), hash)
            except Corrupt as error:
                self._drop(hash, error)
                return False
            self._checked[hash] = self._clock()
        self._touch(hash)
        return True

    def _touch(self, hash: str) -> None:
        if hash in self._sizes:
            self._sizes.move_to_end(hash)
            with contextlib.suppress(OSError):
                path = self._path(hash)
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def _drop(self, hash: str, error: Exception) -> None:
        logger.warning("object %s is dropped and will be fetched again: %s", hash, error)
        self._remove(hash)

    def _remove(self, hash: str) -> None:
        self.bytes -= self._sizes.pop(hash, 0)
        self._checked.pop(hash, None)
        # the file is missing, or the disk refuses changes, in which case it also refuses new objects
        with contextlib.suppress(OSError):
            self._path(hash).unlink()

    def _make_room(self, size: int) -> None:
        """Evict objects until there is room for `size` bytes. Synchronous: a late removal could hit the same object, fetched again."""
        for hash in [name for name in self._sizes if name not in self._pins]:
            if self.bytes + size <= self._max_bytes:
                return
            self._remove(hash)
            self.evicted += 1
        if size and self.bytes + size > self._max_bytes:
            raise StorageFull(
                f"{self._store.root} holds {self.bytes} of at most {self._max_bytes} bytes, all in use: no room for {size} more. "
                "Raise relay.max_bytes"
            )


def _cached_objects(root: Path) -> list[tuple[str, int]]:
    """Return the objects in a directory store with their sizes, least recently used first."""
    objects: list[tuple[int, str, int]] = []
    for path in (root / "objects").glob("*/*"):
        name = path.parent.name + path.name
        if is_hash(name):
            stat = path.stat()
            objects.append((stat.st_atime_ns, name, stat.st_size))
    return [(name, size) for _, name, size in sorted(objects)]


def _check(path: Path, hash: str) -> None:
    state = blake3()
    try:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                state.update(piece)
    except OSError as error:
        raise unread(hash, error) from error
    if state.hexdigest() != hash:
        raise Corrupt(f"{path} does not match its hash")


# ---------------------------------------------------------------- the store


_T = TypeVar("_T")
_ATTEMPTS: Final = 3
_LISTING: Final = ""  # key of the listing; no ref has this name
_KEPT_VERSION_REFS: Final = 1000
_NEW_REFS_PER_CLEANUP: Final = 100
_OTHER_REFS_CHECKED: Final = 4  # if upstream has one of these, a missing ref counts as deleted


@dataclass(frozen=True, slots=True)
class CachedRef:
    """The value of a ref, and its age: the seconds since upstream gave it (None: before this process started)."""

    value: str | None
    age_s: float | None


class Once(Generic[_T]):
    """Request coalescing: runs one task per key for all concurrent callers. The task continues if a caller is cancelled."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[_T]] = {}

    async def get(self, key: str, errand: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return the result of the running task for `key`, or of a new task if there is none."""
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(errand())
            task.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(task)

    def _done(self, key: str, task: asyncio.Task[_T]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved, in case all callers were cancelled


class RelayStore:
    """Reads `upstream` through the cache `local`, and refuses writes. Each local directory belongs to one process, each instance to one
    event loop.

    Example::

        store = RelayStore(BucketStore(BucketConfig(url="s3://weights/run-7")), DirectoryStore(Path("cache")))
        weights = await Follower(store).fetch(policy)

    Raises (all methods): upstream's errors for objects that are not local; BadRequest for a hash or ref name of the wrong form.
    """

    def __init__(
        self,
        upstream: RefStore,
        local: DirectoryStore,
        config: RelayConfig | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._upstream, self._config = upstream, config or RelayConfig()
        self._shelf = Shelf(local, self._config.max_bytes, clock)
        self._refs = _Refs(upstream, local, self._config, clock)
        self._objects: Once[_Fetched] = Once()
        self._gate = asyncio.Semaphore(self._config.parallel)
        self.hits = self.fetched = self.fetched_bytes = 0

    async def get(self, hash: str) -> bytes:
        """Return the bytes with this hash, verified, from the local directory or from upstream. Raises NotFound or Corrupt."""
        data = await self._shelf.get(check_hash(hash))
        if data is not None:
            self.hits += 1
            return data
        return await self._from_upstream(hash)

    @contextlib.asynccontextmanager
    async def opened(self, hash: str) -> AsyncGenerator[Path]:
        """Yield the verified file of an object, fetched if necessary. It is not evicted while the block runs.

        Raises: like `get`; StorageFull if it cannot be kept locally.
        """
        check_hash(hash)
        for attempt in range(_ATTEMPTS):
            async with self._shelf.opened(hash) as path:
                if path is not None:
                    self.hits += attempt == 0
                    yield path
                    return
            got = await self._objects.get(hash, lambda: self._fetch(hash))
            if got.refused is not None:
                raise got.refused
        raise StorageFull(f"object {hash} was evicted {_ATTEMPTS} times before it was read; raise relay.max_bytes")

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        """Return a part of an object, which is fetched whole. Raises: like `get`; Corrupt if the object is shorter."""
        check_range(start, length)
        async with self._shelf.opened(check_hash(hash)) as path:
            if path is not None:
                self.hits += 1
                part = await asyncio.to_thread(_part, path, hash, start, length)
            else:
                part = (await self._from_upstream(hash))[start : start + length]
        if len(part) < length:
            raise Corrupt(f"object {hash} ends before byte {start + length}. Restore it, or publish again")
        return part

    async def has(self, hash: str) -> bool:
        """Return True if an object of this name is stored locally or upstream. Its bytes are not verified."""
        return check_hash(hash) in self._shelf or await self._upstream.has(hash)

    async def read_ref(self, ref: str) -> str | None:
        """Return the hash that upstream's ref points to, or None; the last known value if upstream cannot be reached."""
        return (await self.look(ref)).value

    async def look(self, ref: str) -> CachedRef:
        """Like `read_ref`, with the age of the answer. Raises Unavailable if upstream cannot be reached and the ref was never read."""
        return await self._refs.look(check_ref(ref))

    async def refs(self) -> dict[str, str]:
        """Return every ref of upstream, sorted by name; the refs known locally if upstream cannot be reached."""
        return await self._refs.every()

    async def put(self, data: bytes | memoryview) -> str:
        """Refused: raises BadConfig."""
        raise read_only("a relay")

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        """Refused: raises BadConfig."""
        raise read_only("a relay")

    def figures(self) -> dict[str, int | float | None]:
        """Return the cache's metrics: its content, and hits and fetches since the start. `unreachable_s` is None while upstream answers."""
        return {
            "objects": len(self._shelf),
            "bytes": self._shelf.bytes,
            "max_bytes": self._config.max_bytes,
            "hits": self.hits,
            "fetched": self.fetched,
            "fetched_bytes": self.fetched_bytes,
            "evicted": self._shelf.evicted,
            "unreachable_s": self._refs.unreachable_s(),
        }

    async def _from_upstream(self, hash: str) -> bytes:
        got = await self._objects.get(hash, lambda: self._fetch(hash))
        if got.refused is not None:
            logger.warning("object %s is served but not cached: %s", hash, got.refused)
        return got.data

    async def _fetch(self, hash: str) -> _Fetched:
        async with self._gate:
            if (data := await self._shelf.get(hash)) is not None:  # another caller's fetch ended just before this one
                return _Fetched(data, None)
            started = time.perf_counter()
            data = await self._upstream.get(hash)
            if await asyncio.to_thread(hash_of, data) != hash:
                raise Corrupt(f"object {hash} came from upstream but does not match its hash; it is not cached")
            seconds = time.perf_counter() - started
            self.fetched += 1
            self.fetched_bytes += len(data)
            refused = None
            try:
                await self._shelf.put(hash, data)
            except StorageFull as error:
                refused = error
        logger.info("fetched %s: %.2f MB, %.1f MB/s", hash[:16], len(data) / 1e6, len(data) / 1e6 / max(seconds, 1e-6))
        return _Fetched(data, refused)


def _part(path: Path, hash: str, start: int, length: int) -> bytes:
    """Return bytes of an object's file, fewer than `length` if the file is shorter. Raises Corrupt if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(length)
    except OSError as error:
        raise Corrupt(f"object {hash} was here and cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _Fetched:
    data: bytes
    refused: StorageFull | None  # why it could not be cached


@dataclass(frozen=True, slots=True)
class _Known(Generic[_T]):
    value: _T
    at: float


class _Refs:
    """A cache of upstream's refs. They are also stored on disk with the objects, so that the relay can start while upstream is
    unreachable.
    """

    def __init__(self, upstream: RefStore, local: DirectoryStore, config: RelayConfig, clock: Clock) -> None:
        self._upstream, self._local, self._config, self._clock = upstream, local, config, clock
        self._known: dict[str, _Known[str]] = {}
        self._listed: _Known[dict[str, str]] | None = None
        self._reading: Once[str | None] = Once()
        self._listing: Once[dict[str, str]] = Once()
        self._down: _Known[str] | None = None  # why upstream does not answer, and since when
        self._failed_at = float("-inf")
        self._new_refs = _NEW_REFS_PER_CLEANUP  # since the last cleanup; an earlier process may have left many
        self._cleaning: asyncio.Task[None] | None = None

    def unreachable_s(self) -> float | None:
        """Return the seconds for which upstream has not answered, or None while it answers."""
        return None if self._down is None else self._clock() - self._down.at

    async def look(self, ref: str) -> CachedRef:
        known = self._known.get(ref)
        if known is None or self._age(known) >= self._config.fresh_s:
            try:
                return CachedRef(await self._reading.get(ref, lambda: self._read(ref)), 0.0)
            except Unavailable:
                known = self._known.get(ref)
                if known is None:
                    value = await self._local.read_ref(ref)
                    if value is None:
                        raise
                    return CachedRef(value, None)
        return CachedRef(known.value, self._age(known))

    async def every(self) -> dict[str, str]:
        if self._listed is None or self._age(self._listed) >= self._config.fresh_s:
            try:
                return await self._listing.get(_LISTING, self._list)
            except Unavailable:
                if self._listed is None:
                    return await self._local.refs()
        return self._listed.value

    async def _read(self, ref: str) -> str | None:
        value = await self._ask(lambda: self._upstream.read_ref(ref), f"reading ref {ref}")
        before = self._known.pop(ref, None)
        if value is not None:  # missing refs are not cached, because clients may ask for any name
            self._known[ref] = _Known(value, self._clock())
        if value is None:
            await self._delete_stored(ref)
        elif before is None or before.value != value:
            await self._store_ref(ref, value)
        return value

    async def _list(self) -> dict[str, str]:
        refs = await self._ask(self._upstream.refs, "listing refs")
        self._listed = _Known(refs, self._clock())
        return refs

    async def _ask(self, question: Callable[[], Coroutine[Any, Any, _T]], doing: str) -> _T:
        """Ask upstream. Raises Unavailable on failure, and without asking for `timeout_s` after a failure (circuit breaker)."""
        if self._down is not None and self._clock() - self._failed_at < self._config.timeout_s:
            raise Unavailable(f"{doing}: upstream does not answer ({self._down.value})")
        try:
            async with asyncio.timeout(self._config.timeout_s):
                answer = await question()
        except (Unavailable, Unauthorized, OSError) as error:
            reason = str(error) or f"no answer within {self._config.timeout_s:g} s"
            self._failed_at = self._clock()
            if self._down is None:
                self._down = _Known(reason, self._clock())
                logger.warning("upstream does not answer (%s): the last known refs are served until it does", reason)
            raise Unavailable(f"{doing}: upstream does not answer ({reason}), and it was never read before") from error
        if self._down is not None:
            logger.warning("upstream answers again after %.0f s", self._clock() - self._down.at)
            self._down = None
        return answer

    async def _store_ref(self, ref: str, value: str) -> None:
        """Store a ref's value on disk, and start a cleanup if one is due."""
        try:
            old = await self._local.read_ref(ref)
            if old == value:
                return
            await self._local.move_ref(ref, old, value)
        except (StorageFull, Conflict, Corrupt, Unavailable) as error:
            logger.warning("ref %s is served but not stored on disk: %s", ref, error)
            return
        self._new_refs += old is None
        if self._new_refs >= _NEW_REFS_PER_CLEANUP and self._cleaning is None:
            self._new_refs = 0
            self._cleaning = asyncio.create_task(self._clean_up())

    async def _delete_stored(self, ref: str) -> None:
        """Delete a stored ref that upstream no longer has, if upstream has another ref: an unmounted directory would have none at all."""
        try:
            old = await self._local.read_ref(ref)
            if old is not None and await self._has_other(ref):
                await self._local.delete_ref(ref, old)
        except (StorageFull, Conflict, Corrupt, Unavailable) as error:
            logger.warning("ref %s is gone upstream and stays here: %s", ref, error)

    async def _has_other(self, ref: str) -> bool:
        others = [other for other in dict.fromkeys(("live", "control", *self._known)) if other != ref]
        for other in others[:_OTHER_REFS_CHECKED]:
            if await self._ask(lambda other=other: self._upstream.read_ref(other), f"reading ref {other}") is not None:
                return True
        return False

    async def _clean_up(self) -> None:
        """Delete the stored refs of old versions that no other ref points to: each new version adds one, and nobody asks for it again.

        Runs in the background, because an earlier release may have left tens of thousands.
        """
        try:
            try:
                refs = await self._local.refs()
            except DamagedRefs as error:
                refs = error.sound
            needed = {VERSIONS + root for ref, root in refs.items() if not ref.startswith(VERSIONS)}
            versions = [ref for ref in refs if ref.startswith(VERSIONS)]
            newest_first = await asyncio.to_thread(_newest_first, self._local.root / "refs", versions)
            for ref in newest_first[_KEPT_VERSION_REFS:]:
                if ref not in needed:
                    self._known.pop(ref, None)
                    with contextlib.suppress(Conflict, Corrupt):  # moved or damaged meanwhile
                        await self._local.delete_ref(ref, refs[ref])
        except (OstinatoError, OSError) as error:
            logger.warning("refs of old versions stay in %s: %s", self._local.root, error)
        finally:
            self._cleaning = None

    def _age(self, known: _Known[Any]) -> float:
        return self._clock() - known.at


def _newest_first(directory: Path, refs: list[str]) -> list[str]:
    """Return the refs by the time at which they were last moved, the newest first. Refs deleted meanwhile come last."""

    def moved(ref: str) -> float:
        try:
            return (directory / ref).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    return sorted(refs, key=moved, reverse=True)


# ---------------------------------------------------------------- HTTP


_FOREVER = "public, max-age=31536000, immutable"
_EPOCH = "Thu, 01 Jan 1970 00:00:00 GMT"


def relay_app(store: RelayStore) -> Starlette:
    """Return the ASGI app that serves a relay. The response for a ref has the header `Age`, in seconds, if the age is known.

    Example: ``uvicorn.run(relay_app(RelayStore(upstream, DirectoryStore(Path("cache")))))``
    """

    async def get_object(request: Request) -> Response:
        return _Object(store, check_hash(request.path_params["start"] + request.path_params["rest"]))

    async def get_ref(request: Request) -> Response:
        ref = request.path_params["ref"]
        look = await store.look(ref)
        if look.value is None:
            raise NotFound(f"there is no ref {ref}", field="ref")
        headers = {"cache-control": "no-cache"} | ({} if look.age_s is None else {"age": f"{look.age_s:.0f}"})
        return PlainTextResponse(look.value + "\n", headers=headers)

    async def get_refs(request: Request) -> Response:
        return JSONResponse(await store.refs(), headers={"cache-control": "no-cache"})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", **store.figures()})

    return Starlette(
        routes=[
            Route("/objects/{start}/{rest}", get_object),
            Route("/refs", get_refs),
            Route("/refs/{ref:path}", get_ref),
            Route("/healthz", health),
        ],
        exception_handlers={OstinatoError: _refuse},
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, OstinatoError)
    return JSONResponse({"error": {"code": error.code, "message": str(error)}}, status_code=error.status)


class _File(FileResponse):
    chunk_size = 1 << 20  # each chunk costs one call on a thread


class _Object(Response):
    """The response with an object from its file, which is not evicted meanwhile."""

    def __init__(self, store: RelayStore, hash: str) -> None:
        super().__init__()
        self._store, self._hash = store, hash

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"etag": f'"{self._hash}"', "last-modified": _EPOCH, "cache-control": _FOREVER}
        async with self._store.opened(self._hash) as path:
            await _File(path, headers=headers, media_type="application/octet-stream")(scope, receive, send)
