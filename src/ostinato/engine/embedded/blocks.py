"""The block pool's book-keeping: which blocks of the KV cache are free, how many readers each has, and which hold a known prefix.

Pure Python, no tensors: `kv.py` owns the memory that the block numbers stand for.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block: a digest of all tokens up to its end. The `parent` of a first block is its `prefix_key`."""
    return blake2b(parent + b"".join(token.to_bytes(4, "little") for token in tokens), digest_size=16).digest()


class BlockPool:
    """Counts readers of `blocks` numbered blocks.

    A block is in exactly one state: free, held (one reader or more), or idle (no reader, but it still holds a prefix that a later
    request may ask for). Idle blocks are reused in least-recently-used order.

    Example::

        pool = BlockPool(4)
        first = pool.allocate(2)       # [0, 1]
        pool.share(first)              # two readers each
        pool.release(first)            # one reader each
        pool.name(first[0], b"key")    # block 0 can be found again, even after its last release
    """

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._readers = [0] * blocks
        self._free = list(range(blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Blocks with at least one reader."""
        return self.size - self.available

    @property
    def idle(self) -> int:
        """Blocks without a reader that still hold a named prefix."""
        return len(self._idle)

    def readers(self, block: int) -> int:
        """How many sequences read this block."""
        return self._readers[block]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reader each, or None (and nothing changed) when there are not enough."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reader to each block, which must be held or idle."""
        for block in blocks:
            if self._readers[block] == 0 and block not in self._idle:
                raise ValueError(f"block {block} is free: it cannot be shared")
            self._idle.pop(block, None)
            self._readers[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one reader from each block. A block without readers becomes idle if it has a name, else free."""
        for block in reversed(blocks):  # the end of a chain is useless without its beginning, so it is released first
            if self._readers[block] == 0:
                raise ValueError(f"block {block} has no reader: it was released twice")
            self._readers[block] -= 1
            if self._readers[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    heapq.heappush(self._free, block)

    def name(self, block: int, key: bytes) -> None:
        """Let `find(key)` return this held block. The first block with a key keeps it."""
        if self._readers[block] == 0:
            raise ValueError(f"block {block} is not held: it cannot be named")
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, key: bytes) -> int | None:
        """The held or idle block with this key."""
        return self._block_of.get(key)

    def forget(self, block: int) -> None:
        """Drop the block's name, because its content cannot be trusted."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        if block in self._idle:
            del self._idle[block]
            heapq.heappush(self._free, block)

    def _take(self) -> int:
        if self._free:
            block = heapq.heappop(self._free)  # the lowest number keeps the touched memory small
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._readers[block] = 1
        return block
