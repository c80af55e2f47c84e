"""Attention under a mask that is a function of two indices: FlexAttention on CUDA, a dense mask of the same function elsewhere.

On CUDA nothing as large as queries x keys is made, except the mask by blocks of 128 x 128. The dense mask is for tests on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

_NARROWEST = 16  # elements of a head in FlexAttention's kernel
_FEWEST = 129  # tokens: two of its blocks
_DENSEST = 1 << 28  # pairs of a query and a key
_OPTIONS: Any = {
    "BACKEND": "TRITON"
}  # its other kernel, for few queries, finds no configuration for a mask of lengths that vary
Sees = Callable[[Tensor, Tensor], Tensor]
"""Whether query tokens (indices) see key tokens (indices that broadcast with them), as booleans."""


class MaskedAttention:
    """Attention of Q queries over S keys, for every layer of a pass; masks are made once per window.

    Args:
        sees: which query sees which key, windows aside. Every query must see a key.
        query_positions_Q: each query's place in its own sequence, on the device; a window limits its distance from `key_positions_S`.
    """

    def __init__(self, sees: Sees, query_positions_Q: Tensor, key_positions_S: Tensor) -> None:
        self._queries, self._keys = len(query_positions_Q), len(key_positions_S)
        self._sees, self._queries_Q, self._keys_S = sees, enough(query_positions_Q), enough(key_positions_S)
        self._dense: dict[int, Tensor] = {}
        self._blocks: dict[int, BlockMask] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """[Q, H, D], [S, KV, D] twice -> [Q, H, D], under autograd if gradients are on."""
        if q.is_cuda and q.shape[2] >= _NARROWEST:
            return self.by_flex(_compiled(), q, k, v, scale, window)
        by_head = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(*by_head, attn_mask=self.dense(window), scale=scale, enable_gqa=grouped)
        return out[0].transpose(0, 1)

    def by_flex(self, flex: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """The same by FlexAttention, compiled or not."""
        out: Tensor = flex(
            *(enough(x).transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
            block_mask=self._by_blocks(window),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=_OPTIONS,
        )
        return out[0].transpose(0, 1)[: self._queries]

    def dense(self, window: int) -> Tensor:
        """[Q, S] booleans."""
        if window not in self._dense:
            device = self._queries_Q.device
            q, kv = (torch.arange(count, device=device) for count in (self._queries, self._keys))
            self._dense[window] = self._mask(window)(q, q, q[:, None], kv[None])
        return self._dense[window]

    def _by_blocks(self, window: int) -> BlockMask:
        if window not in self._blocks:
            queries, keys = len(self._queries_Q), len(self._keys_S)
            # uncompiled, because it would be compiled again for other lengths; that takes about ten bytes per pair
            large = queries * keys > _DENSEST
            self._blocks[window] = create_block_mask(
                self._mask(window), None, None, queries, keys, device=self._queries_Q.device, _compile=large
            )
        return self._blocks[window]

    def _mask(self, window: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        sees, queries_Q, keys_S = self._sees, self._queries_Q, self._keys_S

        def mask(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            del batch, head
            seen = sees(q, kv)
            # written so that only booleans are as large as Q x S
            return seen & (queries_Q[q] < keys_S[kv] + window) if window else seen

        return mask


def enough(x: Tensor, fill: int = 0) -> Tensor:
    """Pad what is indexed by tokens to the fewest that FlexAttention gets: compiled code is made anew for a length of one block."""
    missing = _FEWEST - len(x)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=fill) if missing > 0 else x


@lru_cache
def _compiled() -> Any:
    """FlexAttention, compiled, because otherwise it materialises all scores; `dynamic`, because lengths differ from call to call."""
    return torch.compile(flex_attention, dynamic=True)


def tree(ends_N: Tensor, positions_N: Tensor) -> MaskedAttention:
    """Attention over a packed token tree in depth-first order: token j is seen by itself and its descendants, i < ends_N[j]."""
    bounds_N = enough(ends_N)  # padding sees nothing and is not seen
    return MaskedAttention(lambda q, kv: (kv <= q) & (q < bounds_N[kv]), positions_N, positions_N)
