# pyright: basic, reportCallIssue=false
"""Steers one row of logits: adds to some of them, scaled so that KL(steered || base) stays within a cap, in fp64 and in a fixed order.

Notation: logits l, temperature T, x_i = fl32(l_i / T). Over the tokens that are not steerable, with m = max x, the logarithm of their mass
is R = m + log sum exp(x_i - m) (tiles of `TILE` tokens of the vocabulary, in 8 lanes each, lane = i mod 8, ascending; folded 4, 2, 1;
tiles ascending). A scale s moves l_v to l'_v = fl32(l_v + fl32(s push_v)) for the steerable tokens v, and so x_v by
d_v = fl32(l'_v / T) - x_v, which is exact. No other logit moves. So with A(d) = log(exp R + sum exp(x_v + d_v)) and
q_v = exp(x_v + d_v - A(d)),

    KL(steered || base) = sum q_v d_v - (A(d) - A(0)),

which takes one pass over the steerable tokens. It is the Bregman divergence of an exponential family's log-partition function A (Wainwright
and Jordan, Graphical Models, Exponential Families, and Variational Inference, 2008). A token with logit -inf keeps its probability of 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from ostinato.model.kernels.arithmetic import inlined, log64, operation
from ostinato.model.kernels.softmax import highest

TILE, LANES = 512, 8
STEPS = 12
"""Bisection steps for the scale, which is one of 0, 1 / 4096, ..., 1."""
_LOG2E = 1.4426950408889634
_ROUND = 6755399441055744.0  # 1.5 * 2^52: adding it leaves a rounded integer in the low mantissa bits
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_C2, _C3, _C4, _C5, _C6, _C7 = 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040
_C8, _C9, _C10, _C11, _C12, _C13 = 1 / 40320, 1 / 362880, 1 / 3628800, 1 / 39916800, 1 / 479001600, 1 / 6227020800


def _times_power(builder: Any, value: Any, shifted: Any) -> Any:
    word = ir.IntType(64)
    bits, power = (builder.bitcast(arg, word) for arg in (value, shifted))
    return builder.bitcast(builder.add(bits, builder.shl(power, ir.Constant(word, 52))), ir.DoubleType())


_scaled = operation(_times_power, *[types.float64] * 3)
"""Multiplies a value by 2 to the power of the integer in the low mantissa bits of another, for normal float64 results."""


@inlined
def _exp(x):
    """Return exp(x) for x <= 0 to about 1 ulp, in float64: a Taylor polynomial of degree 13 without branches; 0 below -700, NaN for NaN."""
    shifted = x * _LOG2E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = _C11 + r * (_C12 + r * _C13)
    p = _C7 + r * (_C8 + r * (_C9 + r * (_C10 + r * p)))
    p = _C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * p)))
    p = 1.0 + r * (1.0 + r * (_C2 + r * p))
    scaled = _scaled(p, shifted)
    return scaled if x > -700.0 else (x if x != x else 0.0)


@inlined
def _total(logits_V, t, top):
    """Return the sum of exp(x - top) over the vocabulary."""
    vocab = len(logits_V)
    part_T, sums_L = np.empty(TILE, np.float64), np.empty(LANES, np.float64)
    total = 0.0
    for start in range(0, vocab, TILE):
        stop = min(start + TILE, vocab)
        row = logits_V[start:stop]  # a slice, so that LLVM vectorises the loop
        for i in range(len(row)):
            part_T[i] = _exp(np.float64(row[i] / t) - top)
        part_T[len(row) :] = 0.0
        sums_L[:] = 0.0
        for i in range(0, TILE, LANES):
            for lane in range(LANES):
                sums_L[lane] += part_T[i + lane]
        half = LANES // 2
        while half:
            for lane in range(half):
                sums_L[lane] += sums_L[lane + half]
            half //= 2
        total += sums_L[0]
    return total


@inlined
def _log_sum(rest, x_M, d_M):
    """Return log(exp(rest) + sum exp(x + d)), computed relative to the largest exponent."""
    top = rest
    for m in range(len(x_M)):
        top = max(top, x_M[m] + d_M[m])
    total = _exp(rest - top)
    for m in range(len(x_M)):
        total += _exp(x_M[m] + d_M[m] - top)
    return top + log64(total)


@inlined
def _divergence(logits_M, t, pushes_M, x_M, rest, base, scale, d_M, steered_M):
    """Return KL(steered || base) at a scale; fill d_M with the moves of the tokens' x, and steered_M with their steered probabilities."""
    for m in range(len(x_M)):
        moved = (logits_M[m] + scale * pushes_M[m]) / t
        d_M[m] = np.float64(moved) - x_M[m] if x_M[m] > -np.inf else 0.0
    moved_base = _log_sum(rest, x_M, d_M)
    mean = 0.0
    for m in range(len(x_M)):
        steered_M[m] = _exp(x_M[m] + d_M[m] - moved_base)
        mean += steered_M[m] * d_M[m]
    return mean - (moved_base - base)


@njit(nogil=True, cache=True, error_model="numpy")
def steer(logits_V, t, tokens_M, pushes_M, cap, directions_KM, means_K, found):
    """Add s * pushes to the fp32 logits of ascending tokens, in place, with the largest scale s (bisected) with KL(steered || base) <= cap.

    Fills means_K with the mean of each row of directions_KM [K, M] under the steered distribution (fp64, ascending), and `found` with the
    KL and s of what was added, roundings included. If the logits hold a NaN or +inf, nothing is added, and KL and s are 0.
    """
    count = len(tokens_M)
    logits_M, x_M = np.empty(count, np.float32), np.empty(count, np.float64)
    d_M, steered_M = np.zeros(count, np.float64), np.zeros(count, np.float64)
    for m in range(count):
        logits_M[m] = logits_V[tokens_M[m]]
        x_M[m] = np.float64(logits_M[m] / t)
        logits_V[tokens_M[m]] = np.float32(-np.inf)
    top = np.float64(highest(logits_V.reshape((1, len(logits_V))), 0) / t)
    rest = top + log64(_total(logits_V, t, top)) if top > -np.inf else top
    base = _log_sum(rest, x_M, d_M)
    scale, kl = np.float32(0.0), 0.0
    if np.isfinite(base):
        scale = np.float32(1.0)
        if not _divergence(logits_M, t, pushes_M, x_M, rest, base, scale, d_M, steered_M) <= cap:
            scale, step = np.float32(0.0), np.float32(0.5)
            for _ in range(STEPS):
                kl = _divergence(logits_M, t, pushes_M, x_M, rest, base, scale + step, d_M, steered_M)
                scale = scale + step if kl <= cap else scale
                step *= np.float32(0.5)
        kl = _divergence(logits_M, t, pushes_M, x_M, rest, base, scale, d_M, steered_M)
    for m in range(count):
        logits_V[tokens_M[m]] = logits_M[m] + scale * pushes_M[m] if scale > 0.0 else logits_M[m]
    for k in range(len(means_K)):
        means_K[k] = 0.0
        for m in range(count):
            means_K[k] += steered_M[m] * np.float64(directions_KM[k, m])
    found[0], found[1] = kl if scale > 0.0 else 0.0, scale
