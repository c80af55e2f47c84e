# pyright: basic, reportCallIssue=false
"""Softmax over the vocabulary, log-probabilities and sampling: one definition for sampler and trainer.

Per row, with s_i = logit_i / temperature in fp32: m = max s; e_i = exp(s_i - m); the e_i of each tile of `TILE` tokens are summed in
16 lanes (lane = i mod 16, ascending; folded 8, 4, 2, 1), and the tiles' sums are added in fp64, ascending. Then
log p_i = (s_i - m) - log(sum) in fp64, rounded to fp32 once. No array of the vocabulary's size is written.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import exp, inlined, load, log64
from ostinato.model.kernels.vector import WIDE, add16, all16, div16, exp16, load16, max16, sub16, sum16, top16

TILE = 512
LANES = WIDE
_OFF = np.float32(-np.inf)


@inlined
def highest(logits_MV, r):
    """Return the row's maximum. May ignore a NaN, which shows in the sums."""
    vocab = logits_MV.shape[1]
    whole = vocab // LANES * LANES
    tops = all16(_OFF)
    for i in range(0, whole, LANES):
        tops = max16(tops, load16(logits_MV, r, i))
    top = top16(tops)
    for i in range(whole, vocab):
        s = load(logits_MV[r, i])
        top = s if s > top else top
    return top


@inlined
def _sum(logits_MV, r, start, stop, t, top, rest):
    """Return the sum of exp(s - top) over tokens [start, stop). `rest` is a buffer for 16 numbers."""
    even = start + (stop - start) // LANES * LANES
    sums = all16(np.float32(0.0))
    if t == np.float32(1.0):  # the common case: the division would cost as much as the rest
        for i in range(start, even, LANES):
            sums = add16(sums, exp16(sub16(load16(logits_MV, r, i), all16(top))))
    else:
        for i in range(start, even, LANES):
            sums = add16(sums, exp16(sub16(div16(load16(logits_MV, r, i), all16(t)), all16(top))))
    if even < stop:
        rest[:] = np.float32(0.0)
        for i in range(even, stop):
            rest[0, i - even] = exp(load(logits_MV[r, i]) / t - top)
        sums = add16(sums, load16(rest, 0, 0))
    return sum16(sums)


@njit(nogil=True, cache=True, error_model="numpy")
def normalise(logits_MV, temperatures_M, tops_M, sums_MK, totals_M):
    """Fill each row's maximum of s, its tiles' sums and its total. A NaN or +inf anywhere makes the total NaN."""
    rest = np.empty((1, LANES), np.float32)
    for r in range(logits_MV.shape[0]):
        t = temperatures_M[r]
        top = highest(logits_MV, r) / t  # division by a positive number keeps the order
        total = 0.0
        for tile in range(sums_MK.shape[1]):
            start = tile * TILE
            sums_MK[r, tile] = _sum(logits_MV, r, start, min(start + TILE, logits_MV.shape[1]), t, top, rest)
            total += sums_MK[r, tile]
        tops_M[r], totals_M[r] = top, total


@njit(nogil=True, cache=True, error_model="numpy")
def logprobs(logits_MV, temperatures_M, tops_M, totals_M, tokens_M, out_M):
    """Fill out_M with the log-probability of one token per row, from the results of `normalise`."""
    for r in range(logits_MV.shape[0]):
        s = load(logits_MV[r, tokens_M[r]]) / temperatures_M[r]
        out_M[r] = np.float32(np.float64(s - tops_M[r]) - log64(totals_M[r]))


@njit(nogil=True, cache=True, error_model="numpy")
def invert(logits_MV, temperatures_M, tops_M, sums_MK, totals_M, u_M, tokens_M):
    """Draw by inversion: the token at which the cumulative probability passes u in [0, 1); the most likely token for u < 0."""
    rows, vocab = logits_MV.shape
    for r in range(rows):
        t, top = temperatures_M[r], tops_M[r]
        if u_M[r] < 0.0:
            best, token = _OFF, 0
            for i in range(vocab):
                s = load(logits_MV[r, i])
                if s > best:
                    best, token = s, i
            tokens_M[r] = token
            continue
        target = u_M[r] * totals_M[r]
        before = 0.0
        tile = 0
        last = sums_MK.shape[1] - 1
        while tile < last and before + sums_MK[r, tile] <= target:
            before += sums_MK[r, tile]
            tile += 1
        token = tile * TILE
        for i in range(tile * TILE, min(tile * TILE + TILE, vocab)):
            mass = exp(load(logits_MV[r, i]) / t - top)
            if mass > 0.0:
                token = i  # the last possible token, if rounding leaves the sum short of the target
                before += mass
                if before > target:
                    break
        tokens_M[r] = token


_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@njit(nogil=True, cache=True, error_model="numpy")
def race(logits_MV, temperatures_M, tops_M, rows_P, keys_P, tokens_M):
    """Draw by an exponential race in each of these rows: the token with the smallest E_i / p_i, where E_i = -log u_i and u_i is number i of
    the row's SplitMix64 stream. Token i wins with probability p_i. E_i does not depend on p, so similar distributions mostly have the same
    winner.
    """
    for i in range(len(rows_P)):
        r = rows_P[i]
        t, top = temperatures_M[r], tops_M[r]
        state, best, token = keys_P[i], np.inf, 0
        for v in range(logits_MV.shape[1]):
            state += _STEP
            mass = np.float64(exp(load(logits_MV[r, v]) / t - top))
            if mass > 0.0:
                z = (state ^ (state >> _30)) * _FIRST
                z = (z ^ (z >> _27)) * _SECOND
                u = (np.float64((z ^ (z >> _31)) >> _11) + 1.0) * 2.0**-53
                if 1.0 - u < best * mass and -log64(u) < best * mass:  # -log u >= 1 - u, which is cheap to test first
                    best, token = -log64(u) / mass, v
        tokens_M[r] = token


@njit(nogil=True, cache=True)
def logs(totals_M, out_M):
    """Fill out_M with the logarithms of totals, in fp64."""
    for r in range(len(totals_M)):
        out_M[r] = log64(totals_M[r])
