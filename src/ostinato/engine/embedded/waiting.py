"""Who starts next: askers take turns, and each asker's samples keep their order. Whatever it is asked costs as much as there are askers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


class WaitingSamples(Generic[S]):
    """Samples that could start, by asker.

    The next one is of the asker with the fewest samples running; among equals, of who has waited longest for a turn.

    Example::

        waiting.put("ann", sample)
        waiting.next()  # the sample, still in the queue
        waiting.start("ann", sample)
        waiting.end("ann")
    """

    def __init__(self) -> None:
        self._queues: dict[str, OrderedDict[S, None]] = {}  # by asker, those that waited longest for a turn first
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[S]:
        return chain.from_iterable(self._queues.values())

    def put(self, asker: str, sample: S, *, first: bool = False) -> None:
        """Queue a sample behind its asker's others, or before them."""
        queue = self._queues.setdefault(asker, OrderedDict())
        queue[sample] = None
        if first:
            queue.move_to_end(sample, last=False)

    @property
    def newcomer(self) -> bool:
        """True if an asker waits of whom nothing runs. Costs as much as there are askers of whom something runs."""
        return not self._queues.keys() <= self._running.keys()

    @property
    def most(self) -> int:
        """The samples running of the asker that has most of them running."""
        return max(self._running.values(), default=0)

    def running(self, asker: str) -> int:
        """The asker's samples that run."""
        return self._running[asker]

    def next(self) -> S | None:
        """Who starts next; None if nobody waits."""
        if not self._queues:
            return None
        asker = min(self._queues, key=self._running.__getitem__)  # the first of equals
        return next(iter(self._queues[asker]))

    def start(self, asker: str, sample: S) -> None:
        """A sample runs now, whether it waited here or not."""
        self.discard(asker, sample)
        self._running[asker] += 1
        if queue := self._queues.pop(asker, None):
            self._queues[asker] = queue  # had its turn: last among equals

    def end(self, asker: str) -> None:
        """One of the asker's samples runs no more."""
        self._running[asker] -= 1
        if not self._running[asker]:
            del self._running[asker]

    def discard(self, asker: str, sample: S) -> None:
        """Take a sample out, if it waits."""
        queue = self._queues.get(asker)
        if queue is not None:
            queue.pop(sample, None)
            if not queue:
                del self._queues[asker]
