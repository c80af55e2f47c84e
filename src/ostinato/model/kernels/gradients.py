# pyright: basic, reportCallIssue=false
"""Gradients of RMS norm, log-probabilities and causal attention, each in one pass over memory instead of five to ten.

Arithmetic is fp32, and results are rounded once. Rows are independent, except in the gradient of the norm's weight.

The attention gradient recomputes every attention weight from the forward pass's log-sum-exp, one block at a time, so nothing of size
queries x keys is ever in memory: p = exp(score - lse), ds = p (dO v - delta) with delta = dO O; then dq = ds k, dk = ds q, dv = p dO
(FlashAttention, Dao 2022, 2205.14135).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import exp, inlined, load, store
from ostinato.model.kernels.attention import ROWS, accumulate
from ostinato.model.kernels.norm import factor16
from ostinato.model.kernels.vector import WIDE, all16, div16, exp16, fma16, load16, mul16, store16, sub16, sum16


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm_gradient(x_ND, weight_1D, zero_centered, scales_N, grad_ND, out_ND, weight_total_1D):
    """Fill out_ND with the gradient of x for y = w x r, where r = 1 / sqrt(mean(x^2) + eps) = scales_N.

    The gradient is r (g w - y' mean(g w y')) with y' = x r. With a zero-centred weight, w is 1 + weight. Adds the weight's gradient g y' to
    `weight_total_1D`, row by row. D is a multiple of 16.
    """
    rows, dim = x_ND.shape
    for n in range(rows):
        r = all16(scales_N[n])
        inner = all16(np.float32(0.0))
        for d in range(0, dim, WIDE):
            y, g = mul16(load16(x_ND, n, d), r), load16(grad_ND, n, d)
            inner = fma16(mul16(g, factor16(load16(weight_1D, 0, d), zero_centered)), y, inner)
            store16(weight_total_1D, 0, d, fma16(g, y, load16(weight_total_1D, 0, d)))
        mean = all16(sum16(inner) / np.float32(dim))
        for d in range(0, dim, WIDE):
            y, g = mul16(load16(x_ND, n, d), r), load16(grad_ND, n, d)
            inward = sub16(mul16(g, factor16(load16(weight_1D, 0, d), zero_centered)), mul16(y, mean))
            store16(out_ND, n, d, mul16(inward, r))


@njit(nogil=True, cache=True, error_model="numpy")
def logprob_gradient(logits_MV, temperatures_M, log_totals_M, targets_M, grads_M):
    """Overwrite logits with the gradient of sum(grads log p(targets)), where p = softmax(logits / temperature): g (1[target] - p) / t."""
    vocab = logits_MV.shape[1]
    whole = vocab // WIDE * WIDE
    for m in range(logits_MV.shape[0]):
        t, total, g = temperatures_M[m], log_totals_M[m], grads_M[m] / temperatures_M[m]
        target = targets_M[m]
        hit = g - g * exp(load(logits_MV[m, target]) / t - total)
        for i in range(0, whole, WIDE):
            p = exp16(sub16(div16(load16(logits_MV, m, i), all16(t)), all16(total)))
            store16(logits_MV, m, i, mul16(all16(-g), p))
        for i in range(whole, vocab):
            logits_MV[m, i] = store(logits_MV[0, 0], -g * exp(load(logits_MV[m, i]) / t - total))
        logits_MV[m, target] = store(logits_MV[0, 0], hit)


# ---------------------------------------------------------------- attention


_TILE_ROWS = 48  # rows of a tile: its queries times the query heads that share a key head


def queries_per_tile(share):
    """Return the number of neighbouring queries in a tile if `share` query heads share one key head."""
    return max(4, _TILE_ROWS // share)


@njit(nogil=True, cache=True)
def into_blocks(x_NKD, tokens, blocks, offsets, out):
    """Write tokens of x to blocks [blocks, KV, block, D], float32."""
    for i in range(len(tokens)):
        n, b, j = tokens[i], blocks[i], offsets[i]
        for head in range(x_NKD.shape[1]):
            for d in range(x_NKD.shape[2]):
                out[b, head, j, d] = load(x_NKD[n, head, d])


@njit(nogil=True, cache=True)
def into_turned_blocks(x_NKD, tokens, blocks, offsets, out):
    """Write tokens of x to transposed blocks [blocks, KV, D, block], float32."""
    for i in range(len(tokens)):
        n, b, j = tokens[i], blocks[i], offsets[i]
        for head in range(x_NKD.shape[1]):
            for d in range(x_NKD.shape[2]):
                out[b, head, d, j] = load(x_NKD[n, head, d])


@njit(nogil=True, cache=True)
def gather(parts, tokens, blocks, offsets, total_NKD, out_NKD):
    """Sum parts [parts, blocks, KV, block, D] by token, in the order of `tokens`, into out_NKD; `total_NKD` is float32, initially zero."""
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
    """Convert row `row` of p from scores to weights, and of ds from dO v to p (dO v - delta); 0 outside keys [low, high)."""
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
    """Return the kernel for one head size, block size (multiple of 16) and number of query heads per key head.

    ``run(head, q_NHD, do_NHD, lse_NH, delta_NH, keys, keys_by_dim, values_by_dim, tiles_T2, positions_N, where_N, table, first,
    last, scale, window, dq_NHD, dk, dv)`` processes tiles_T2[first:last] = (first query, queries; at most `queries_per_tile`) for
    one key head, writes the queries' part of dq and adds to dk and dv [blocks, KV, block, D]. Floating-point arrays are float32.
    Query n is at positions_N[n] and its blocks begin at table[where_N[n]], the same for all queries of a tile.
    """
    # the closure may only capture numbers: they are part of the cached kernel's name, and a function's name differs in each process
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
