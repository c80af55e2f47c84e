"""A weight store in memory that behaves like the one in a directory, and a wrapper that counts calls and injects faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from ostinato.core.errors import Conflict, Corrupt, NotFound, Unavailable
from ostinato.weights.store.interface import ListedObject, ListedRef, RefStore, check_range
from ostinato.weights.version.content import check_hash, check_ref, hash_of, is_hash


class MemoryStore:
    """A `KeptStore` in memory. Tests may read and damage `objects` and `links` (the refs); `now` is its clock, in seconds.

    Example: ``store = MemoryStore(); name = await store.put(b"x"); store.objects[name] = b"rotten"; store.now += 86_400``
    """

    renews_s = 0.0

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.now = 0.0
        self._times: dict[str, tuple[float, int]] = {}  # object or ref -> time and number of its last write
        self._writes = 0

    async def put(self, data: bytes | memoryview) -> str:
        name = hash_of(data)
        self.objects[name] = bytes(data)
        self._touch(name)
        return name

    async def get(self, hash: str) -> bytes:
        if check_hash(hash) not in self.objects:
            raise NotFound(f"object {hash} is not in the weight store", field="hash")
        data = self.objects[hash]
        if hash_of(data) != hash:
            raise Corrupt(f"object {hash} does not match its hash")
        return data

    async def has(self, hash: str) -> bool:
        return check_hash(hash) in self.objects

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        check_range(start, length)
        if check_hash(hash) not in self.objects:
            raise NotFound(f"object {hash} is not in the weight store", field="hash")
        if len(self.objects[hash]) < start + length:
            raise Corrupt(f"object {hash} ends before byte {start + length}")
        return self.objects[hash][start : start + length]

    async def delete(self, hash: str, stamp: str | None = None) -> bool:
        if check_hash(hash) not in self.objects or (stamp is not None and stamp != self._stamp(hash)):
            return False
        del self.objects[hash]
        return True

    async def list_objects(self) -> AsyncIterator[ListedObject]:
        now = self.now
        for name, data in list(self.objects.items()):
            yield ListedObject(name, len(data), self._age(name, now), self._stamp(name))

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        check_hash(new, "new")
        if old is not None:
            check_hash(old, "old")
        now = self.links.get(check_ref(ref))
        if now != old and (old is not None or is_hash(now or "")):
            raise Conflict(f"ref {ref} is at {now or 'nothing'}, not at {old or 'nothing'}")
        if any(name.startswith(f"{ref}/") or ref.startswith(f"{name}/") for name in self.links):
            raise Conflict(f"ref {ref} cannot be made: it would be both a ref and the parent of one")
        self.links[ref] = new
        self._touch(ref)

    async def read_ref(self, ref: str) -> str | None:
        value = self.links.get(check_ref(ref))
        if value is not None and not is_hash(value):
            raise Corrupt(f"ref {ref} holds {value[:80]!r}, which is not a hash")
        return value

    async def refs(self) -> dict[str, str]:
        return dict(sorted(self.links.items()))

    async def list_refs(self) -> dict[str, ListedRef]:
        return {
            ref: ListedRef(value, self._age(ref, self.now), self._stamp(ref))
            for ref, value in sorted(self.links.items())
        }

    async def delete_ref(self, ref: str, old: str, stamp: str | None = None) -> None:
        now = self.links.get(check_ref(ref))
        if now != check_hash(old, "old"):
            raise Conflict(f"ref {ref} is at {now or 'nothing'}, not at {old}")
        if stamp is not None and stamp != self._stamp(ref):
            raise Conflict(f"ref {ref} was moved to {old} again since it was listed")
        del self.links[ref]

    def _touch(self, name: str) -> None:
        self._writes += 1
        self._times[name] = (self.now, self._writes)

    def _age(self, name: str, now: float) -> float:
        return max(0.0, now - self._times.get(name, (0.0, 0))[0])

    def _stamp(self, name: str) -> str:
        return str(self._times.get(name, (0.0, 0))[1])


class WatchedStore:
    """A wrapper that counts the calls to a store, and can make it unavailable, slow, or corrupt.

    `gets` counts reads by hash, `asked` counts reads of refs, `most` is the largest number of concurrent `get` calls. While `away` is True,
    every call raises Unavailable; while `gate` is not set, calls wait; `damage` changes the bytes that are read.
    Example: ``upstream = WatchedStore(MemoryStore()); upstream.away = True``
    """

    def __init__(self, inner: RefStore) -> None:
        self.inner = inner
        self.gets: Counter[str] = Counter()
        self.asked = self.most = self._now = 0
        self.away = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.damage: Callable[[bytes], bytes] = bytes

    async def put(self, data: bytes | memoryview) -> str:
        await self._pass()
        return await self.inner.put(data)

    async def get(self, hash: str) -> bytes:
        self.gets[hash] += 1
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await self._pass()
            return self.damage(await self.inner.get(hash))
        finally:
            self._now -= 1

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        self.gets[hash] += 1
        await self._pass()
        return self.damage(await self.inner.get_range(hash, start, length))

    async def has(self, hash: str) -> bool:
        await self._pass()
        return await self.inner.has(hash)

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        await self._pass()
        await self.inner.move_ref(ref, old, new)

    async def read_ref(self, ref: str) -> str | None:
        self.asked += 1
        await self._pass()
        return await self.inner.read_ref(ref)

    async def refs(self) -> dict[str, str]:
        self.asked += 1
        await self._pass()
        return await self.inner.refs()

    async def _pass(self) -> None:
        await asyncio.sleep(0)
        await self.gate.wait()
        if self.away:
            raise Unavailable("the store was told by a test to be away")
