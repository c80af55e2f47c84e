# pyright: basic, reportCallIssue=false
"""RMS normalisation in one pass over a row instead of seven.

Per row, in fp32: the squares are summed in 16 lanes (lane = d mod 16, ascending, fused multiply-adds; folded 8, 4, 2, 1);
r = 1 / sqrt(sum / D + eps); y_d = x_d r is rounded to the dtype, multiplied by the weight in fp32 and rounded again.

Queries and keys out of one row of a fused product: normed if the model norms its heads, then rotated by their positions.

For a head x of D numbers with cosines c and sines s (Su et al. 2021, 2104.09864, in the library's halves), in the library's order of
roundings: out_d = round(round(x_d c_d) + round(-x_(d + D/2) s_d)) for the first half, and with +x_(d - D/2) for the second. The norm before
it is that of `norm.rms_norm`.

What the library's own modules compute element by element or along a row, in a stated order, so that every CPU gives the same bits.

A number's cosine, sine and sigmoid depend on that number alone. A row's softmax: m = max x; e_i = exp(x_i - m); their sum in fp32,
ascending; e_i / sum.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import cos_and_sin, exp, exp64, inlined, load, log64, store
from ostinato.model.kernels.vector import WIDE, add16, all16, fma16, load16, mul16, round16, store16, sub16, sum16

# pyright: basic, reportCallIssue=false


# pyright: basic, reportCallIssue=false


LANES = WIDE


@inlined
def root(x_ND, n, first, dim, eps):
    """Row n's r over places [first, first + dim)."""
    squares = all16(np.float32(0.0))
    for d in range(first, first + dim, WIDE):
        x = load16(x_ND, n, d)
        squares = fma16(x, x, squares)
    return np.float32(1.0) / np.sqrt(sum16(squares) / np.float32(dim) + eps)


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm(x_ND, weight_1D, eps, out_ND, scales_N):
    """Fill out_ND, and scales_N with each row's r unless it is empty. D is a multiple of 16."""
    rows, dim = x_ND.shape
    for n in range(rows):
        r = root(x_ND, n, 0, dim, eps)
        if len(scales_N):
            scales_N[n] = r
        for d in range(0, dim, WIDE):
            y = round16(out_ND, mul16(load16(x_ND, n, d), all16(r)))
            store16(out_ND, n, d, mul16(load16(weight_1D, 0, d), y))


@njit(nogil=True, cache=True, error_model="numpy")
def add_norm(x_ND, more_ND, weight_1D, eps, out_ND):
    """Add more_ND to x_ND in place, rounding to the dtype as torch does, and fill out_ND with the norm of the sum."""
    rows, dim = x_ND.shape
    for n in range(rows):
        for d in range(0, dim, WIDE):
            store16(x_ND, n, d, add16(load16(x_ND, n, d), load16(more_ND, n, d)))
        r = root(x_ND, n, 0, dim, eps)
        for d in range(0, dim, WIDE):
            y = round16(out_ND, mul16(load16(x_ND, n, d), all16(r)))
            store16(out_ND, n, d, mul16(load16(weight_1D, 0, d), y))


# ---------------------------------------------------------------- rotary positions


# pyright: basic, reportCallIssue=false


@inlined
def _rounded(array, x):
    """The value as `array` would store it."""
    return load(store(array[0, 0], x))


@njit(nogil=True, cache=True, error_model="numpy")
def rotate(x_NW, first, heads, cos_ND, sin_ND, weight_1D, eps, out_NX):
    """Fill the rows of out_NX with `heads` rotated heads, the first of which begins at place `first` of each row of x_NW.

    `weight_1D` is the weight of the heads' norm, the result of which is written into x_NW, and D is a multiple of 16; or it is [1, 0]
    for no norm, and D is even.
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
                    y = round16(out_NX, mul16(load16(x_NW, n, at + d), all16(r)))
                    store16(x_NW, n, at + d, mul16(load16(weight_1D, 0, d), y))
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


# ---------------------------------------------------------------- elementwise


# pyright: basic, reportCallIssue=false


_ONE = np.float32(1.0)


@njit(nogil=True, cache=True)
def cosines(x_N, out_N):
    """Fill out_N with the cosines of fp32 numbers, computed in fp64 and rounded once."""
    for n in range(len(x_N)):
        out_N[n] = np.float32(cos_and_sin(np.float64(x_N[n]))[0])


@njit(nogil=True, cache=True)
def sines(x_N, out_N):
    """Fill out_N with the sines of fp32 numbers, computed in fp64 and rounded once."""
    for n in range(len(x_N)):
        out_N[n] = np.float32(cos_and_sin(np.float64(x_N[n]))[1])


@njit(nogil=True, cache=True)
def powers(base, x_N, out_N):
    """Fill out_N with a positive base to the power of fp32 numbers, computed in fp64 and rounded once."""
    exponent = log64(base)
    for n in range(len(x_N)):
        out_N[n] = np.float32(exp64(np.float64(x_N[n]) * exponent))


@njit(nogil=True, cache=True, error_model="numpy")
def sigmoids(x_N, out_N):
    """Fill out_N with 1 / (1 + exp(-x)), rounded once to its dtype."""
    for n in range(len(x_N)):
        x = load(x_N[n])
        e = exp(-abs(x))
        out_N[n] = store(out_N[n], (e if x < np.float32(0.0) else _ONE) / (_ONE + e))


@njit(nogil=True, cache=True, error_model="numpy")
def softmax_rows(x_NE, out_NE):
    """Fill the rows of out_NE with the softmax of those of x_NE, both fp32. A NaN or +inf makes its row NaN."""
    rows, size = x_NE.shape
    for n in range(rows):
        top = np.float32(-np.inf)
        for i in range(size):
            top = x_NE[n, i] if x_NE[n, i] > top else top
        total = np.float32(0.0)
        for i in range(size):
            out_NE[n, i] = exp(x_NE[n, i] - top)
            total += out_NE[n, i]
        for i in range(size):
            out_NE[n, i] /= total
