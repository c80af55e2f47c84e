"""When the serving fleet lends a replica and when it wants it back. Users come first. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRules:
    """Loads are shares of what the replicas that serve can carry; delays are a request's seconds in the queue.

    Lent is while the highest rate of the last `window_s` loads the rest to at most `lend_below`, `most` at once, and not for `hold_s`
    after something was given back, which bounds how often rollouts are cut off. Given back is as many as bring the load of the present
    rate to `return_above`, and everything once a request waits longer than `guard_s` or nobody serves.

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
    """What the guard sees: replicas that serve, that are on their way back and that are lent; requests a second now and at most lately;
    the queue's delay; what a replica carries, requests a second; seconds since something was given back.

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
    """How many replicas to lend now, negative: to give back. `wanted` is the most that sampling has a use for in all.

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
