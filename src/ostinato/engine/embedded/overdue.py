"""Which samples have passed their deadlines. Every operation costs amortised O(log n) per sample that it handles. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)
_SLACK = 64  # the heap may hold this many entries beyond twice the number of open samples before ended ones are removed


class Deadlines(Generic[S]):
    """Samples by deadline, in seconds of any single clock. A sample that ended by itself may leave only a pair of numbers behind.

    Example::

        deadlines.put(sample, 12.5)
        deadlines.passed(12.5)  # [sample]
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # deadline, number
        self._samples: dict[int, S] = {}
        self._numbers: dict[S, int] = {}
        self._put = 0

    def put(self, sample: S, at: float) -> None:
        """Set a sample's deadline."""
        self._put += 1
        self._samples[self._put], self._numbers[sample] = sample, self._put
        heappush(self._heap, (at, self._put))

    def discard(self, sample: S) -> None:
        """Drop a sample that has ended. A sample without a deadline is ignored."""
        number = self._numbers.pop(sample, None)
        if number is None:
            return
        del self._samples[number]
        if len(self._heap) > 2 * len(self._samples) + _SLACK:
            self._heap = [place for place in self._heap if place[1] in self._samples]
            heapify(self._heap)

    def passed(self, now: float) -> list[S]:
        """Remove and return the samples whose deadline has passed, the earliest first."""
        found: list[S] = []
        while self._heap and self._heap[0][0] <= now:
            _, number = heappop(self._heap)
            if number in self._samples:
                sample = self._samples.pop(number)
                del self._numbers[sample]
                found.append(sample)
        return found
