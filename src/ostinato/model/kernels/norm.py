# pyright: basic, reportCallIssue=false
"""Root-mean-square normalisation in one pass over a row instead of seven.

Per row, in fp32: the squares are summed in 16 lanes (lane = d mod 16, ascending, fused multiply-adds; folded 8, 4, 2, 1);
r = 1 / sqrt(sum / D + eps); y_d = x_d r is rounded to the dtype, multiplied by the weight in fp32 and rounded again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ostinato.model.kernels.arithmetic import fma, load, store

LANES = 16


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm(x_ND, weight_D, eps, out_ND, scales_N):
    """Fill out_ND, and scales_N with each row's r. D is a multiple of 16."""
    rows, dim = x_ND.shape
    lanes = np.empty(LANES, np.float32)
    for n in range(rows):
        for k in range(LANES):
            lanes[k] = np.float32(0.0)
        for d in range(0, dim, LANES):
            for k in range(LANES):
                x = load(x_ND[n, d + k])
                lanes[k] = fma(x, x, lanes[k])
        fold = LANES // 2
        while fold:
            for k in range(fold):
                lanes[k] += lanes[k + fold]
            fold //= 2
        r = np.float32(1.0) / np.sqrt(lanes[0] / np.float32(dim) + eps)
        scales_N[n] = r
        for d in range(dim):
            y = load(store(out_ND[0, 0], load(x_ND[n, d]) * r))
            out_ND[n, d] = store(out_ND[0, 0], load(weight_D[d]) * y)
