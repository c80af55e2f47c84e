"""Evidence that one version is better or worse than another, valid at any moment and however often it was looked at before.

The evidence is an e-process: under "no difference" its mean never exceeds 1, so the probability that it *ever* reaches 1/alpha is at most
alpha (Ville's inequality). It mixes half-normal priors of several scales, and treats the estimate as normal with a known variance. That
holds asymptotically, so the callers require a number of effective users first (Waudby-Smith et al., arXiv 2103.06476).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

Side = Literal[-1, 1]
"""-1: evidence that the difference is below 0; +1: that it is above."""

SCALES = (0.01, 0.03, 0.10)
"""Standard deviations of the mixed priors: differences of about one, three and ten points are detected soonest."""

_NEWTON_STEPS = 60
_PRECISE = 1e-13


def log_evidence(difference: float, variance: float, side: Side) -> float:
    """The logarithm of the e-value of an estimate with this variance; 0 says nothing, log 20 refutes "no difference" at 0.05.

    For one scale tau it is ``2 (1 + tau^2 / V)^-1/2 exp(D^2 tau^2 / (2 V (V + tau^2))) Phi(side D tau / sqrt(V (V + tau^2)))``: the
    likelihood ratio of N(theta, V) to N(0, V), averaged over theta of a half-normal with that tau. The mean over `SCALES` is taken.

    Example: ``log_evidence(-0.05, 0.0001, -1)`` is 9.9: five points at a standard error of one.
    """
    if variance <= 0.0 or not math.isfinite(variance):
        return 0.0
    logs = [_one_scale(difference, variance, scale, side) for scale in SCALES]
    top = max(logs)
    return top + math.log(sum(math.exp(each - top) for each in logs) / len(logs))


def lower_bound(difference: float, variance: float, alpha: float) -> float:
    """The lower end of the one-sided confidence sequence: it is above the truth at *any* look with probability at most `alpha`."""
    return difference - _reach(variance, alpha)


def upper_bound(difference: float, variance: float, alpha: float) -> float:
    """The upper end of the one-sided confidence sequence, likewise."""
    return difference + _reach(variance, alpha)


@lru_cache(maxsize=64)
def _reach(variance: float, alpha: float) -> float:
    """The difference at which the evidence is exactly 1/alpha.

    Newton's method: the logarithm of the evidence rises with the difference and is convex (its second derivative is that of
    z^2 / 2 + log Phi(z), which is positive, and the logarithm of a sum of exponentials of convex functions is convex), so that from the
    second step on it comes down to the root from above.
    """
    if variance <= 0.0 or not math.isfinite(variance):
        return math.inf
    wanted = -math.log(alpha)
    reach = math.sqrt(2.0 * variance * (wanted + 1.0))
    for _ in range(_NEWTON_STEPS):
        value, slope = _evidence_and_slope(reach, variance)
        step = (value - wanted) / slope
        reach -= step
        if abs(step) <= _PRECISE * reach:
            break
    return reach


def _evidence_and_slope(difference: float, variance: float) -> tuple[float, float]:
    """The logarithm of the evidence for a rise, and its derivative by the difference."""
    logs = [_one_scale(difference, variance, scale, 1) for scale in SCALES]
    top = max(logs)
    weights = [math.exp(each - top) for each in logs]
    slope = 0.0
    for scale, weight in zip(SCALES, weights, strict=True):
        steepness = math.sqrt(scale**2 / (scale**2 + variance) / variance)
        z = difference * steepness
        hazard = math.exp(-0.5 * z * z - _log_normal_cdf(z)) / math.sqrt(2.0 * math.pi)
        slope += weight * steepness * (z + hazard)
    total = sum(weights)
    return top + math.log(total / len(logs)), slope / total


def _one_scale(difference: float, variance: float, scale: float, side: Side) -> float:
    shrink = scale**2 / (scale**2 + variance)
    return (
        math.log(2.0)
        - 0.5 * math.log1p(scale**2 / variance)
        + 0.5 * shrink * difference**2 / variance
        + _log_normal_cdf(side * difference * math.sqrt(shrink / variance))
    )


def _log_normal_cdf(z: float) -> float:
    """Log Phi(z); for very negative z, where erfc underflows, the first terms of its asymptotic series."""
    if z > -30.0:
        return math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
    return -0.5 * z * z - math.log(-z * math.sqrt(2.0 * math.pi)) + math.log1p(-1.0 / (z * z))
