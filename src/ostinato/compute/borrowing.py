"""Autoscaling between serving and rollouts: when to lend serving replicas to rollouts, and when to take them back. Users come first."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRules:
    """The thresholds for lending. A load is a share of the serving replicas' capacity; a delay is a request's queueing time in seconds.

    Lend: at most `most` replicas per decision, while the highest request rate in the last `window_s` loads the remaining ones to at most
    `lend_below`, but not within `hold_s` after a return, which limits how often rollouts are interrupted. Return: enough replicas that the
    current rate loads the serving ones to at most `return_above`; all of them once a request waits longer than `guard_s` or no replica
    serves.

    Example: ``GuardRules(guard_s=0.2)``
    """

    lend_below: float = 0.6
    return_above: float = 0.75
    guard_s: float = 0.5
    window_s: float = 1800.0
    hold_s: float = 900.0
    most: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The measured state of the fleet.

    `serving`, `returning`, `lent`: numbers of replicas. `rate`, `highest`: requests per second now, and the recent maximum. `delay_s`: the
    queueing delay. `carries`: the requests per second that one replica can handle. `since_s`: seconds since the last return.

    Example: ``FleetView(serving=20, returning=0, lent=0, rate=30, highest=35, delay_s=0, carries=5, since_s=1e9)``
    """

    serving: int
    returning: int
    lent: int
    rate: float
    highest: float
    delay_s: float
    carries: float
    since_s: float


def lending(rules: GuardRules, seen: FleetView, wanted: int) -> int:
    """Return how many replicas to lend now (negative: to return). `wanted`: the total number that sampling can use.

    Example: with the view above ``lending(GuardRules(), seen, wanted=12) == 2``
    """
    if seen.delay_s > rules.guard_s or not seen.serving:
        return -seen.lent
    short = math.ceil(seen.rate / (seen.carries * rules.return_above)) - seen.serving - seen.returning
    back = max(short, seen.lent - wanted)
    if back > 0:
        return -min(seen.lent, back)
    if seen.since_s < rules.hold_s:
        return 0
    spare = seen.serving - math.ceil(seen.highest / (seen.carries * rules.lend_below))
    return max(0, min(rules.most, spare, wanted - seen.lent))


# ---------------------------------------------------------------- request rates


class Meter:
    """Measures the request rate over the last `over_s` seconds, and its maximum over the last `window_s`.

    Example::

        meter = Meter(window_s=1800.0)
        rate, highest = meter.note(now=0.0, count=0)
    """

    def __init__(self, window_s: float, over_s: float = 10.0) -> None:
        self._window_s, self._over_s = window_s, over_s
        self._counts: deque[tuple[float, int]] = deque()
        self._rates: deque[tuple[float, float]] = deque()  # a monotonic queue, decreasing: the first is the maximum

    def note(self, now: float, count: int) -> tuple[float, float]:
        """Return (current rate, maximum recent rate) in requests per second. `count`: all requests so far. `now` must not decrease."""
        while len(self._counts) > 1 and self._counts[1][0] <= now - self._over_s:
            self._counts.popleft()
        self._counts.append((now, count))
        began, before = self._counts[0]
        rate = (count - before) / max(now - began, 1.0)
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now, rate))
        while self._rates[0][0] < now - self._window_s:
            self._rates.popleft()
        return rate, self._rates[0][1]
