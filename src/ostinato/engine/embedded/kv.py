"""The paged KV cache: a store holds the blocks' tensors, and `BlockPool` allocates blocks and finds cached prefixes.

`attend` of a store gives one step's attention. Our kernel treats decode rows, prompt chunks and samples of a shared prompt alike: as a run
of queries and a list of blocks. Nothing is padded to the longest row, and rows that share a prompt are adjacent, so its blocks are read
once for several rows.

The block pool is pure Python. It knows which blocks are free, how many readers each has, and which ones hold a known prefix; the store
owns the memory that the block numbers stand for.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.model.backend import OWN, ComputeBackend
from ostinato.model.device_attention import CacheAttend, cached_layer
from ostinato.model.device_step import Decoding
from ostinato.model.paged import Blocks, PagedAttend, PagedEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The shape of the cache for one model.

    Example: ``KVShape(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16)``.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    backend: ComputeBackend = OWN


class DeviceStore:
    """A KV store on the backend's device, by torch operations. Allocates all of its memory at once, with one more block for padding."""

    def __init__(self, shape: KVShape, blocks: int, block: int) -> None:
        self.shape, self.block = shape, block
        self._layers = [
            cached_layer(blocks + 1, shape.kv_heads, block, shape.head_dim, shape.dtype, shape.backend.device)
            for _ in range(shape.layers)
        ]
        self._decoding = Decoding(self._layers, block, blocks) if self._layers[0].keys.is_cuda else None

    def decoded(self, model: PreTrainedModel, ids: Sequence[int], entries: Sequence[PagedEntry]) -> Tensor | None:
        """Return the final states [R, hidden] of one token per entry by replaying a CUDA graph; None if there is no GPU or no graph."""
        return None if self._decoding is None else self._decoding.run(model, ids, entries)

    def copy(self, source: int, target: int) -> None:
        """Copy the content of block `source` to block `target`."""
        for layer in self._layers:
            for held in (layer.keys, layer.values):
                held[self._tokens(target)] = held[self._tokens(source)]

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zero these blocks, which may hold a NaN."""
        for layer in self._layers:
            for held in (layer.keys, layer.values):
                for block in blocks:
                    held[self._tokens(block)] = 0

    def attend(self, entries: Sequence[PagedEntry]) -> CacheAttend:
        """Return the attention of one flattened forward pass over `entries`, which writes its keys and values here."""
        return CacheAttend(self._layers, self.block, entries, self._layers[0].keys.device)

    def _tokens(self, block: int) -> slice:
        return slice(block * self.block, (block + 1) * self.block)


class Store:
    """A KV store of `blocks` blocks on the CPU. Writes zeros to all of its memory, so that the memory is committed at construction."""

    def __init__(self, shape: KVShape, blocks: int, block: int) -> None:
        self.shape, self.block = shape, block
        self.layers = [Blocks(blocks, shape.kv_heads, block, shape.head_dim, shape.dtype) for _ in range(shape.layers)]

    def copy(self, source: int, target: int) -> None:
        """Copy the content of block `source` to block `target`."""
        for layer in self.layers:
            layer.keys[target] = layer.keys[source]
            layer.values[target] = layer.values[source]

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zero these blocks, which may hold a NaN."""
        for layer in self.layers:
            layer.keys[list(blocks)] = 0
            layer.values[list(blocks)] = 0

    def attend(self, entries: Sequence[PagedEntry]) -> PagedAttend:
        """Return the attention of one flattened forward pass over `entries`, which writes its keys and values here.

        Every layer's blocks fit, because a policy of another shape is refused at load.
        """
        return PagedAttend(entries, self.block, lambda layer, kv_heads, dim, dtype: self.layers[layer])

    def decoded(self, model: PreTrainedModel, ids: Sequence[int], entries: Sequence[PagedEntry]) -> None:
        """Return None: a CPU gains nothing from recorded passes."""


KVStore = Store | DeviceStore
"""A store of the blocks' keys and values for every layer."""


def open_store(shape: KVShape, blocks: int, block: int) -> KVStore:
    """Return an empty store for the shape's backend."""
    return Store(shape, blocks, block) if shape.backend.kernels == "own" else DeviceStore(shape, blocks, block)


# ---------------------------------------------------------------- the block pool


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a full block: a hash chain over all tokens up to its end. The `parent` of the first block is its `prefix_key`."""
    return blake2b(parent + b"".join(token.to_bytes(4, "little") for token in tokens), digest_size=16).digest()


class BlockPool:
    """A reference-counted allocator of `blocks` numbered KV blocks, with a prefix cache.

    A block is in exactly one state: free, held (one or more readers), or idle (no reader, but it still caches a prefix that a later
    request may share). Idle blocks are evicted in least-recently-used order.

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
        """The number of blocks that `allocate` could return now: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """The number of blocks with at least one reader."""
        return self.size - self.available

    @property
    def idle(self) -> int:
        """The number of blocks without a reader that still cache a prefix."""
        return len(self._idle)

    def readers(self, block: int) -> int:
        """Return the number of sequences that read this block."""
        return self._readers[block]

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reader each, evicting idle ones if needed; None, without changes, if there are not enough."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reader to each block. The blocks must be held or idle."""
        for block in blocks:
            if self._readers[block] == 0 and block not in self._idle:
                raise ValueError(f"block {block} is free: it cannot be shared")
            self._idle.pop(block, None)
            self._readers[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reader from each block. A block without readers becomes idle if it has a key, else free."""
        # the end of a chain first, so that it is evicted first: it is useless without the beginning
        for block in reversed(blocks):
            if self._readers[block] == 0:
                raise ValueError(f"block {block} has no reader: it was released twice")
            self._readers[block] -= 1
            if self._readers[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    heapq.heappush(self._free, block)

    def name(self, block: int, key: bytes) -> None:
        """Register a held block under its key, so that `find(key)` returns it. A key stays with the first block that has it."""
        if self._readers[block] == 0:
            raise ValueError(f"block {block} is not held: it cannot be named")
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, key: bytes) -> int | None:
        """Return the held or idle block with this key, or None."""
        return self._block_of.get(key)

    def forget(self, block: int) -> None:
        """Remove the block's key, because its content is invalid."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        if block in self._idle:
            del self._idle[block]
            heapq.heappush(self._free, block)

    def _take(self) -> int:
        if self._free:
            block = heapq.heappop(self._free)  # lowest number first, to touch little memory
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._readers[block] = 1
        return block
