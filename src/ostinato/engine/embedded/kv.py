"""The KV cache's memory and one step's attention over it: `Store` holds the blocks' tensors, `Plan` says who writes and reads which.

Decode rows, prompt chunks and samples of a shared prompt are all the same to the kernel: a run of queries and a list of blocks. Nothing is
padded to the longest row, and rows that share a prompt stand side by side, so its blocks are read once for several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.model.paged import Blocks, Entry, Pages, Places, Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What the cache must hold for one model.

    Example: ``KVShape(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16)``.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Store:
    """Keys and values of `blocks` blocks for every layer. Zeroed lazily by the system: memory is used as blocks are."""

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


class PagedAttention:
    """Attention for one flattened forward over `entries`. Call it as the model's `attend`.

    All indices are made here, once per step, not once per layer.
    """

    def __init__(self, store: Store, entries: Sequence[Entry]) -> None:
        self._store = store
        self._places = Places.of(entries, store.block)
        self._reads = Reads(entries, store.block)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Queries [N, H, D], keys and values [N, KV, D] -> [N, H, D]."""
        blocks = self._store.layers[layer]
        blocks.write(k, v, self._places)
        return self._reads.attend(q, blocks, scale, window)[0]

    def pages(self, layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Pages:
        """The same for whoever runs all layers at once."""
        del layers, kv_heads, dim, dtype  # a policy of another shape is not loaded
        return Pages(self._reads, self._places, self._store.layers)
