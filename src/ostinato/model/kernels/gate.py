# pyright: basic, reportCallIssue=false
"""The gated activation of a feed-forward layer, silu(gate) * up, in one pass instead of two, and its gradients.

Per number, in fp32: e = exp(-|g|); silu(g) = g n / (1 + e) with n = e where g < 0, else 1 (Elfwing et al. 2018, 1702.03118); it is
rounded to the dtype, multiplied by u in fp32 and rounded again. A number's bits depend on that number alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import exp, inlined, load, store
from ostinato.model.kernels.vector import (
    WIDE,
    add16,
    all16,
    away16,
    div16,
    exp16,
    load16,
    mul16,
    pick16,
    round16,
    store16,
    sub16,
)

_ONE = np.float32(1.0)


@inlined
def sigmoid16(g):
    """1 / (1 + exp(-g)) as numerator and denominator."""
    e = exp16(away16(g))
    return pick16(g, e, all16(_ONE)), add16(all16(_ONE), e)


@inlined
def _sigmoid(g):
    """The same for one number."""
    e = exp(-abs(g))
    return (e if g < np.float32(0.0) else _ONE), _ONE + e


@njit(nogil=True, cache=True, error_model="numpy")
def silu_mul(gate_NF, up_NF, out_NF):
    """Fill out_NF. Each row is contiguous; the array need not be."""
    rows, width = gate_NF.shape
    whole = width // WIDE * WIDE
    for n in range(rows):
        for f in range(0, whole, WIDE):
            g = load16(gate_NF, n, f)
            numerator, denominator = sigmoid16(g)
            y = round16(out_NF, div16(mul16(g, numerator), denominator))
            store16(out_NF, n, f, mul16(y, load16(up_NF, n, f)))
        for f in range(whole, width):
            g = load(gate_NF[n, f])
            numerator, denominator = _sigmoid(g)
            y = load(store(out_NF[n, f], g * numerator / denominator))
            out_NF[n, f] = store(out_NF[n, f], y * load(up_NF[n, f]))


@njit(nogil=True, cache=True, error_model="numpy")
def silu_mul_gradients(gate_NF, up_NF, grad_NF, out_NF, d_gate_NF, d_up_NF):
    """Fill out_NF again, bit for bit, and d_gate_NF and d_up_NF from its gradient: with s = 1 / (1 + exp(-g)), dy / dg = s + y (1 - s).

    They are written in this order after all inputs are read: each may be grad_NF, and out_NF may be a gradient's array if it is not needed.
    """
    rows, width = gate_NF.shape
    whole = width // WIDE * WIDE
    one = all16(_ONE)
    for n in range(rows):
        for f in range(0, whole, WIDE):
            g, u, d = load16(gate_NF, n, f), load16(up_NF, n, f), load16(grad_NF, n, f)
            numerator, denominator = sigmoid16(g)
            s = div16(numerator, denominator)
            y = div16(mul16(g, numerator), denominator)
            rounded = round16(out_NF, y)
            store16(out_NF, n, f, mul16(rounded, u))
            store16(d_gate_NF, n, f, mul16(mul16(d, u), add16(s, mul16(y, sub16(one, s)))))
            store16(d_up_NF, n, f, mul16(d, rounded))
        for f in range(whole, width):
            g, u, d = load(gate_NF[n, f]), load(up_NF[n, f]), load(grad_NF[n, f])
            numerator, denominator = _sigmoid(g)
            s = numerator / denominator
            y = g * numerator / denominator
            rounded = load(store(out_NF[n, f], y))
            out_NF[n, f] = store(out_NF[n, f], rounded * u)
            d_gate_NF[n, f] = store(d_gate_NF[n, f], d * u * (s + y * (_ONE - s)))
            d_up_NF[n, f] = store(d_up_NF[n, f], d * rounded)
