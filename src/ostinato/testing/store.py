"""A weight store in memory with the same behaviour as the one in a directory."""

from __future__ import annotations

from ostinato.core.errors import Conflict, Corrupt, NotFound
from ostinato.publish.content import check_hash, check_ref, hash_of


class MemoryStore:
    """A `WeightStore` for tests. `objects` and `links` may be read and damaged by a test.

    Example: ``store = MemoryStore(); name = await store.put(b"x"); store.objects[name] = b"rotten"``
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.links: dict[str, str] = {}

    async def put(self, data: bytes | memoryview) -> str:
        name = hash_of(data)
        self.objects[name] = bytes(data)
        return name

    async def get(self, hash: str) -> bytes:
        if check_hash(hash) not in self.objects:
            raise NotFound(f"object {hash} is not in the weight store", field="hash")
        data = self.objects[hash]
        if hash_of(data) != hash:
            raise Corrupt(f"object {hash} does not have the bytes that its name promises")
        return data

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        if check_hash(hash) not in self.objects:
            raise NotFound(f"object {hash} is not in the weight store", field="hash")
        part = self.objects[hash][start : start + length]
        if len(part) != length:
            raise Corrupt(f"object {hash} is shorter than {start + length} bytes")
        return part

    async def has(self, hash: str) -> bool:
        return check_hash(hash) in self.objects

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        check_hash(new, "new")
        if old is not None:
            check_hash(old, "old")
        now = self.links.get(check_ref(ref))
        if now != old:
            raise Conflict(f"ref {ref} is at {now or 'nothing'}, not at {old or 'nothing'}")
        if any(name.startswith(f"{ref}/") or ref.startswith(f"{name}/") for name in self.links):
            raise Conflict(f"ref {ref} cannot be made: it would be both a ref and the parent of one")
        self.links[ref] = new

    async def read_ref(self, ref: str) -> str | None:
        return self.links.get(check_ref(ref))

    async def refs(self) -> dict[str, str]:
        return dict(sorted(self.links.items()))
