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
MEDIAN_S, SIGMA, LONGEST_S = 1.125, 0.8, 11.25
SCALE = 400
"""Real seconds per second here. The median stands for 7.5 real minutes, the longest duration for 75."""


def prompt(number: int) -> str:
    """The prompt of task `number`."""
    return f"say {number % 7}"


def duration(name: str) -> float:
    """Seconds that the rollout of this name continues after its answer: log-normal, capped, and a function of the name."""
    bits = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
    normal = statistics.NormalDist().inv_cdf((bits + 0.5) / 2**64)
    return min(LONGEST_S, MEDIAN_S * math.exp(SIGMA * normal))


def slowest(count: int, draws: int = 2000) -> float:
    """The mean of the longest of `count` rollouts, in seconds."""
    return statistics.fmean(max(duration(f"{draw}.{n}") for n in range(count)) for draw in range(draws))
