# pyright: basic, reportCallIssue=false
"""What the library's own modules compute element by element or along a row, in a stated order, so that every CPU gives the same bits.

A number's cosine, sine and sigmoid depend on that number alone. A row's softmax: m = max x; e_i = exp(x_i - m); their sum in fp32,
ascending; e_i / sum.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import cos_and_sin, exp, exp64, load, log64, store

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
