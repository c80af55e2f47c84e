# pyright: basic, reportCallIssue=false
"""Gradients of a transformer's operations between its matrix products, each in one pass over memory instead of five to ten.

Arithmetic is fp32, results are rounded once. Rows are independent except for `rms_norm_gradient`'s weight.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import exp, load, store
from ostinato.model.kernels.vector import (
    WIDE,
    all16,
    div16,
    exp16,
    fma16,
    load16,
    mul16,
    store16,
    sub16,
    sum16,
)


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm_gradient(x_ND, weight_1D, scales_N, grad_ND, out_ND, weight_total_1D):
    """The gradient of x for y = w x r with r = 1 / sqrt(mean(x^2) + eps) = scales_N: r (g w - y' mean(g w y')), y' = x r.

    Adds the weight's gradient g y' to `weight_total_1D`, row by row. D is a multiple of 16.
    """
    rows, dim = x_ND.shape
    for n in range(rows):
        r = all16(scales_N[n])
        inner = all16(np.float32(0.0))
        for d in range(0, dim, WIDE):
            y, g = mul16(load16(x_ND, n, d), r), load16(grad_ND, n, d)
            inner = fma16(mul16(g, load16(weight_1D, 0, d)), y, inner)
            store16(weight_total_1D, 0, d, fma16(g, y, load16(weight_total_1D, 0, d)))
        mean = all16(sum16(inner) / np.float32(dim))
        for d in range(0, dim, WIDE):
            y, g = mul16(load16(x_ND, n, d), r), load16(grad_ND, n, d)
            inward = sub16(mul16(g, load16(weight_1D, 0, d)), mul16(y, mean))
            store16(out_ND, n, d, mul16(inward, r))


@njit(nogil=True, cache=True, error_model="numpy")
def logprob_gradient(logits_MV, temperatures_M, log_totals_M, targets_M, grads_M):
    """Overwrite logits with the gradient of sum(grads log p(targets)) with p = softmax(logits / temperature): g (1[target] - p) / t."""
    vocab = logits_MV.shape[1]
    whole = vocab // WIDE * WIDE
    for m in range(logits_MV.shape[0]):
        t, total, g = temperatures_M[m], log_totals_M[m], grads_M[m] / temperatures_M[m]
        target = targets_M[m]
        hit = g - g * exp(load(logits_MV[m, target]) / t - total)
        for i in range(0, whole, WIDE):
            p = exp16(sub16(div16(load16(logits_MV, m, i), all16(t)), all16(total)))
            store16(logits_MV, m, i, mul16(all16(-g), p))
        for i in range(whole, vocab):
            logits_MV[m, i] = store(logits_MV[0, 0], -g * exp(load(logits_MV[m, i]) / t - total))
        logits_MV[m, target] = store(logits_MV[0, 0], hit)
