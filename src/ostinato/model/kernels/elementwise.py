# pyright: basic, reportCallIssue=false
"""Elementwise functions, softmax and gated activations in a defined order, so that every CPU gives the same bits.

A number's cosine, sine and sigmoid depend on that number alone. A row's softmax: m = max x; e_i = exp(x_i - m); their sum in fp32,
ascending; e_i / sum.

Gated linear units: SiLU(gate) * up or GELU(gate) * up, in one pass instead of two, and their gradients. Per number, in fp32: t = g for
SiLU (Elfwing et al. 2018, 1702.03118); t = 2 c (g + 0.044715 g^3) with c = sqrt(2 / pi) for GELU in its tanh approximation (Hendrycks and
Gimpel 2016, 1606.08415). Because (1 + tanh(x)) / 2 = 1 / (1 + exp(-2 x)), both are g / (1 + exp(-t)). This is computed as e = exp(-|t|);
g n / (1 + e) with n = e where t < 0, else 1; rounded to the dtype, multiplied by u in fp32 and rounded again. GELU's t is
g (2 c + (2 c 0.044715) (g g)) with one fused multiply-add.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import cos_and_sin, exp, exp64, fma, inlined, load, log64, store
from ostinato.model.kernels.vector import (
    WIDE,
    add16,
    all16,
    away16,
    div16,
    exp16,
    fma16,
    load16,
    mul16,
    pick16,
    round16,
    store16,
    sub16,
)

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
    """Fill out_N with powers of a positive base by fp32 exponents, computed in fp64 and rounded once."""
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


# ---------------------------------------------------------------- gated linear units


_CUBIC = 0.044715
_LINE = np.float32(2 * math.sqrt(2 / math.pi))
_CUBE = np.float32(2 * math.sqrt(2 / math.pi) * _CUBIC)
_CUBE_SLOPE = np.float32(3 * 2 * math.sqrt(2 / math.pi) * _CUBIC)


@inlined
def _sigmoid16(g, gelu) -> tuple[Any, Any]:
    """Return 1 / (1 + exp(-t)) as numerator and denominator."""
    t = g
    if gelu:
        t = mul16(g, fma16(mul16(g, g), all16(_CUBE), all16(_LINE)))
    e = exp16(away16(t))
    return pick16(t, e, all16(_ONE)), add16(all16(_ONE), e)


@inlined
def _sigmoid(g, gelu):
    """Return 1 / (1 + exp(-t)) of one number as numerator and denominator."""
    t = g * fma(g * g, _CUBE, _LINE) if gelu else g
    e = exp(-abs(t))
    return (e if t < np.float32(0.0) else _ONE), _ONE + e


@inlined
def activation16(g, gelu):
    """Return GELU(g) if `gelu`, else SiLU(g), in fp32."""
    numerator, denominator = _sigmoid16(g, gelu)
    return div16(mul16(g, numerator), denominator)


@njit(nogil=True, cache=True, error_model="numpy")
def activation_mul(gate_NF, up_NF, gelu, out_NF):
    """Fill out_NF with activation(gate) * up. Each row is contiguous; the array need not be."""
    rows, width = gate_NF.shape
    whole = width // WIDE * WIDE
    for n in range(rows):
        for f in range(0, whole, WIDE):
            y = round16(out_NF, activation16(load16(gate_NF, n, f), gelu))
            store16(out_NF, n, f, mul16(y, load16(up_NF, n, f)))
        for f in range(whole, width):
            g = load(gate_NF[n, f])
            numerator, denominator = _sigmoid(g, gelu)
            y = load(store(out_NF[n, f], g * numerator / denominator))
            out_NF[n, f] = store(out_NF[n, f], y * load(up_NF[n, f]))


@njit(nogil=True, cache=True, error_model="numpy")
def activation_mul_gradients(gate_NF, up_NF, grad_NF, gelu, out_NF, d_gate_NF, d_up_NF):
    """Recompute out_NF, bit for bit, and fill d_gate_NF and d_up_NF from its gradient.

    With s = 1 / (1 + exp(-t)) and y = g s, dy / dg = s + y (1 - s) dt / dg. The outputs of a number are written in this order, after its
    inputs are read: so each array may be grad_NF, and out_NF may be the array of a gradient if it is not needed.
    """
    rows, width = gate_NF.shape
    whole = width // WIDE * WIDE
    one = all16(_ONE)
    for n in range(rows):
        for f in range(0, whole, WIDE):
            g, u, d = load16(gate_NF, n, f), load16(up_NF, n, f), load16(grad_NF, n, f)
            numerator, denominator = _sigmoid16(g, gelu)
            s = div16(numerator, denominator)
            y = div16(mul16(g, numerator), denominator)
            rounded = round16(out_NF, y)
            more = mul16(y, sub16(one, s))
            if gelu:
                more = mul16(more, fma16(mul16(g, g), all16(_CUBE_SLOPE), all16(_LINE)))
            store16(out_NF, n, f, mul16(rounded, u))
            store16(d_gate_NF, n, f, mul16(mul16(d, u), add16(s, more)))
            store16(d_up_NF, n, f, mul16(d, rounded))
        for f in range(whole, width):
            g, u, d = load(gate_NF[n, f]), load(up_NF[n, f]), load(grad_NF[n, f])
            numerator, denominator = _sigmoid(g, gelu)
            s = numerator / denominator
            y = g * numerator / denominator
            rounded = load(store(out_NF[n, f], y))
            more = y * (_ONE - s)
            if gelu:
                more *= fma(g * g, _CUBE_SLOPE, _LINE)
            out_NF[n, f] = store(out_NF[n, f], rounded * u)
            d_gate_NF[n, f] = store(d_gate_NF[n, f], d * u * (s + more))
            d_up_NF[n, f] = store(d_up_NF[n, f], d * rounded)
