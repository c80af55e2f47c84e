"""Attention by torch's operations, on any device: masked attention over packed tokens, and attention over a paged KV cache.

On CUDA, masked attention is FlexAttention, which materialises nothing of size queries x keys except a mask of 128 x 128 blocks. Elsewhere
it uses a dense mask, for tests. `CacheAttend` reads the KV cache by torch's operations: on the CPU, and on a GPU for steps that are not
CUDA graphs (`device_step`). It gathers the running sequences' keys and values, one copy per layer. All indices are computed on the host
and moved to the device once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ostinato.model.paged import PagedEntry

_MIN_HEAD_DIM = 16  # of FlexAttention's kernel
_MIN_TOKENS = 129  # the fewest in two of FlexAttention's blocks of 128
_MAX_DENSE = 1 << 28  # query-key pairs of a mask that is computed uncompiled
# FlexAttention's decoding kernel, for few queries, has no configuration for masks of varying lengths
_OPTIONS: Any = {"BACKEND": "TRITON"}
Sees = Callable[[Tensor, Tensor], Tensor]
"""A mask function: whether query tokens (indices) see key tokens (indices that broadcast with them), as booleans."""


class MaskedAttention:
    """Masked attention of Q queries over S keys, for every layer of a pass. Masks are cached per window.

    Args:
        sees: the mask without windows. Every query must see a key.
        query_positions_Q: each query's position in its own sequence, on the device; a window limits its distance to key positions.
        key_positions_S: each key's position in its own sequence.
    """

    def __init__(self, sees: Sees, query_positions_Q: Tensor, key_positions_S: Tensor) -> None:
        self._queries, self._keys = len(query_positions_Q), len(key_positions_S)
        self._sees, self._queries_Q, self._keys_S = sees, enough(query_positions_Q), enough(key_positions_S)
        self._dense: dict[int, Tensor] = {}
        self._blocks: dict[int, BlockMask] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Attend: queries [Q, H, D], keys and values [S, KV, D] -> [Q, H, D]. Works under autograd."""
        if q.is_cuda and q.shape[2] >= _MIN_HEAD_DIM:
            return self.by_flex(_compiled(), q, k, v, scale, window)
        by_head = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(*by_head, attn_mask=self.dense(window), scale=scale, enable_gqa=grouped)
        return out[0].transpose(0, 1)

    def by_flex(self, flex: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Attend by FlexAttention, compiled or not."""
        out: Tensor = flex(
            *(enough(x).transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
            block_mask=self._by_blocks(window),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=_OPTIONS,
        )
        return out[0].transpose(0, 1)[: self._queries]

    def dense(self, window: int) -> Tensor:
        """Return the dense mask [Q, S], as booleans."""
        if window not in self._dense:
            device = self._queries_Q.device
            q, kv = (torch.arange(count, device=device) for count in (self._queries, self._keys))
            self._dense[window] = self._mask(window)(q, q, q[:, None], kv[None])
        return self._dense[window]

    def _by_blocks(self, window: int) -> BlockMask:
        if window not in self._blocks:
            queries, keys = len(self._queries_Q), len(self._keys_S)
            # compiled only if large: compilation repeats for other lengths, while uncompiled it takes ten bytes per pair
            large = queries * keys > _MAX_DENSE
            self._blocks[window] = create_block_mask(
                self._mask(window), None, None, queries, keys, device=self._queries_Q.device, _compile=large
            )
        return self._blocks[window]

    def _mask(self, window: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        sees, queries_Q, keys_S = self._sees, self._queries_Q, self._keys_S

        def mask(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            del batch, head
            seen = sees(q, kv)
            # written so that only booleans take Q x S memory
            return seen & (queries_Q[q] < keys_S[kv] + window) if window else seen

        return mask


def enough(x: Tensor, fill: int = 0) -> Tensor:
    """Pad a tensor indexed by tokens to `_MIN_TOKENS`, because FlexAttention recompiles for a length of one block."""
    missing = _MIN_TOKENS - len(x)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=fill) if missing > 0 else x


@lru_cache
def _compiled() -> Any:
    """Return compiled FlexAttention: uncompiled it materialises all scores. `dynamic`, because lengths differ between calls."""
    return torch.compile(flex_attention, dynamic=True)


def tree(ends_N: Tensor, positions_N: Tensor) -> MaskedAttention:
    """Return attention over a packed token tree in depth-first order: only token j and its descendants, j <= i < ends_N[j], see token j."""
    bounds_N = enough(ends_N)  # padding sees nothing and is not seen
    return MaskedAttention(lambda q, kv: (kv <= q) & (q < bounds_N[kv]), positions_N, positions_N)


# ---------------------------------------------------------------- the paged KV cache


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer's cached keys and values, [blocks x block size, KV, D]. Initially zeros, because 0 x NaN of a masked key would be NaN."""

    keys: Tensor
    values: Tensor


def cached_layer(blocks: int, kv_heads: int, block: int, dim: int, dtype: torch.dtype, device: str) -> CachedLayer:
    """Return an empty layer of the cache."""
    shape = (blocks * block, kv_heads, dim)
    return CachedLayer(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


class CacheAttend:
    """Attention of one flattened forward pass over `entries`: the model's `attend`.

    Single tokens attend row by row over their own blocks, in groups of similar length; longer runs attend together in one masked call.
    """

    def __init__(
        self, layers: Sequence[CachedLayer], block: int, entries: Sequence[PagedEntry], device: torch.device
    ) -> None:
        self._layers = layers
        slots: list[np.ndarray] = []
        firsts: list[int] = []
        at = 0
        for entry in entries:
            slots.append(_slots(entry, block))
            firsts.append(at)
            at += entry.end - entry.start
        own = np.concatenate([held[entry.start :] for entry, held in zip(entries, slots, strict=True)])
        self._own_N = torch.from_numpy(own).to(device)
        longer = [i for i, entry in enumerate(entries) if entry.end - entry.start > 1]
        self._runs = _Runs([(firsts[i], entries[i], slots[i]) for i in longer], device) if longer else None
        groups: dict[int, list[int]] = {}
        for i, entry in enumerate(entries):
            if entry.end - entry.start == 1:
                groups.setdefault((-(-entry.end // block)).bit_length(), []).append(i)
        self._singles = [
            _Singles([firsts[i] for i in group], [entries[i].start for i in group], [slots[i] for i in group], device)
            for group in groups.values()
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Attend: queries [N, H, D], keys and values [N, KV, D] -> [N, H, D]. Writes the keys and values to the cache."""
        held = self._layers[layer]
        held.keys.index_copy_(0, self._own_N, k)
        held.values.index_copy_(0, self._own_N, v)
        parts = [*self._singles, *([] if self._runs is None else [self._runs])]
        if len(parts) == 1:
            return parts[0].attend(q, held, scale, window)
        out = torch.empty_like(q)
        for part in parts:
            out.index_copy_(0, part.rows, part.attend(q.index_select(0, part.rows), held, scale, window))
        return out


def _slots(entry: PagedEntry, block: int) -> np.ndarray:
    """Return the cache slots of positions [0, end)."""
    blocks = np.array(entry.blocks[: -(-entry.end // block)], np.int64)
    return (blocks[:, None] * block + np.arange(block)).reshape(-1)[: entry.end]


class _Singles:
    """R tokens, each the last of its sequence."""

    def __init__(
        self, rows: Sequence[int], positions: Sequence[int], slots: Sequence[np.ndarray], device: torch.device
    ) -> None:
        longest = max(map(len, slots))
        # rows are padded with their own first slot, because another sequence's memory may hold a NaN
        table = np.stack([np.concatenate([held, np.full(longest - len(held), held[0])]) for held in slots])
        self.rows = torch.tensor(rows, dtype=torch.long).to(device)
        self._table_RT = torch.from_numpy(table).to(device)
        self._before_RT = torch.tensor(positions).to(device)[:, None] - torch.arange(longest, device=device)

    def attend(self, q: Tensor, held: CachedLayer, scale: float, window: int) -> Tensor:
        """Attend: [R, H, D] -> [R, H, D]. The query heads of one key head become rows, so no grouped-query kernel is needed."""
        R, H, D = q.shape
        seen_RT = self._before_RT >= 0
        if window:
            seen_RT = seen_RT & (self._before_RT < window)
        k, v = (x[self._table_RT].transpose(1, 2) for x in (held.keys, held.values))
        grouped = q.view(R, k.shape[1], H // k.shape[1], D)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen_RT[:, None, None], scale=scale)
        return out.reshape(R, H, D)


class _Runs:
    """Prompt chunks of several sequences in one call: a token sees the earlier tokens of its own sequence.

    A NaN in one sequence spreads to the others of its call, whose streams then end too: a visible failure, not a wrong result.
    """

    def __init__(self, runs: Sequence[tuple[int, PagedEntry, np.ndarray]], device: torch.device) -> None:
        sizes = [entry.end - entry.start for _, entry, _ in runs]
        lengths = [entry.end for _, entry, _ in runs]

        def moved(parts: Sequence[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

        self.rows = moved([np.arange(first, first + size) for (first, _, _), size in zip(runs, sizes, strict=True)])
        self._slots_S = moved([held for _, _, held in runs])
        queries_Q = moved([np.arange(entry.start, entry.end) for _, entry, _ in runs])
        keys_S = moved([np.arange(length) for length in lengths])
        owners = (moved([np.repeat(np.arange(len(runs)), counts)]) for counts in (sizes, lengths))
        # padding sees nothing and is not seen
        owners_Q, owners_S, at_Q, at_S = (
            enough(x, fill) for x, fill in zip((*owners, queries_Q, keys_S), (-1, -2, 0, 0), strict=True)
        )

        def sees(q: Tensor, kv: Tensor) -> Tensor:
            return (owners_Q[q] == owners_S[kv]) & (at_S[kv] <= at_Q[q])

        self._masked = MaskedAttention(sees, queries_Q, keys_S)

    def attend(self, q: Tensor, held: CachedLayer, scale: float, window: int) -> Tensor:
        """Attend: [Q, H, D] -> [Q, H, D]."""
        k, v = held.keys.index_select(0, self._slots_S), held.values.index_select(0, self._slots_S)
        return self._masked(q, k, v, scale, window)
