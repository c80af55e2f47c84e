"""The learning-rate schedule of continued pre-training. Pure."""

from __future__ import annotations

import math


def learning_rate_at(step: int, *, steps: int, peak: float, warmup: int, floor: float) -> float:
    """Linear from 0 to `peak` over `warmup` steps, then half a cosine down to `floor` times the peak at the last step.

    `step` counts from 0. Source: Loshchilov and Hutter 2017 (1608.03983), without restarts.
    Example: ``learning_rate_at(0, steps=100, peak=1e-4, warmup=10, floor=0.1)`` is 1e-5, and that of step 99 is 1e-5 again.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
