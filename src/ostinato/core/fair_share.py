"""Rate limits and fair queues: a token bucket, and a queue whose owners take turns. Pure.

A bucket limits how much may be used per second, and in a burst after a pause. It computes from times that the caller passes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar


class Bucket:
    """A token bucket that fills at `rate` per second up to `size`.

    Example: ``Bucket(rate=2.0, size=10.0, now=0.0).take(1.0, now=0.0) == 0.0``
    """

    __slots__ = ("_at", "_level", "_rate", "_size")

    def __init__(self, *, rate: float, size: float, now: float) -> None:
        self._rate, self._size = rate, size
        self._level, self._at = size, now

    def take(self, amount: float, now: float) -> float:
        """Take `amount` and return 0, or take nothing and return the seconds until it can be taken.

        More than `size` can be taken when the bucket is full; the bucket then goes into debt and refills from there.
        """
        wait_s = self.wait(amount, now)
        if not wait_s:
            self._level -= amount
        return wait_s

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` can be taken."""
        self._level = min(self._size, self._level + self._rate * max(0.0, now - self._at))
        self._at = now
        return max(0.0, min(amount, self._size) - self._level) / self._rate

    def give_back(self, amount: float) -> None:
        """Put back an unused amount."""
        self._level = min(self._size, self._level + amount)


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class InTurn(Generic[K, T]):
    """A round-robin queue by owner: the owner that has waited longest for a turn is next, and each owner's items keep their order.

    Example: ``queue.put("acme", work); queue.next()`` returns `work`, and then None.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[K, deque[T]] = OrderedDict()

    def put(self, owner: K, item: T) -> None:
        """Queue an item behind its owner's other items."""
        self._waiting.setdefault(owner, deque()).append(item)

    def count(self, owner: K) -> int:
        """Return the number of the owner's waiting items."""
        return len(self._waiting.get(owner, ()))

    def next(self) -> T | None:
        """Remove and return the next item; None if none waits."""
        if not self._waiting:
            return None
        owner, queue = self._waiting.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._waiting[owner] = queue  # behind the others
        return item

    def discard(self, owner: K, item: T) -> None:
        """Remove an item if it waits. Takes time linear in the owner's items."""
        queue = self._waiting.get(owner)
        if queue is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._waiting[owner]
