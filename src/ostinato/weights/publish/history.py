"""Reverse deltas from the newest version to earlier ones, so that a delta over many versions needs no second copy of the weights.

Each version is kept as a reverse delta that turns its successor's chunks into its own, a payload as small as the delta itself. A chunk
of an older version is rebuilt on demand, and must have the hash that was published.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ostinato.core.errors import Corrupt
from ostinato.core.weights import ChunkName, WeightPart
from ostinato.weights import delta
from ostinato.weights.version.content import Hashes, hash_of
from ostinato.weights.version.packing import OldChunk, Undo


@dataclass(slots=True)
class _Past:
    root: str
    hashes: Hashes
    undo: Undo = field(default_factory=dict[ChunkName, delta.Coded])  # turns the next version into this one


class History:
    """The last versions of an unbroken line of publications, newest last. `spans`: how many versions each squashed delta covers.

    Example: with spans (4, 16) the fourth version after the first may be a delta from the first, and the eighth from the fourth.
    """

    def __init__(self, spans: Sequence[int], max_bytes: int) -> None:
        self._spans, self._max_bytes = tuple(spans), max_bytes
        self._past: deque[_Past] = deque()
        self._count = 0

    @property
    def wanted(self) -> bool:
        """Whether reverse deltas are needed at all."""
        return bool(self._spans)

    def due(self, base: str) -> list[int]:
        """The spans that are due for the version after the one with root `base`."""
        if not self._past or self._past[-1].root != base:
            return []
        number = self._count + 1
        return [span for span in self._spans if number % span == 0 and span <= len(self._past)]

    def root(self, span: int) -> str:
        """The root of the version `span` publications before the next. Raises Corrupt if it is no longer kept."""
        return self._back(span).root

    def chunks(self, span: int, newest: OldChunk, part: WeightPart) -> OldChunk:
        """A function that rebuilds chunks of the version `span` before the next; `newest` gives the newest version's chunks.

        `part` gives the tensors' dtypes. Raises Corrupt if the version is no longer kept; the function does if a chunk cannot be rebuilt.
        """
        target = self._back(span)
        steps = [past.undo for past in list(self._past)[-2 : -span - 1 : -1]]

        def chunk(name: str, index: int) -> delta.Bytes:
            data = newest(name, index).copy()
            for undo in steps:
                if (name, index) in undo:
                    coded = undo[name, index]
                    delta.decode(coded.codec, data, coded.payload, dtype=part.forms[name][0], old=True)
            if hash_of(data) != target.hashes[name, index]:
                raise Corrupt(f"tensor {name!r} chunk {index} of version {target.root} cannot be made from memory")
            return data

        return chunk

    def _back(self, span: int) -> _Past:
        if span > len(self._past):
            raise Corrupt(f"the version {span} publications back is forgotten")
        return self._past[-span]

    def add(self, base: str | None, root: str, hashes: Hashes, undo: Undo | None) -> None:
        """Record that version `root` was published. `undo` turns it into version `base`; None starts a new line here."""
        if undo is None or not self._past or self._past[-1].root != base:
            self._past.clear()
            self._count = 0
        else:
            self._past[-1].undo = undo
            self._count += 1
        self._past.append(_Past(root, hashes))
        while len(self._past) > max(self._spans, default=1) or self._bytes() > self._max_bytes:
            self._past.popleft()

    def _bytes(self) -> int:
        return sum(len(coded.payload) for past in self._past for coded in past.undo.values())
