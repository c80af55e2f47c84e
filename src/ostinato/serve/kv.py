"""The KV cache's memory and the attention that reads it: `Store` holds the blocks' tensors, `Plan` is one step's attention.

Blocks are [KV, BLOCK, D] per layer, so a product with a block needs no rearranging. Decode rows attend block by block: softmax within
each block, then one softmax over the blocks' log-sums (the split of Flash-Decoding, Dao et al. 2023). Nothing is padded to the longest
row, and a block with many readers (a shared prompt) is read once for up to `GROUP` of them (Hydragen, arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 8  # readers of one block whose queries are stacked into one product
_OFF = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the cache must hold for one model.

    Example: ``Shape(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16)``.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class Store:
    """Keys and values of `blocks` blocks for every layer. Zeroed lazily by the system: memory is used as blocks are."""

    def __init__(self, shape: Shape, blocks: int, block: int) -> None:
        self.shape, self.block = shape, block
        size = (blocks, shape.kv_heads, block, shape.head_dim)
        # zeros, never empty: a masked value is multiplied by 0, and 0 * NaN would reach the output
        self.keys = [torch.zeros(size, dtype=shape.dtype) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, dtype=shape.dtype) for _ in range(shape.layers)]

    def copy(self, source: int, target: int) -> None:
        """Give `target` the content of `source`."""
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zero these blocks: they may hold a NaN."""
        for tensor in (*self.keys, *self.values):
            tensor[list(blocks)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The tokens of one sequence in one forward: positions [start, end), its KV blocks in order.

    Example: ``Entry(start=96, end=97, blocks=(4, 9, 2, 7))`` is one decode token with BLOCK = 32.
    """

    start: int
    end: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Products of I blocks with `group` readers each: which block, which rows (I * group), which of a block's places are filled."""

    group: int
    blocks_I: Tensor
    rows_Ig: Tensor
    bias_I11B: Tensor | None


class Plan:
    """Attention for one flattened forward over `entries`, one-token entries first. Call it as the model's `attend`.

    All index tensors are made here, once per step, not once per layer.
    """

    def __init__(self, store: Store, entries: Sequence[Entry]) -> None:
        self._store = store
        self._rows = next((i for i, entry in enumerate(entries) if entry.end - entry.start > 1), len(entries))
        self._chunks = entries[self._rows :]
        self._written = self._places(entries)
        if self._rows:
            self._plan_rows(entries[: self._rows])
        self._masks = [self._causal(entry) for entry in self._chunks]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Queries [N, H, D], keys and values [N, KV, D] -> [N, H, D]."""
        keys, values, dim = self._store.keys[layer], self._store.values[layer], q.shape[-1]
        keys.view(-1, dim)[self._written] = k.reshape(-1, dim)
        values.view(-1, dim)[self._written] = v.reshape(-1, dim)
        outs: list[Tensor] = []
        if self._rows:
            outs.append(self._decode(q[: self._rows], keys, values, scale))
        at = self._rows
        for entry, mask in zip(self._chunks, self._masks, strict=True):
            stop = at + entry.end - entry.start
            outs.append(self._prefill(entry, mask, q[at:stop], keys, values, scale))
            at = stop
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _places(self, entries: Sequence[Entry]) -> Tensor:
        """Where the new tokens' KV goes: [N * KV] rows of the store seen as [blocks * KV * BLOCK, D]."""
        size, heads = self._store.block, self._store.shape.kv_heads
        first = [e.blocks[p // size] * heads * size + p % size for e in entries for p in range(e.start, e.end)]
        return (torch.tensor(first)[:, None] + torch.arange(heads) * size).flatten()

    # ---- one token per row

    def _plan_rows(self, entries: Sequence[Entry]) -> None:
        readers: dict[int, list[int]] = {}
        for row, entry in enumerate(entries):
            for block in entry.blocks:
                readers.setdefault(block, []).append(row)
        alone = [(block, rows) for block, rows in readers.items() if len(rows) == 1]
        shared = [
            (block, rows[i : i + GROUP])
            for block, rows in readers.items()
            if len(rows) > 1
            for i in range(0, len(rows), GROUP)
        ]
        filled = {entry.blocks[-1]: entry.end % self._store.block or self._store.block for entry in entries}
        self._pairs = [self._make_pairs(1, alone, filled)] if alone else []
        if shared:
            self._pairs.append(self._make_pairs(GROUP, shared, filled))
        self._plan_rejoin(len(entries), [(rows, 1) for _, rows in alone] + [(rows, GROUP) for _, rows in shared])

    def _make_pairs(self, group: int, items: Sequence[tuple[int, list[int]]], filled: dict[int, int]) -> _Pairs:
        size = self._store.block
        rows = [row for _, rows in items for row in (*rows, *[0] * (group - len(rows)))]
        counts = torch.tensor([filled.get(block, size) for block, _ in items])
        bias = None
        if bool((counts < size).any()):
            bias = torch.zeros(len(items), size).masked_fill_(torch.arange(size) >= counts[:, None], _OFF)[
                :, None, None
            ]
        return _Pairs(group, torch.tensor([block for block, _ in items]), torch.tensor(rows), bias)

    def _plan_rejoin(self, count: int, items: Sequence[tuple[list[int], int]]) -> None:
        """A table [rows, width] of the products that make up each row; the rest of a short row is switched off by its bias."""
        table: list[list[int]] = [[] for _ in range(count)]
        at = 0
        for rows, group in items:
            for offset, row in enumerate(rows):
                table[row].append(at + offset)
            at += group
        width = max(map(len, table))
        self._width = width
        self._table = torch.tensor([index for line in table for index in line + [0] * (width - len(line))])
        lengths = torch.tensor([len(line) for line in table])
        self._table_bias = torch.zeros(count, width, 1).masked_fill_(
            torch.arange(width)[:, None] >= lengths[:, None, None], _OFF
        )
        self._pair_of_row = torch.arange(len(self._table))

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        count, heads, dim = q.shape
        kv = self._store.shape.kv_heads
        share = heads // kv  # query heads h with h // share == g read key/value head g
        q = (q * scale).view(count, kv, share, dim)
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for pairs in self._pairs:
            items = len(pairs.blocks_I)
            k = keys.index_select(0, pairs.blocks_I).flatten(0, 1)
            v = values.index_select(0, pairs.blocks_I).flatten(0, 1)
            queries = q.index_select(0, pairs.rows_Ig).view(items, pairs.group, kv, share, dim).transpose(1, 2)
            scores = torch.bmm(queries.reshape(items * kv, pairs.group * share, dim), k.transpose(1, 2)).float()
            if pairs.bias_I11B is not None:
                scores = (scores.view(items, kv, -1, k.shape[1]) + pairs.bias_I11B).view_as(scores)
            total = scores.logsumexp(-1, keepdim=True)
            part = torch.bmm((scores - total).exp_().to(v.dtype), v)
            sums.append(total.view(items, kv, pairs.group, share).transpose(1, 2).reshape(-1, heads))
            parts.append(part.view(items, kv, pairs.group, share, dim).transpose(1, 2).reshape(-1, heads, dim))
        totals = torch.cat(sums).index_select(0, self._table).view(count, self._width, heads) + self._table_bias
        weights = totals.softmax(1)
        joined = torch.cat(parts).index_select(0, self._table).view(count, self._width, heads, dim)
        return (joined * weights[..., None]).sum(1).to(q.dtype)

    # ---- several tokens of one sequence

    def _causal(self, entry: Entry) -> Tensor | None:
        """[count, end] additive mask of a chunk that continues a sequence; None where the plain causal rule does."""
        if entry.start == 0:
            return None
        seen = torch.arange(entry.end) <= torch.arange(entry.start, entry.end)[:, None]
        return torch.zeros(seen.shape, dtype=self._store.shape.dtype).masked_fill_(~seen, _OFF)

    def _prefill(
        self, entry: Entry, mask: Tensor | None, q: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        share = q.shape[1] // self._store.shape.kv_heads
        blocks = list(entry.blocks)
        k, v = (
            tensor[blocks].transpose(0, 1).flatten(1, 2)[:, : entry.end].repeat_interleave(share, 0)
            for tensor in (keys, values)
        )
        queries = q.transpose(0, 1)
        mixed = F.scaled_dot_product_attention(
            queries[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale
        )
        return mixed[0].transpose(0, 1)
