"""Bloom filters that tell which closed segments may hold an identity, for all segments at once and before any file is opened.

Each closed segment carries a Bloom filter of its identities: an array of 64-bit words, in which every key sets the same three bits
in two words. Filters of equal size are columns of one table in memory, so that a key's words in all of them form one row.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ostinato.core.seams import Cursor

BITS = 16
"""Bits of a filter per key: the false-positive rate is about one in a thousand."""

_LARGEST = 20  # log2 of the words of the largest filter: a key has no bits for more

Words = NDArray[np.uint64]


def build(keys: Sequence[int]) -> bytes:
    """The filter of a segment with these keys, ready to be stored."""
    exponent = min(_LARGEST, max(4, (len(keys) * BITS // 64).bit_length()))
    words = np.zeros(1 << exponent, np.uint64)
    one, two, mask = _places(np.asarray(keys, np.uint64), exponent)
    np.bitwise_or.at(words, one, mask)
    np.bitwise_or.at(words, two, mask)
    return words.astype("<u8").tobytes()


def _places(keys: Words, exponent: int) -> tuple[Words, Words, Words]:
    """The two words and the three bits of each key. Keys are hashes, so their bits are used directly."""
    last = np.uint64((1 << exponent) - 1)
    bits = [np.uint64(1) << (keys >> np.uint64(shift) & np.uint64(63)) for shift in (40, 46, 52)]
    return keys & last, keys >> np.uint64(20) & last, bits[0] | bits[1] | bits[2]


class SealedKeys:
    """The filters of all closed segments. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, tuple[Words, list[Cursor | None]]] = {}  # log2(words) -> words by segment, the segments
        self._known: set[Cursor] = set()

    def missing(self, firsts: Sequence[Cursor]) -> list[Cursor]:
        """The segments among these whose filters were not added yet."""
        with self._lock:
            return [first for first in firsts if first not in self._known]

    def add(self, first: Cursor, stored: bytes) -> None:
        """Add the filter of a closed segment."""
        words = np.frombuffer(stored, "<u8")
        exponent = len(words).bit_length() - 1
        with self._lock:
            if first in self._known:
                return
            table, segments = self._sizes.get(exponent, (np.zeros((len(words), 4), np.uint64), []))
            column = segments.index(None) if None in segments else len(segments)
            if column == len(segments):
                segments.append(None)
            if column == table.shape[1]:
                table = np.concatenate([table, np.zeros_like(table)], axis=1)
            table[:, column] = words
            segments[column] = first
            self._sizes[exponent] = (table, segments)
            self._known.add(first)

    def drop(self, first: Cursor) -> None:
        """Remove the filter of a dropped segment."""
        with self._lock:
            self._known.discard(first)
            for table, segments in self._sizes.values():
                if first in segments:
                    table[:, segments.index(first)] = 0
                    segments[segments.index(first)] = None

    def holding(self, keys: Sequence[int]) -> Mapping[int, list[Cursor]]:
        """Each key that may be in a closed segment -> those segments, newest first."""
        found: dict[int, list[Cursor]] = {}
        asked = np.asarray(keys, np.uint64)
        with self._lock:
            for exponent, (table, segments) in self._sizes.items():
                one, two, mask = _places(asked, exponent)
                hit = table[one] & table[two] & mask[:, None] == mask[:, None]
                for row, column in zip(*np.nonzero(hit), strict=True):
                    first = segments[column] if column < len(segments) else None
                    if first is not None:
                        found.setdefault(keys[row], []).append(first)
        for firsts in found.values():
            firsts.sort(reverse=True)
        return found
