"""The world of `lag.py`: a good answer begins with a lower-case letter, and each rollout continues for a heavy-tailed time after it.

Standard library only, because TRL's side runs it in its own environment.
"""

from __future__ import annotations

import hashlib
import math
import statistics

LIKED = "^[a-z]"
TASKS = 40
TOKENS = 64
GROUP, GROUPS = 32, 4
MEDIAN_S, SIGMA, LONGEST_S = 450.0, 0.8, 4500.0
"""Real seconds."""
SCALE = 400
"""Real seconds per second here, unless another scale is asked for."""


def prompt(number: int) -> str:
    """The prompt of task `number`."""
    return f"say {number % 7}"


def duration(name: str, scale: float = SCALE) -> float:
    """Seconds that the rollout of this name continues after its answer: log-normal, capped, and a function of the name."""
    bits = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
    normal = statistics.NormalDist().inv_cdf((bits + 0.5) / 2**64)
    return min(LONGEST_S, MEDIAN_S * math.exp(SIGMA * normal)) / scale


def slowest(count: int, scale: float, draws: int = 2000) -> float:
    """The mean of the longest of `count` rollouts, in seconds."""
    return statistics.fmean(max(duration(f"{draw}.{n}", scale) for n in range(count)) for draw in range(draws))
