# pyright: basic, reportCallIssue=false
"""Quantisation of rows to 8-bit integer levels with one scale each, after a Hadamard rotation.

For a rotated row x with a = max |x_d|: the scale is a / 127, and level d is x_d (127 / a) rounded to nearest, ties to even, so that
|level| <= 127. A row that is almost zero has scale 0 and levels 0. A row with a NaN or an infinity has scale NaN, so all results from it
are NaN.

The rotation spreads outlier channels, because a row has only one scale. Activations and the weight's rows are both multiplied by H: since
H Hᵀ = b I, products are b times those without it (QuaRot, arXiv 2404.00456). H is block diagonal; each block is Sylvester's b x b matrix
of +1 and -1, where b is the largest power of two that divides the width.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import ROUND, bits_of, load
from ostinato.model.kernels.vector import (
    WIDE,
    add16,
    all16,
    fma16,
    hadamard16,
    load16,
    max16,
    mul16,
    store16,
    store_bytes16,
    sub16,
    sum16,
    top16,
)

# ---------------------------------------------------------------- Hadamard rotation


@njit(nogil=True, cache=True)
def block(width):
    """Return the size b of a block of H; 1, which means no rotation, for a width that is not a multiple of 16."""
    return width & -width if width % WIDE == 0 else 1


@njit(nogil=True, cache=True, error_model="numpy")
def rotate_row(x_ND, n, y_1D):
    """Compute y_1D[0] = x_ND[n] H; x is float32, or bf16 stored as uint16, y is float32."""
    dim = x_ND.shape[1]
    size = block(dim)
    if size == 1:
        for d in range(dim):
            y_1D[0, d] = load(x_ND[n, d])
        return
    for d in range(0, dim, WIDE):
        store16(y_1D, 0, d, hadamard16(load16(x_ND, n, d)))
    apart = WIDE
    while apart < size:
        for first in range(0, dim, 2 * apart):
            for d in range(first, first + apart, WIDE):
                a, b = load16(y_1D, 0, d), load16(y_1D, 0, d + apart)
                store16(y_1D, 0, d, add16(a, b))
                store16(y_1D, 0, d + apart, sub16(a, b))
        apart *= 2


@njit(nogil=True, cache=True, error_model="numpy")
def rotate(x_ND, y_ND):
    """Compute y_ND = x_ND H."""
    for n in range(len(x_ND)):
        rotate_row(x_ND, n, y_ND[n : n + 1])


# ---------------------------------------------------------------- levels


LEVELS = 127  # on either side of zero
_MOST = np.float32(LEVELS)
_LEAST = np.float32(1e-30)  # below it, the factor 127 / a could overflow


@njit(nogil=True, cache=True, error_model="numpy")
def to_levels(x_ND, levels_ND, scales_N):
    """Quantise rows: fill the first columns of levels_ND (uint8) with level + 128, and scales_N with the scales."""
    rows, dim = x_ND.shape
    whole = dim // WIDE * WIDE
    nothing, shift = all16(np.float32(0.0)), all16(ROUND)
    rotated = np.empty((1, dim), np.float32)
    for n in range(rows):
        rotate_row(x_ND, n, rotated)
        top, odd = nothing, nothing
        for d in range(0, whole, WIDE):
            x = load16(rotated, 0, d)
            top = max16(max16(top, x), sub16(nothing, x))
            odd = fma16(x, nothing, odd)
        largest, stray = top16(top), sum16(odd)
        for d in range(whole, dim):
            largest = max(largest, abs(rotated[0, d]))
            stray += rotated[0, d] * np.float32(0.0)
        if largest < _LEAST:
            scales_N[n], factor = stray, np.float32(0.0)
        else:
            scales_N[n], factor = largest / _MOST + stray, _MOST / largest
        # adding ROUND leaves the rounded level in the low bits
        for d in range(0, whole, WIDE):
            store_bytes16(levels_ND, n, d, add16(mul16(load16(rotated, 0, d), all16(factor)), shift))
        for d in range(whole, dim):
            levels_ND[n, d] = np.uint8((bits_of(rotated[0, d] * factor + ROUND) + np.uint32(128)) & np.uint32(255))
