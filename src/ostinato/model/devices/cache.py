"""Keys and values in blocks on any device, and one step's attention over them by torch's operations.

For the CPU, and on a GPU for steps that are not recorded (`step`). The cached keys and values are gathered, a copy of those of the
running sequences for each layer. All indices are made on the host once per step and moved once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.model.devices.masks import MaskedAttention, enough
from ostinato.model.paged import PagedEntry


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer's keys and values, [blocks x tokens of a block, KV, D]; zeros at first, because a masked 0 times a NaN would be a NaN."""

    keys: Tensor
    values: Tensor


def cached_layer(blocks: int, kv_heads: int, block: int, dim: int, dtype: torch.dtype, device: str) -> CachedLayer:
    """An empty layer of the cache."""
    shape = (blocks * block, kv_heads, dim)
    return CachedLayer(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


class CacheAttend:
    """Attention of one flattened forward pass over `entries`: the model's `attend`.

    Single tokens are computed row by row over their own blocks, in groups of similar length; longer runs together in one masked call.
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
        """Queries [N, H, D], keys and values [N, KV, D] -> [N, H, D]; the keys and values are in the cache afterwards."""
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
    """The cache slots of positions [0, end)."""
    blocks = np.array(entry.blocks[: -(-entry.end // block)], np.int64)
    return (blocks[:, None] * block + np.arange(block)).reshape(-1)[: entry.end]


class _Singles:
    """R tokens, each the last of its sequence."""

    def __init__(
        self, rows: Sequence[int], positions: Sequence[int], slots: Sequence[np.ndarray], device: torch.device
    ) -> None:
        longest = max(map(len, slots))
        # a row is padded with its own first token: another sequence's memory may hold a NaN
        table = np.stack([np.concatenate([held, np.full(longest - len(held), held[0])]) for held in slots])
        self.rows = torch.tensor(rows, dtype=torch.long).to(device)
        self._table_RT = torch.from_numpy(table).to(device)
        self._before_RT = torch.tensor(positions).to(device)[:, None] - torch.arange(longest, device=device)

    def attend(self, q: Tensor, held: CachedLayer, scale: float, window: int) -> Tensor:
        """[R, H, D] -> the same shape. The queries of one key head are its rows, so no kernel for grouped heads is needed."""
        R, H, D = q.shape
        seen_RT = self._before_RT >= 0
        if window:
            seen_RT = seen_RT & (self._before_RT < window)
        k, v = (x[self._table_RT].transpose(1, 2) for x in (held.keys, held.values))
        grouped = q.view(R, k.shape[1], H // k.shape[1], D)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen_RT[:, None, None], scale=scale)
        return out.reshape(R, H, D)


class _Runs:
    """Prompt chunks of several sequences side by side: a token sees those before it in its own sequence.

    A NaN in one sequence reaches the others of its call, whose streams then end too: a visible failure, not a wrong result.
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
        """[Q, H, D] -> the same shape."""
        k, v = held.keys.index_select(0, self._slots_S), held.values.index_select(0, self._slots_S)
        return self._masked(q, k, v, scale, window)
