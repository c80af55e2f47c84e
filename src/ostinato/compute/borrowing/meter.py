"""Request rates from a count that only grows: the current rate, and the highest recent one. Pure."""

from __future__ import annotations

from collections import deque


class Meter:
    """Measures rates over `over_s` seconds, and their maximum over the last `window_s`.

    Example::

        meter = Meter(window_s=1800.0)
        rate, highest = meter.note(now=0.0, count=0)
    """

    def __init__(self, window_s: float, over_s: float = 10.0) -> None:
        self._window_s, self._over_s = window_s, over_s
        self._counts: deque[tuple[float, int]] = deque()
        self._rates: deque[tuple[float, float]] = deque()  # falling: the first is the highest

    def note(self, now: float, count: int) -> tuple[float, float]:
        """(current rate, highest recent rate) in requests a second, after `count` requests in total. `now` must not decrease."""
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
