# pyright: basic, reportCallIssue=false
"""Causal attention over keys and values in blocks, for one query or many, in a fixed order of operations.

For the query of one head at position p, with fp32 arithmetic throughout:

1. score_j = q_0 k_j0 + q_1 k_j1 + ... , fused multiply-adds with d ascending from 0; q is multiplied by the scale first.
2. m = the exact maximum over the visible positions j; w_j = exp(score_j - m), 0 where invisible.
3. The w_j are summed in 16 lanes, lane = j mod 16, each ascending; the lanes are folded 8, 4, 2, 1.
4. out_d = w_0 v_0d + w_1 v_1d + ..., fused multiply-adds with j ascending; divided by the sum once, rounded to the dtype once.

Nothing depends on the rest of the batch, on how a prompt was chunked, on a block's place in the cache, or on the cache's size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import fma, inlined, load, store
from ostinato.model.kernels.vector import (
    WIDE,
    add16,
    all16,
    exp16,
    fetch,
    fma16,
    load16,
    max16,
    store16,
    sub16,
    sum16,
    top16,
)

LANES = WIDE
ROWS = 4  # rows that share each loaded vector
QUERIES = 8  # the most queries that share a pass over the keys
_OFF = np.float32(-np.inf)


@inlined
def _softmax(scores_RT, r, first, seen, end) -> Any:
    """Turn row r's scores[first:end] into weights, 0 outside [seen[0], seen[1]); returns (maximum, sum)."""
    low, high = seen
    for j in range(first, low):
        scores_RT[r, j] = _OFF
    for j in range(high, end):
        scores_RT[r, j] = _OFF
    tops = all16(_OFF)
    for j in range(first, end, WIDE):
        tops = max16(tops, load16(scores_RT, r, j))
    top = top16(tops)
    sums = all16(np.float32(0.0))
    for j in range(first, end, WIDE):
        w = exp16(sub16(load16(scores_RT, r, j), all16(top)))
        store16(scores_RT, r, j, w)
        sums = add16(sums, w)
    return top, sum16(sums)


@inlined
def accumulate(a_RI, b_IX, c_RX, rows, inner, width, ahead):
    """Compute c[r, x] += a[r, 0] b[0, x] + a[r, 1] b[1, x] + ..., one fma at a time, four rows at once (the last ones may be unused).

    Prefetches `ahead` meanwhile, as many numbers as b has; it may be shorter, because a prefetch never faults. Callers pass `width` as a
    constant, and `inner` too unless it counts rows.
    """
    even = width // (2 * WIDE) * (2 * WIDE)
    for r in range(0, rows, ROWS):
        for x in range(0, even, 2 * WIDE):
            y = x + WIDE
            c00, c10, c20, c30 = (
                load16(c_RX, r, x),
                load16(c_RX, r + 1, x),
                load16(c_RX, r + 2, x),
                load16(c_RX, r + 3, x),
            )
            c01, c11, c21, c31 = (
                load16(c_RX, r, y),
                load16(c_RX, r + 1, y),
                load16(c_RX, r + 2, y),
                load16(c_RX, r + 3, y),
            )
            for i in range(inner):
                fetch(ahead, x * inner + 2 * WIDE * i)
                b0, b1 = load16(b_IX, i, x), load16(b_IX, i, y)
                a0, a1, a2, a3 = all16(a_RI[r, i]), all16(a_RI[r + 1, i]), all16(a_RI[r + 2, i]), all16(a_RI[r + 3, i])
                c00, c01 = fma16(a0, b0, c00), fma16(a0, b1, c01)
                c10, c11 = fma16(a1, b0, c10), fma16(a1, b1, c11)
                c20, c21 = fma16(a2, b0, c20), fma16(a2, b1, c21)
                c30, c31 = fma16(a3, b0, c30), fma16(a3, b1, c31)
            store16(c_RX, r, x, c00), store16(c_RX, r, y, c01)
            store16(c_RX, r + 1, x, c10), store16(c_RX, r + 1, y, c11)
            store16(c_RX, r + 2, x, c20), store16(c_RX, r + 2, y, c21)
            store16(c_RX, r + 3, x, c30), store16(c_RX, r + 3, y, c31)
        whole = width // WIDE * WIDE
        for x in range(even, whole, WIDE):
            c0, c1, c2, c3 = (
                load16(c_RX, r, x),
                load16(c_RX, r + 1, x),
                load16(c_RX, r + 2, x),
                load16(c_RX, r + 3, x),
            )
            for i in range(inner):
                b0 = load16(b_IX, i, x)
                c0, c1 = fma16(all16(a_RI[r, i]), b0, c0), fma16(all16(a_RI[r + 1, i]), b0, c1)
                c2, c3 = fma16(all16(a_RI[r + 2, i]), b0, c2), fma16(all16(a_RI[r + 3, i]), b0, c3)
            store16(c_RX, r, x, c0), store16(c_RX, r + 1, x, c1)
            store16(c_RX, r + 2, x, c2), store16(c_RX, r + 3, x, c3)
        for x in range(whole, width):
            for row in range(r, r + ROWS):
                total = c_RX[row, x]
                for i in range(inner):
                    total = fma(a_RI[row, i], load(b_IX[i, x]), total)
                c_RX[row, x] = total


