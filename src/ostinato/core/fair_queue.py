"""A queue whose owners take turns. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class InTurn(Generic[K, T]):
    """What waits, by owner. The owner that has waited longest for a turn is next, and each owner's items keep their order.

    Example: ``queue.put("acme", work); queue.next()`` returns `work`, and then None.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[K, deque[T]] = OrderedDict()

    def put(self, owner: K, item: T) -> None:
        """Queue an item behind its owner's other items."""
        self._waiting.setdefault(owner, deque()).append(item)

    def count(self, owner: K) -> int:
        """The number of the owner's items that wait."""
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
        """Remove an item if it waits. Costs O(the owner's items)."""
        queue = self._waiting.get(owner)
        if queue is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._waiting[owner]
