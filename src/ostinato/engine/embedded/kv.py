"""The KV cache's memory and one step's attention over it: a store holds the blocks' tensors, `attend` maps the step's rows to blocks.

Our kernel treats decode rows, prompt chunks and samples of a shared prompt alike: as a run of queries and a list of blocks. Nothing is
padded to the longest row, and rows that share a prompt are adjacent, so its blocks are read once for several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.model.attention import Attend
from ostinato.model.devices.backend import OWN, ComputeBackend
from ostinato.model.devices.cache import CacheAttend, cached_layer
from ostinato.model.devices.decoding import Decoding
from ostinato.model.paged import Blocks, PagedCache, PagedEntry, Reads, TokenPlaces


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


class KVStore(Protocol):
    """Holds the blocks' keys and values for every layer."""

    shape: KVShape
    block: int

    def copy(self, source: int, target: int) -> None:
        """Give `target` the content of `source`."""
        ...

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zero these blocks: they may hold a NaN."""
        ...

    def attend(self, entries: Sequence[PagedEntry]) -> Attend:
        """Attention for one flattened forward over `entries`, which writes its keys and values here."""
        ...

    def decoded(self, model: PreTrainedModel, ids: Sequence[int], entries: Sequence[PagedEntry]) -> Tensor | None:
        """The final states [R, hidden] of one token per entry, from a recorded pass; None if this store records none."""
        ...


def open_store(shape: KVShape, blocks: int, block: int) -> KVStore:
    """An empty store for the backend that the shape names."""
    return Store(shape, blocks, block) if shape.backend.kernels == "own" else DeviceStore(shape, blocks, block)


class DeviceStore:
    """A store on the backend's device, using torch operations. All of its memory is allocated at once, with a spare block for padding."""

    def __init__(self, shape: KVShape, blocks: int, block: int) -> None:
        self.shape, self.block = shape, block
        self._layers = [
            cached_layer(blocks + 1, shape.kv_heads, block, shape.head_dim, shape.dtype, shape.backend.device)
            for _ in range(shape.layers)
        ]
        self._decoding = Decoding(self._layers, block, blocks) if self._layers[0].keys.is_cuda else None

    def decoded(self, model: PreTrainedModel, ids: Sequence[int], entries: Sequence[PagedEntry]) -> Tensor | None:
        """As `KVStore.decoded`, on a GPU."""
        return None if self._decoding is None else self._decoding.run(model, ids, entries)

    def copy(self, source: int, target: int) -> None:
        """Give `target` the content of `source`."""
        for layer in self._layers:
            for held in (layer.keys, layer.values):
                held[self._tokens(target)] = held[self._tokens(source)]

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zero these blocks: they may hold a NaN."""
        for layer in self._layers:
            for held in (layer.keys, layer.values):
                for block in blocks:
                    held[self._tokens(block)] = 0

    def attend(self, entries: Sequence[PagedEntry]) -> CacheAttend:
        """Attention for one flattened forward over `entries`."""
        return CacheAttend(self._layers, self.block, entries, self._layers[0].keys.device)

    def _tokens(self, block: int) -> slice:
        return slice(block * self.block, (block + 1) * self.block)


class Store:
    """A store of `blocks` blocks on the CPU. The system zeroes its memory lazily, so memory is used only as blocks are."""

    def __init__(self, shape: KVShape, blocks: int, block: int) -> None:
        self.shape, self.block = shape, block
        self.layers = [Blocks(blocks, shape.kv_heads, block, shape.head_dim, shape.dtype) for _ in range(shape.layers)]

    def copy(self, source: int, target: int) -> None:
        """Give `target` the content of `source`."""
        for layer in self.layers:
            layer.keys[target] = layer.keys[source]
            layer.values[target] = layer.values[source]

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zero these blocks: they may hold a NaN."""
        for layer in self.layers:
            layer.keys[list(blocks)] = 0
            layer.values[list(blocks)] = 0

    def attend(self, entries: Sequence[PagedEntry]) -> PagedAttention:
        """Attention for one flattened forward over `entries`."""
        return PagedAttention(self, entries)

    def decoded(self, model: PreTrainedModel, ids: Sequence[int], entries: Sequence[PagedEntry]) -> None:
        """None: on a CPU there is nothing to gain."""


class PagedAttention:
    """Attention for one flattened forward over `entries`. Call it as the model's `attend`.

    All indices are computed here, once per step instead of once per layer.
    """

    def __init__(self, store: Store, entries: Sequence[PagedEntry]) -> None:
        self._store = store
        self._places = TokenPlaces.of(entries, store.block)
        self._reads = Reads(entries, store.block)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Queries [N, H, D], keys and values [N, KV, D] -> [N, H, D]."""
        blocks = self._store.layers[layer]
        blocks.write(k, v, self._places)
        return self._reads.attend(q, blocks, scale, window)[0]

    def pages(self, layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> PagedCache:
        """The same indices and blocks, for a caller that runs all layers at once."""
        del layers, kv_heads, dim, dtype  # a policy of another shape is not loaded
        return PagedCache(self._reads, self._places, self._store.layers)