@njit(nogil=True, cache=True)
def write(k_NKD, v_NKD, tokens, blocks, offsets, keys, values):
    """Write the keys and values of `tokens` to their blocks."""
    kv, dim = k_NKD.shape[1], k_NKD.shape[2]
    for i in range(len(tokens)):
        n, b, j = tokens[i], blocks[i], offsets[i]
        for head in range(kv):
            for d in range(dim):
                keys[b, head, d, j] = k_NKD[n, head, d]
                values[b, head, j, d] = v_NKD[n, head, d]


@inlined
def _load_queries(q_NHD, at, count, first_head, share, pitch, scale, q_RD):
    """Fill rows i * pitch + g of q_RD with the scaled queries of the heads that share one key head."""
    for i in range(count):
        for g in range(share):
            for d in range(q_RD.shape[1]):
                q_RD[i * pitch + g, d] = load(q_NHD[at + i, first_head + g, d]) * scale


@inlined
def _write_outputs(out_RD, sums_R, at, count, first_head, share, pitch, out_NHD):
    """Write the outputs, divided by their sums once and rounded once."""
    for i in range(count):
        for g in range(share):
            for d in range(out_RD.shape[1]):
                y = out_RD[i * pitch + g, d] / sums_R[i * pitch + g]
                out_NHD[at + i, first_head + g, d] = store(out_NHD[0, 0, 0], y)


@inlined
def attention_buffers(dim, block, share, longest):
    """Allocate a thread's buffers for `attend_head`: queries, outputs, scores, sums."""
    height = QUERIES * _apart(share)
    q, out = np.zeros((height, dim), np.float32), np.zeros((height, dim), np.float32)
    return q, out, np.zeros((height, longest), np.float32), np.zeros(height, np.float32)


@inlined
def _apart(share):
    """Return the number of rows of a query that also reads blocks of its own: its heads, in whole groups of `ROWS`."""
    return (share + ROWS - 1) // ROWS * ROWS


