# pyright: basic
# ruff: noqa: ANN001, ANN202 (the compiler of Triton reads the kernel, and knows its arguments' types)
"""Paged attention of one token per sequence as a Triton kernel. Torch's CUDA builds include Triton, its CPU builds do not.

Keys and values are read in place, and a row's bits do not depend on other rows. The softmax is computed tile by tile with a running
maximum (online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867), as in FlashAttention. One program reads one token's whole past for
one key head, on behalf of all query heads that share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64  # positions read at once
_MIN_DOT = 16  # smallest size in tl.dot


@triton.jit
def _kernel(
    q,
    keys,
    values,
    table,
    lengths,
    out,
    scale,
    window,
    q_row,
    q_head,
    held_slot,
    held_head,
    table_row,
    length_row,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, kv = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row * length_row)
    first = tl.maximum(length - window, 0) * (window > 0)
    heads, dims, tile = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, TILE)
    inner = (dims < DIM)[None, :]
    real = (heads < HEADS)[:, None] & inner
    place = (kv * HEADS + heads)[:, None] * q_head + dims[None, :]
    x = tl.load(q + row * q_row + place, mask=real, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    made = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(first // TILE * TILE, length, TILE):
        at = start + tile
        seen = (at < length) & (at >= first)
        block = tl.load(table + row * table_row + at // BLOCK, mask=seen, other=0)
        slot = (block * BLOCK + at % BLOCK)[:, None] * held_slot + kv * held_head + dims[None, :]
        k = tl.load(keys + slot, mask=seen[:, None] & inner, other=0.0)
        scores = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights, kept = tl.exp(scores - higher[:, None]), tl.exp(best - higher)
        v = tl.load(values + slot, mask=seen[:, None] & inner, other=0.0)
        total = total * kept + tl.sum(weights, 1)
        made = made * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    made = made / total[:, None]
    tl.store(out + row * q_row + place, made.to(out.dtype.element_ty), mask=real)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, table_RB: Tensor, lengths_R: Tensor, block: int, scale: float, window: int
) -> Tensor:
    """Compute the attention of R tokens, each the last of its sequence.

    Args:
        q: [R, H, D].
        keys: [slots, KV, D], contiguous.
        values: [slots, KV, D], contiguous.
        table_RB: the blocks of each sequence in order, int64; columns beyond a sequence's blocks are not read.
        lengths_R: the length of each sequence, the last token included, at least 1, int64.
        block: the block size in tokens.
        scale: multiplies the scores.
        window: the number of positions that a token sees, 0 for all.

    Returns:
        [R, H, D] in q's dtype.
    """
    q = q.contiguous()
    out, shared, dim = torch.empty_like(q), q.shape[1] // keys.shape[1], q.shape[2]
    with torch.cuda.device_of(q):  # Triton launches on the current device
        _kernel[(len(q), keys.shape[1])](
            q,
            keys,
            values,
            table_RB,
            lengths_R,
            out,
            scale,
            window,
            q.stride(0),
            q.stride(1),
            keys.stride(0),
            keys.stride(1),
            table_RB.stride(0),
            lengths_R.stride(0),
            HEADS=shared,
            ROWS=max(_MIN_DOT, triton.next_power_of_2(shared)),
            DIM=dim,
            WIDE=max(_MIN_DOT, triton.next_power_of_2(dim)),
            TILE=_TILE,
            BLOCK=block,
        )
    return out
