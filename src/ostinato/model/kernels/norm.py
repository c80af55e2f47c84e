# pyright: basic, reportCallIssue=false
"""RMS normalisation in one pass over a row instead of seven, and rotary embeddings of heads, with optional head norms.

RMS norm, per row, in fp32: the squares are summed in 16 lanes (lane = d mod 16, ascending, fused multiply-adds; folded 8, 4, 2, 1);
r = 1 / sqrt(sum / D + eps); y_d = x_d r is rounded to the dtype, multiplied by the weight in fp32 and rounded again. With a zero-centred
weight, as in Gemma, the factor is 1 + weight: y_d is not rounded but multiplied by the factor in fp32, and the product is rounded.

Rotary embeddings (Su et al. 2021, 2104.09864, in the library's layout of halves) of a head x of D numbers with cosines c and sines s, in
the library's order of roundings: out_d = round(round(x_d c_d) + round(-x_(d + D/2) s_d)) for the first half, and with +x_(d - D/2) for the
second. `rotate` reads queries or keys from a row of a fused product, and norms the heads first, as `rms_norm` does, if the model does.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import inlined, load, store
from ostinato.model.kernels.vector import WIDE, add16, all16, fma16, load16, mul16, round16, store16, sub16, sum16

LANES = WIDE
_ONE = np.float32(1.0)


@inlined
def root(x_ND, n, first, dim, eps):
    """Return r of row n over columns [first, first + dim)."""
    squares = all16(np.float32(0.0))
    for d in range(first, first + dim, WIDE):
        x = load16(x_ND, n, d)
        squares = fma16(x, x, squares)
    return np.float32(1.0) / np.sqrt(sum16(squares) / np.float32(dim) + eps)


@inlined
def factor16(weight, zero_centered):
    """Return the factors of sixteen normed numbers, from their weights."""
    # takes a vector, not the array: numba counts references to array arguments, which made the loop four times as slow
    if zero_centered:
        weight = add16(all16(_ONE), weight)
    return weight


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm(x_ND, weight_1D, eps, zero_centered, out_ND, scales_N):
    """Norm rows into out_ND, which may be x_ND; fill scales_N with each row's r unless it is empty. D is a multiple of 16."""
    rows, dim = x_ND.shape
    for n in range(rows):
        r = root(x_ND, n, 0, dim, eps)
        if len(scales_N):
            scales_N[n] = r
        for d in range(0, dim, WIDE):
            y = mul16(load16(x_ND, n, d), all16(r))
            if not zero_centered:
                y = round16(out_ND, y)
            store16(out_ND, n, d, mul16(factor16(load16(weight_1D, 0, d), zero_centered), y))


@njit(nogil=True, cache=True, error_model="numpy")
def add_norm(x_ND, more_ND, weight_1D, eps, zero_centered, out_ND):
    """Add more_ND to x_ND in place, rounding to the dtype as torch does, and norm the sum into out_ND."""
    rows, dim = x_ND.shape
    for n in range(rows):
        for d in range(0, dim, WIDE):
            store16(x_ND, n, d, add16(load16(x_ND, n, d), load16(more_ND, n, d)))
        r = root(x_ND, n, 0, dim, eps)
        for d in range(0, dim, WIDE):
            y = mul16(load16(x_ND, n, d), all16(r))
            if not zero_centered:
                y = round16(out_ND, y)
            store16(out_ND, n, d, mul16(factor16(load16(weight_1D, 0, d), zero_centered), y))


# ---------------------------------------------------------------- rotary embeddings


@inlined
def _rounded(array, x):
    """Round a value as `array` would store it."""
    return load(store(array[0, 0], x))


@njit(nogil=True, cache=True, error_model="numpy")
def rotate(x_NW, first, heads, cos_ND, sin_ND, weight_1D, eps, zero_centered, out_NX):
    """Fill the rows of out_NX with `heads` rotated heads, which begin at column `first` of each row of x_NW.

    `weight_1D` is the weight of the head norm, whose result is written into x_NW; D is then a multiple of 16. Without a norm it is [1, 0],
    and D is even.
    """
    rows, dim = cos_ND.shape
    half = dim // 2
    whole = half // WIDE * WIDE
    for n in range(rows):
        for h in range(heads):
            at, to = first + h * dim, h * dim
            if weight_1D.shape[1] > 0:
                r = root(x_NW, n, at, dim, eps)
                for d in range(0, dim, WIDE):
                    y = mul16(load16(x_NW, n, at + d), all16(r))
                    if not zero_centered:
                        y = round16(out_NX, y)
                    store16(x_NW, n, at + d, mul16(factor16(load16(weight_1D, 0, d), zero_centered), y))
            for d in range(0, whole, WIDE):
                low, high = load16(x_NW, n, at + d), load16(x_NW, n, at + half + d)
                one = round16(out_NX, mul16(low, load16(cos_ND, n, d)))
                two = round16(out_NX, mul16(high, load16(sin_ND, n, d)))
                store16(out_NX, n, to + d, sub16(one, two))
                one = round16(out_NX, mul16(high, load16(cos_ND, n, half + d)))
                two = round16(out_NX, mul16(low, load16(sin_ND, n, half + d)))
                store16(out_NX, n, to + half + d, add16(one, two))
            for d in range(whole, half):
                low, high = load(x_NW[n, at + d]), load(x_NW[n, at + half + d])
                one = _rounded(out_NX, low * load(cos_ND[n, d]))
                two = _rounded(out_NX, high * load(sin_ND[n, d]))
                out_NX[n, to + d] = store(out_NX[0, 0], one - two)
                one = _rounded(out_NX, high * load(cos_ND[n, half + d]))
                two = _rounded(out_NX, low * load(sin_ND[n, half + d]))
                out_NX[n, to + half + d] = store(out_NX[0, 0], one + two)
