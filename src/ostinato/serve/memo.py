"""Results that are worth keeping for the next request: the most recently used ones, bounded by what they cost."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Memo(Generic[_K, _V]):
    """Keeps values by key, and forgets the least recently used ones. Thread-safe.

    Args:
        budget: the most that all values may cost together; 0 keeps nothing.

    Example: ``memo = Memo[str, int](10); memo.put("a", 1, cost=4); memo.get("a") == 1``
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[_K, tuple[_V, int]] = OrderedDict()

    def get(self, key: _K) -> _V | None:
        """The value, or None if it is not kept."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: _K, value: _V, *, cost: int) -> None:
        """Keep a value, unless it costs more than all may."""
        with self._lock:
            _, freed = self._kept.pop(key, (None, 0))
            self._held -= freed
            if cost > self._budget:
                return
            self._kept[key] = (value, cost)
            self._held += cost
            while self._held > self._budget:
                _, (_, gone) = self._kept.popitem(last=False)
                self._held -= gone
