"""Which sample starts next: askers take turns, and each asker's samples keep their order. Operations cost at most O(number of askers)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


class WaitingSamples(Generic[S]):
    """Samples that could start, by asker.

    The next sample belongs to the asker with the fewest samples running; among equals, to the one that has waited longest for a turn.

    Example::

        waiting.put("ann", sample)
        waiting.next()  # the sample, still in the queue
        waiting.start("ann", sample)
        waiting.end("ann")
    """

    def __init__(self) -> None:
        # by asker; those that have waited longest for a turn come first
        self._queues: dict[str, OrderedDict[S, None]] = {}
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[S]:
        return chain.from_iterable(self._queues.values())

    def put(self, asker: str, sample: S, *, first: bool = False) -> None:
        """Queue a sample behind its asker's other samples, or before them if `first`."""
        queue = self._queues.setdefault(asker, OrderedDict())
        queue[sample] = None
        if first:
            queue.move_to_end(sample, last=False)

    @property
    def newcomer(self) -> bool:
        """True if an asker with no running samples is waiting. Costs O(number of askers with running samples)."""
        return not self._queues.keys() <= self._running.keys()

    @property
    def most(self) -> int:
        """The number of running samples of the asker with most of them."""
        return max(self._running.values(), default=0)

    def running(self, asker: str) -> int:
        """The number of the asker's running samples."""
        return self._running[asker]

    def next(self) -> S | None:
        """The sample that starts next; None if none waits."""
        if not self._queues:
            return None
        asker = min(self._queues, key=self._running.__getitem__)  # the first of equals
        return next(iter(self._queues[asker]))

    def start(self, asker: str, sample: S) -> None:
        """Count a sample as running, whether or not it waited here."""
        self.discard(asker, sample)
        self._running[asker] += 1
        if queue := self._queues.pop(asker, None):
            self._queues[asker] = queue  # it had its turn, so it comes last among equals

    def end(self, asker: str) -> None:
        """One of the asker's samples has stopped running."""
        self._running[asker] -= 1
        if not self._running[asker]:
            del self._running[asker]

    def discard(self, asker: str, sample: S) -> None:
        """Remove a sample if it waits here."""
        queue = self._queues.get(asker)
        if queue is not None:
            queue.pop(sample, None)
            if not queue:
                del self._queues[asker]
