# pyright: basic, reportCallIssue=false
"""Causal attention over keys and values in blocks, for one query or many, in one stated order of operations.

For the query of one head at position p, with fp32 arithmetic throughout:

1. score_j = q_0 k_j0 + q_1 k_j1 + ... , fused multiply-adds with d ascending from 0; q was multiplied by the scale first.
2. m = the exact maximum over the visible positions j; w_j = exp(score_j - m), 0 where invisible.
3. The sum of the w_j in 16 lanes, lane = j mod 16, each ascending; the lanes are folded 8, 4, 2, 1.
4. out_d = w_0 v_0d + w_1 v_1d + ..., fused multiply-adds with j ascending; divided by the sum once, rounded to the dtype once.

Nothing depends on who else is in the batch, how a prompt was cut, where a block lies, or how far the cache extends.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import exp, fma, load, store

LANES = 16
QUERIES = 8  # queries of one sequence that share a pass over its keys
_OFF = np.float32(-np.inf)


@njit(inline="always")
def _softmax(scores_RT, r, first, seen, end, lanes):
    """Turn row r's scores[first:end] into weights, 0 outside [seen[0], seen[1]); returns (maximum, sum)."""
    low, high = seen
    for j in range(first, low):
        scores_RT[r, j] = _OFF
    for j in range(high, end):
        scores_RT[r, j] = _OFF
    for k in range(LANES):
        lanes[k] = _OFF
    for j in range(first, end, LANES):
        for k in range(LANES):
            s = scores_RT[r, j + k]
            lanes[k] = s if s > lanes[k] else lanes[k]
    top = lanes[0]
    for k in range(1, LANES):
        top = lanes[k] if lanes[k] > top else top
    for k in range(LANES):
        lanes[k] = np.float32(0.0)
    for j in range(first, end, LANES):
        for k in range(LANES):
            w = exp(scores_RT[r, j + k] - top)
            scores_RT[r, j + k] = w
            lanes[k] += w
    fold = LANES // 2
    while fold:
        for k in range(fold):
            lanes[k] += lanes[k + fold]
        fold //= 2
    return top, lanes[0]


@njit(inline="always")
def _accumulate(a_RI, b_IX, c_RX, rows, inner, width):
    """c[r, x] += a[r, 0] b[0, x] + a[r, 1] b[1, x] + ..., one fma at a time; rows in fours (the last may be unused ones).

    The caller's `inner` and `width` are constants: with the sizes known LLVM needs no remainders and keeps sums in registers.
    """
    for r in range(0, rows, 4):
        for i in range(0, inner, 4):
            a00, a01, a02, a03 = a_RI[r, i], a_RI[r, i + 1], a_RI[r, i + 2], a_RI[r, i + 3]
            a10, a11, a12, a13 = a_RI[r + 1, i], a_RI[r + 1, i + 1], a_RI[r + 1, i + 2], a_RI[r + 1, i + 3]
            a20, a21, a22, a23 = a_RI[r + 2, i], a_RI[r + 2, i + 1], a_RI[r + 2, i + 2], a_RI[r + 2, i + 3]
            a30, a31, a32, a33 = a_RI[r + 3, i], a_RI[r + 3, i + 1], a_RI[r + 3, i + 2], a_RI[r + 3, i + 3]
            for x in range(width):
                b0, b1, b2, b3 = load(b_IX[i, x]), load(b_IX[i + 1, x]), load(b_IX[i + 2, x]), load(b_IX[i + 3, x])
                c_RX[r, x] = fma(a03, b3, fma(a02, b2, fma(a01, b1, fma(a00, b0, c_RX[r, x]))))
                c_RX[r + 1, x] = fma(a13, b3, fma(a12, b2, fma(a11, b1, fma(a10, b0, c_RX[r + 1, x]))))
                c_RX[r + 2, x] = fma(a23, b3, fma(a22, b2, fma(a21, b1, fma(a20, b0, c_RX[r + 2, x]))))
                c_RX[r + 3, x] = fma(a33, b3, fma(a32, b2, fma(a31, b1, fma(a30, b0, c_RX[r + 3, x]))))