@inlined
def attend_head(
    dim, block, share, q_NHD, keys, values, tile_3, after, head, where, scale, window, out_NHD, lse_NH, place
):
    """Compute one tile's attention for the query heads that share key head `head`; see `attention`.

    `where` is (positions_N, where_N, table), `after` the next tile's first query, `place` the `attention_buffers`. The first three
    arguments are constants of the caller.
    """
    at, count, common = tile_3
    positions_N, where_N, table = where
    q, out, scores, sums = place
    apart = _apart(share)
    lowest, highest = positions_N[at : at + count].min(), positions_N[at : at + count].max()
    start = max(0, lowest - window + 1) // block if window > 0 else 0
    stop = highest // block + 1
    pitch = share if common == stop else apart
    used = (count * pitch + ROWS - 1) // ROWS * ROWS
    _load_queries(q_NHD, at, count, head * share, share, pitch, scale, q)
    scores[:used, start * block : stop * block] = np.float32(0.0)
    out[:used] = np.float32(0.0)
    for i in range(-1, count):  # first (-1) the blocks that all queries share, then each query's own
        query, row, rows = at + max(i, 0), max(i, 0) * pitch, used if i < 0 else apart
        first, end = (start, common) if i < 0 else (max(start, common), max(common, positions_N[query] // block + 1))
        for b in range(first, end):  # prefetches the values while it uses the keys
            held, part = table[where_N[query] + b], scores[row:, b * block : (b + 1) * block]
            accumulate(q[row:], keys[held, head], part, rows, dim, block, values[held, head])
        if i >= 0:
            position = positions_N[query]
            seen = (max(0, position - window + 1) if window > 0 else 0, position + 1)
            for g in range(share):
                top, sums[row + g] = _softmax(scores, row + g, start * block, seen, end * block)
                lse_NH[query, head * share + g] = top + np.log(sums[row + g])
    for i in range(-1, count):
        query, row, rows = at + max(i, 0), max(i, 0) * pitch, used if i < 0 else apart
        first, end = (start, common) if i < 0 else (max(start, common), positions_N[query] // block + 1)
        for b in range(first, end):
            held, part = table[where_N[query] + b], scores[row:, b * block : (b + 1) * block]
            coming = _next_keys(keys, table, where_N, positions_N, held, head, after, b, block)
            accumulate(part, values[held, head], out[row:], rows, block, dim, coming)
    _write_outputs(out, sums, at, count, head * share, share, pitch, out_NHD)


@inlined
def _next_keys(keys, table, where_N, positions_N, held, head, after, b, block):
    """Return the keys that will be read soon, for prefetching: the next head's, or after the last head the next tile's."""
    if head + 1 < keys.shape[1]:
        return keys[held, head + 1]
    return keys[table[where_N[after] + min(b, positions_N[after] // block)], 0]


@lru_cache
def attention(dim, block, share):
    """Return the kernel for one head size, block size (multiple of 16) and number of query heads per key head.

    ``attend(q_NHD, keys, values, tiles_T3, positions_N, where_N, table, first, last, scale, window, out_NHD, lse_NH, longest)``
    computes tiles_T3[first:last]. `keys` [blocks, KV, D, block] and `values` [blocks, KV, block, D] are float32, or bf16 in uint16.
    Query n is at positions_N[n] and its blocks begin at table[where_N[n]]. A tile is (first query, number of queries, number of leading
    blocks that they share). `lse_NH` receives log(sum of exp(score)) for the backward pass. `longest`, a multiple of `block`, is an upper
    bound of all positions + 1.
    """
    # the closure may only capture numbers: they are part of the cached kernel's name, and a function's name differs in each process

    @njit(nogil=True, cache=True, error_model="numpy")
    def attend(
        q_NHD, keys, values, tiles_T3, positions_N, where_N, table, first, last, scale, window, out_NHD, lse_NH, longest
    ):
        place, where = attention_buffers(dim, block, share, longest), (positions_N, where_N, table)
        for tile in range(first, last):
            after = tiles_T3[min(tile + 1, last - 1), 0]
            tile_3 = (tiles_T3[tile, 0], tiles_T3[tile, 1], tiles_T3[tile, 2])
            for head in range(keys.shape[1]):
                attend_head(
                    dim,
                    block,
                    share,
                    q_NHD,
                    keys,
                    values,
                    tile_3,
                    after,
                    head,
                    where,
                    scale,
                    window,
                    out_NHD,
                    lse_NH,
                    place,
                )

    return attend
