"""The world of `lag.py`: prompts that are answered well with a lower-case letter, by rollouts that then go on for a heavy-tailed while.

Standard library only: TRL's side runs it in its own environment.
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
"""Seconds of the real thing in one of ours: the median is 7.5 minutes of it, the longest 75."""


def prompt(number: int) -> str:
    """What task `number` asks."""
    return f"say {number % 7}"


def duration(name: str) -> float:
    """How many seconds a rollout of this name goes on after its answer: log-normal, cut at the longest; the same for the same name."""
    bits = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
    normal = statistics.NormalDist().inv_cdf((bits + 0.5) / 2**64)
    return min(LONGEST_S, MEDIAN_S * math.exp(SIGMA * normal))


def slowest(count: int, draws: int = 2000) -> float:
    """The mean of the longest of `count` rollouts, in seconds."""
    return statistics.fmean(max(duration(f"{draw}.{n}") for n in range(count)) for draw in range(draws))
