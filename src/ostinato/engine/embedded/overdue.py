"""Which samples' time is over. Whatever it is asked costs as much as what it finds, and a logarithm of how many there are. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)
_SLACK = 64  # places of samples that have ended, which may be kept beside as many of others


class Deadlines(Generic[S]):
    """Samples by when they must have ended, in seconds of any one clock. Of one that ended by itself only a pair of numbers may stay.

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
        """A sample must have ended by then."""
        self._put += 1
        self._samples[self._put], self._numbers[sample] = sample, self._put
        heappush(self._heap, (at, self._put))

    def discard(self, sample: S) -> None:
        """It has ended. A sample that has no deadline is none of ours."""
        number = self._numbers.pop(sample, None)
        if number is None:
            return
        del self._samples[number]
        if len(self._heap) > 2 * len(self._samples) + _SLACK:
            self._heap = [place for place in self._heap if place[1] in self._samples]
            heapify(self._heap)

    def passed(self, now: float) -> list[S]:
        """Those whose time is over, the earliest first; they are forgotten here."""
        found: list[S] = []
        while self._heap and self._heap[0][0] <= now:
            _, number = heappop(self._heap)
            if number in self._samples:
                sample = self._samples.pop(number)
                del self._numbers[sample]
                found.append(sample)
        return found
