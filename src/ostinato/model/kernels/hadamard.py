# pyright: basic, reportCallIssue=false
"""Rotation of rows by a Hadamard matrix, so that no channel is much larger than the others when a row gets one scale.

A row times H, and a weight's rows times H: since H Hᵀ = b I, the products are b times those without it (QuaRot, arXiv 2404.00456).
H is block diagonal, with Sylvester's matrix of b entries of +1 and -1 in each block; b is the largest power of two that divides the width.
"""

from __future__ import annotations

from numba import njit

from ostinato.model.kernels.arithmetic import load
from ostinato.model.kernels.vector import WIDE, add16, hadamard16, load16, store16, sub16


@njit(nogil=True, cache=True)
def block(width):
    """The number b of entries in a block; 1, which rotates nothing, for a width that is no multiple of 16."""
    return width & -width if width % WIDE == 0 else 1


@njit(nogil=True, cache=True, error_model="numpy")
def rotate_row(x_ND, n, y_1D):
    """y_1D[0] = x_ND[n] H; x is float32, or bf16 held as uint16, y is float32."""
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
    """y_ND = x_ND H."""
    for n in range(len(x_ND)):
        rotate_row(x_ND, n, y_ND[n : n + 1])
