# pyright: basic, reportCallIssue=false
"""The gradient of causal attention over keys and values in blocks, in fp32.

Every weight is recomputed from the forward pass's log-sum-exp, one block at a time, so nothing as large as queries x keys is ever
held: p = exp(score - lse), ds = p (dO v - delta) with delta = dO O; then dq = ds k, dk = ds q, dv = p dO (Dao 2022, 2205.14135).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import inlined, load, store
from ostinato.model.kernels.attention import ROWS, accumulate
from ostinato.model.kernels.vector import WIDE, all16, exp16, load16, mul16, store16, sub16

_HEIGHT = 48  # rows of a tile: its queries times the query heads that share a key head


def queries_per_tile(share):
    """The number of neighbouring queries in a tile if `share` query heads read one key head."""
    return max(4, _HEIGHT // share)


@njit(nogil=True, cache=True)
def into_blocks(x_NKD, tokens, blocks, offsets, out):
    """Put x's tokens into blocks [blocks, KV, block, D], float32."""
    for i in range(len(tokens)):
        n, b, j = tokens[i], blocks[i], offsets[i]
        for head in range(x_NKD.shape[1]):
            for d in range(x_NKD.shape[2]):
                out[b, head, j, d] = load(x_NKD[n, head, d])


@njit(nogil=True, cache=True)
def into_turned_blocks(x_NKD, tokens, blocks, offsets, out):
    """Put x's tokens into blocks [blocks, KV, D, block], float32."""
    for i in range(len(tokens)):
        n, b, j = tokens[i], blocks[i], offsets[i]
        for head in range(x_NKD.shape[1]):
            for d in range(x_NKD.shape[2]):
                out[b, head, d, j] = load(x_NKD[n, head, d])


@njit(nogil=True, cache=True)
def gather(parts, tokens, blocks, offsets, total_NKD, out_NKD):
    """Sum parts [parts, blocks, KV, block, D] by token, in the order of `tokens`; `total_NKD` is float32 and initially zero."""
    count, _, kv, _, dim = parts.shape
    for i in range(len(tokens)):
        n, b, j = tokens[i], blocks[i], offsets[i]
        for part in range(count):
            for head in range(kv):
                for d in range(dim):
                    total_NKD[n, head, d] += parts[part, b, head, j, d]
    for n in range(out_NKD.shape[0]):
        for head in range(kv):
            for d in range(dim):
                out_NKD[n, head, d] = store(out_NKD[0, 0, 0], total_NKD[n, head, d])


@inlined
def _weigh(p, ds, row, lse, delta, low, high, block):
    """Turn row `row` of p from scores into weights, and of ds from dO v into p (dO v - delta); 0 outside keys [low, high)."""
    for j in range(0, block, WIDE):
        w = exp16(sub16(load16(p, row, j), all16(lse)))
        store16(p, row, j, w)
        store16(ds, row, j, mul16(w, sub16(load16(ds, row, j), all16(delta))))
    for j in range(0, min(max(low, 0), block)):
        p[row, j], ds[row, j] = np.float32(0.0), np.float32(0.0)
    for j in range(min(max(high, 0), block), block):
        p[row, j], ds[row, j] = np.float32(0.0), np.float32(0.0)


@lru_cache
def attention_gradient(dim, block, share):
    """The kernel for one head size, block size (multiple of 16) and number of query heads per key head.

    ``run(head, q_NHD, do_NHD, lse_NH, delta_NH, keys, keys_by_dim, values_by_dim, tiles_T2, positions_N, where_N, table, first,
    last, scale, window, dq_NHD, dk, dv)`` goes through tiles_T2[first:last] = (first query, queries; at most `queries_per_tile`) for
    one key head, writes the queries' part of dq and adds to dk and dv [blocks, KV, block, D]. Arrays of numbers are float32.
    Query n is at positions_N[n] and its blocks begin at table[where_N[n]], the same for all queries of a tile.
    """
    # only numbers may be captured: numba names a cached kernel by what it captures, and a function has a new name in each process
    height = (queries_per_tile(share) * share + ROWS - 1) // ROWS * ROWS

    @njit(nogil=True, cache=True, error_model="numpy")
    def run(
        head, q_NHD, do_NHD, lse_NH, delta_NH, keys, keys_by_dim, values_by_dim, tiles_T2, positions_N, where_N, table,
        first, last, scale, window, dq_NHD, dk, dv,
    ):  # fmt: skip
        q, do = np.zeros((height, dim), np.float32), np.zeros((height, dim), np.float32)
        dq, p = np.zeros((height, dim), np.float32), np.zeros((height, block), np.float32)
        ds = np.zeros((height, block), np.float32)
        for tile in range(first, last):
            at, count = tiles_T2[tile]
            rows = count * share
            used = (rows + ROWS - 1) // ROWS * ROWS
            for row in range(rows):
                n, h = at + row // share, head * share + row % share
                for d in range(dim):
                    q[row, d], do[row, d] = q_NHD[n, h, d] * scale, do_NHD[n, h, d]
            q[rows:used], do[rows:used], dq[:used] = np.float32(0.0), np.float32(0.0), np.float32(0.0)
            first_key = max(0, positions_N[at] - window + 1) if window > 0 else 0
            for b in range(first_key // block, positions_N[at + count - 1] // block + 1):
                held = table[where_N[at] + b]
                p[:used], ds[:used] = np.float32(0.0), np.float32(0.0)
                accumulate(q, keys_by_dim[held, head], p, used, dim, block, values_by_dim[held, head])
                accumulate(do, values_by_dim[held, head], ds, used, dim, block, keys[held, head])
                for row in range(rows):
                    n, h = at + row // share, head * share + row % share
                    high = positions_N[n] + 1 - b * block
                    low = high - window if window > 0 else 0
                    _weigh(p, ds, row, lse_NH[n, h], delta_NH[n, h], low, high, block)
                p[rows:used], ds[rows:used] = np.float32(0.0), np.float32(0.0)
                accumulate(ds, keys[held, head], dq, used, block, dim, dk[held, head])
                accumulate(ds.T, q, dk[held, head], block, used, dim, dv[held, head])
                accumulate(p.T, do, dv[held, head], block, used, dim, q)
            for row in range(rows):
                n, h = at + row // share, head * share + row % share
                for d in range(dim):
                    dq_NHD[n, h, d] = dq[row, d] * scale

    return run