@njit(nogil=True, cache=True)
def write(k_NKD, v_NKD, tokens, blocks, offsets, keys, values):
    """Put the keys and values of `tokens` into their blocks."""
    kv, dim = k_NKD.shape[1], k_NKD.shape[2]
    for i in range(len(tokens)):
        n, b, j = tokens[i], blocks[i], offsets[i]
        for head in range(kv):
            for d in range(dim):
                keys[b, head, d, j] = k_NKD[n, head, d]
                values[b, head, j, d] = v_NKD[n, head, d]


@njit(inline="always")
def _take(q_NHD, at, count, first_head, share, scale, q_RD):
    """Rows i * share + g of q_RD: the scaled queries of the heads that read one key head."""
    for i in range(count):
        for g in range(share):
            for d in range(q_RD.shape[1]):
                q_RD[i * share + g, d] = load(q_NHD[at + i, first_head + g, d]) * scale


@njit(inline="always")
def _give(out_RD, sums_R, at, count, first_head, share, out_NHD):
    """Divide once, round once."""
    for i in range(count):
        for g in range(share):
            for d in range(out_RD.shape[1]):
                y = out_RD[i * share + g, d] / sums_R[i * share + g]
                out_NHD[at + i, first_head + g, d] = store(out_NHD[0, 0, 0], y)


@lru_cache
def attention(dim, block, share):
    """The kernel for one head size, block size (multiple of 16) and number of query heads per key head.

    ``attend(q_NHD, keys, values, tiles_T4, table, first, last, scale, window, out_NHD, lse_NH, longest)`` computes
    tiles_T4[first:last]. `keys` [blocks, KV, D, block] and `values` [blocks, KV, block, D] are float32, or bf16 in uint16. A tile is
    (first query, queries, position of the first query, where its blocks begin in `table`). `lse_NH` gets
    log(sum of exp(score)) for the backward pass. `longest`, a multiple of `block`, bounds every tile's last position + 1.
    """
    # only numbers may be captured: numba names a cached kernel by what it captures, and a function has a new name in each process
    height = (QUERIES * share + 3) // 4 * 4

    @njit(nogil=True, cache=True, error_model="numpy")
    def attend(q_NHD, keys, values, tiles_T4, table, first, last, scale, window, out_NHD, lse_NH, longest):
        q, out = np.zeros((height, dim), np.float32), np.zeros((height, dim), np.float32)
        scores, sums = np.zeros((height, longest), np.float32), np.zeros(height, np.float32)
        lanes = np.zeros(LANES, np.float32)
        for head in range(keys.shape[1]):
            for tile in range(first, last):
                at, count, position, where = tiles_T4[tile]
                used = (count * share + 3) // 4 * 4
                _take(q_NHD, at, count, head * share, share, scale, q)
                start = max(0, position - window + 1) // block if window > 0 else 0
                stop = (position + count - 1) // block + 1
                scores[:used, start * block : stop * block] = np.float32(0.0)
                out[:used] = np.float32(0.0)
                for b in range(start, stop):
                    part = scores[:, b * block : (b + 1) * block]
                    _accumulate(q, keys[table[where + b], head], part, used, dim, block)
                for row in range(count * share):
                    high = position + row // share + 1
                    seen = (max(0, high - window) if window > 0 else 0, high)
                    top, sums[row] = _softmax(scores, row, start * block, seen, stop * block, lanes)
                    lse_NH[at + row // share, head * share + row % share] = top + np.log(sums[row])
                for b in range(start, stop):
                    part = scores[:, b * block : (b + 1) * block]
                    _accumulate(part, values[table[where + b], head], out, used, block, dim)
                _give(out, sums, at, count, head * share, share, out_NHD)

    return attend
