"""Parses a conversation's items (messages, calls, results) through a cache: agents send the whole history with every request."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from sys import getsizeof
from typing import Any, Generic, Self, TypeVar

import msgspec
from pydantic import PrivateAttr

from ostinato.core.conversation import Message, Role
from ostinato.serve.dialects.dialect import Omissions
from ostinato.serve.dialects.extensions import Extensions

ItemReader = Callable[[Any, str, Omissions], Iterable[Message]]
"""Parses an item of JSON: `(item, where, omissions) -> its messages`. Raises BadRequest naming the field, which begins with `where`. The
result must not depend on `where`.
"""
FoundItem = tuple[tuple[Message, ...], tuple[str, ...]]
"""An item's messages, and the words for what is omitted from them."""
_ENTRY, _MESSAGE, _CALL = 600, 300, 200  # memory cost of each besides its texts, in bytes
_ENCODER = msgspec.json.Encoder()
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class ItemCache:
    """A cache of the parsed items of one tenant's requests. Thread-safe.

    Args:
        budget: approximate limit in bytes; 0 caches nothing.

    Example: ``items.read(read_message, {"role": "user", "content": "hi"}, "messages[0]", omissions)``
    """

    def __init__(self, budget: int = 0) -> None:
        self._keeps = budget > 0
        self._memo = LruCache[tuple[ItemReader, bytes], FoundItem](budget - budget // 4)
        self._readers = set[ItemReader]()
        # keyed by the identity of the parts, which the entry keeps alive
        self._merged = LruCache[tuple[int, ...], tuple[Sequence[Message], Message]](budget // 4)

    def clear(self) -> None:
        """Empty the cache."""
        self._memo.clear()
        self._merged.clear()

    def read(
        self, reader: ItemReader, item: Any, where: str, omissions: Omissions, found: FoundItem | None = None
    ) -> Sequence[Message]:
        """Return an item's messages, parsed or from the cache; add its omissions to `omissions`. `item` may be JSON text (`msgspec.Raw`).
        `found`: the result if it was parsed elsewhere.

        Raises BadRequest; ValueError for malformed JSON text.
        """
        written = bytes(item) if isinstance(item, msgspec.Raw) else None
        if not self._keeps:
            if found is None:
                return tuple(reader(item if written is None else msgspec.json.decode(written), where, omissions))
            return _report(found, omissions)
        written = written or _ENCODER.encode(item)
        self._readers.add(reader)
        key = (reader, written)
        kept = self._memo.get(key)
        if kept is None:
            kept = found
            if kept is None:
                own = Omissions()
                value = msgspec.json.decode(written) if isinstance(item, msgspec.Raw) else item
                kept = (tuple(reader(value, where, own)), tuple(own.words))
            self._memo.put(key, kept, cost=len(written) + _ENTRY + sum(map(_bytes_of, kept[0])))
        return _report(kept, omissions)

    def unknown(self, items: Sequence[Any]) -> int:
        """Return the total bytes of those of these JSON texts that are not in the cache."""
        texts = [bytes(item) for item in items if isinstance(item, msgspec.Raw)]
        readers = [*self._readers]
        return sum(len(text) for text in texts if not any((reader, text) in self._memo for reader in readers))

    def merged(self, parts: Sequence[Message]) -> Message:
        """Merge parts into one message. The same parts give the same object, so that what is computed from it is computed once."""
        if not self._keeps or parts[0].role is Role.SYSTEM:  # a request's instructions are a new object each time
            return _merged(parts)
        key = tuple(map(id, parts))
        found = self._merged.get(key)
        if found is None:
            found = (parts, _merged(parts))
            self._merged.put(key, found, cost=_ENTRY + sum(map(_bytes_of, (*parts, found[1]))))
        return found[1]


def _report(found: FoundItem, omissions: Omissions) -> Sequence[Message]:
    for word in found[1]:
        omissions.add(word)
    return found[0]


def joined(parts: Iterable[Message], items: ItemCache | None = None) -> Iterator[Message]:
    """Merge adjacent parts of the same role into one message, because chat templates expect alternating roles. Tool results and compaction
    blocks stay separate.

    An assistant's parts are joined without a separator, as pieces of one answer's text. Texts keep their order, and calls keep theirs;
    the order between texts and calls is lost. `items`: the cache of merged messages.
    """
    listed, at = tuple(parts), 0
    while at < len(listed):
        first, end = listed[at], at + 1
        while end < len(listed) and listed[end].role is first.role is not Role.TOOL and _plain(first, listed[end]):
            end += 1
        same = listed[at:end]
        yield first if len(same) == 1 else _merged(same) if items is None else items.merged(same)
        at = end


def _plain(*parts: Message) -> bool:
    """True if none of them is a subclass of Message, such as a compaction block, which must stay recognisable."""
    return all(type(part) is Message for part in parts)


def _merged(parts: Sequence[Message]) -> Message:
    role = parts[0].role
    return Message(
        role=role,
        text=("" if role is Role.ASSISTANT else "\n").join(part.text for part in parts if part.text),
        reasoning="".join(part.reasoning for part in parts),
        calls=tuple(call for part in parts for call in part.calls),
    )


def _bytes_of(message: Message) -> int:
    """The memory of a message. A text with a single emoji takes four bytes per character."""
    texts = getsizeof(message.text) + getsizeof(message.reasoning) + getsizeof(message.answers)
    called = sum(
        getsizeof(call.id) + getsizeof(call.name) + getsizeof(call.arguments) + _CALL for call in message.calls
    )
    return texts + called + _MESSAGE


class LruCache(Generic[_K, _V]):
    """An LRU cache with a total cost. Thread-safe.

    Args:
        budget: the most that all values may cost together; 0 disables the cache.

    Example: ``cache = LruCache[str, int](10); cache.put("a", 1, cost=4); cache.get("a") == 1``
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[_K, tuple[_V, int]] = OrderedDict()

    def __contains__(self, key: _K) -> bool:
        with self._lock:
            return key in self._kept

    def get(self, key: _K) -> _V | None:
        """Return the value and mark it as used; None if it is not cached."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def clear(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._kept.clear()
            self._held = 0

    def drop(self, gone: Callable[[_V], bool]) -> None:
        """Remove the values for which `gone` returns True."""
        with self._lock:
            for key in [key for key, (value, _) in self._kept.items() if gone(value)]:
                self._held -= self._kept.pop(key)[1]

    def put(self, key: _K, value: _V, *, cost: int) -> None:
        """Add or replace a value, unless its cost alone exceeds the budget."""
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


class WithItems(Extensions):
    """Base of the requests whose items are parsed through a cache."""

    _items: ItemCache | None = PrivateAttr(default=None)

    def reading(self, items: ItemCache | None) -> Self:
        """Set the cache through which this request's items are parsed; return the request."""
        self._items = items
        return self
