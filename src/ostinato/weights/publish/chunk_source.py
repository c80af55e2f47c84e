"""Holders of the weights being published: one process with every chunk, or one of several processes, each with its own chunks.

A holder also keeps the base of the next delta, and the history of the last publications as reverse deltas, so that a delta over many
versions needs no second copy of the weights. A reverse delta turns the chunks of a version's successor into its own, and its payload is as
small as the delta's. A chunk of an older version is rebuilt on demand and must have the hash that was published.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.seams import WeightStore
from ostinato.core.weights import ChunkName, Form, WeightPart, Weights
from ostinato.weights.config import PublisherConfig
from ostinato.weights.delta import codec as delta
from ostinato.weights.version.content import Hashes, check_weights, hash_chunks, hash_of, part_of
from ostinato.weights.version.packing import Coding, OldChunk, PackedChunks, Undo, write_packs

# ---------------------------------------------------------------- history of versions


@dataclass(slots=True)
class _Past:
    root: str
    hashes: Hashes
    undo: Undo = field(default_factory=dict[ChunkName, delta.Coded])  # turns the next version into this one


class VersionHistory:
    """The last versions of an unbroken line of publications, newest last. `spans`: how many versions each squashed delta covers.

    Example: with spans (4, 16), the fourth version after the first may be a delta from the first, and the eighth from the fourth.
    """

    def __init__(self, spans: Sequence[int], max_bytes: int) -> None:
        self._spans, self._max_bytes = tuple(spans), max_bytes
        self._past: deque[_Past] = deque()
        self._count = 0

    def due(self, base: str) -> list[int]:
        """Return the spans of the squashed deltas that are due for the version after the one with root `base`."""
        if not self._past or self._past[-1].root != base:
            return []
        number = self._count + 1
        return [span for span in self._spans if number % span == 0 and span <= len(self._past)]

    def root(self, span: int) -> str:
        """Return the root of the version `span` publications before the next. Raises Corrupt if it is no longer kept."""
        return self._back(span).root

    def chunks(self, span: int, newest: OldChunk, part: WeightPart) -> OldChunk:
        """Return a function that rebuilds chunks of the version `span` publications before the next.

        `newest` gives the newest version's chunks, `part` the tensors' dtypes. Raises Corrupt if the version is no longer kept. The
        function raises Corrupt if a chunk cannot be rebuilt.
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
                raise Corrupt(f"tensor {name!r} chunk {index} of version {target.root} cannot be rebuilt from memory")
            return data

        return chunk

    def _back(self, span: int) -> _Past:
        if span > len(self._past):
            raise Corrupt(f"the version {span} publications back is no longer kept")
        return self._past[-span]

    def add(self, base: str | None, root: str, hashes: Hashes, undo: Undo | None) -> None:
        """Record that version `root` was published. `undo`: the reverse delta from it to `base`; None: a new line starts here."""
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


# ---------------------------------------------------------------- the base of the next delta


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """The chunks of a published version that this process holds. `chunk` raises Corrupt if a chunk cannot be read.

    Example::

        base = kept(root, part, hashes, directory)
        old = base.chunk("model.norm.weight", 0)
    """

    root: str
    hashes: Hashes
    chunk: OldChunk

    def is_intact(self) -> bool:
        """Return True if every chunk still has the hash that was published."""
        try:
            return all(hash_of(self.chunk(*at)) == result for at, result in self.hashes.items())
        except Corrupt:
            return False


def kept(root: str, part: WeightPart, hashes: Hashes, directory: Path | None) -> Base:
    """Keep the chunks in an unnamed file in `directory`, so that their arrays can be freed; without a directory or room, in memory."""
    if directory is not None:
        try:
            return Base(root, hashes, _on_disk(part, directory))
        except OSError as error:
            logger.warning("the last published weights stay in memory: %s cannot hold them: %s", directory, error)
    return Base(root, hashes, lambda name, index: part.chunks[name, index])


def _on_disk(part: WeightPart, directory: Path) -> OldChunk:
    places: dict[ChunkName, tuple[int, int]] = {}
    end = 0
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for at, data in part.chunks.items():
            places[at] = (end, data.nbytes)
            rest = np.ascontiguousarray(data).data
            while rest:
                rest = rest[file.write(rest) :]
            end += data.nbytes
        descriptor = os.dup(file.fileno())

    def chunk(name: str, index: int) -> delta.Bytes:
        start, size = places[name, index]
        data = np.empty(size, np.uint8)
        try:
            got = os.preadv(descriptor, [data.data], start)
        except OSError as error:
            raise Corrupt(f"the last published weights cannot be read: {error}") from error
        if got != data.nbytes:
            raise Corrupt(f"the last published weights end within tensor {name!r}")
        return data

    weakref.finalize(chunk, os.close, descriptor)
    return chunk


# ---------------------------------------------------------------- holders


_HISTORY_BYTES = 1 << 30  # beyond this size the oldest reverse deltas are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenWeights:
    """Weights that are about to be published: every tensor's dtype and shape, and the hashes of the chunks that this holder has."""

    forms: dict[str, Form]
    hashes: Hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How to encode chunks. `base`: the root of the base, `span` versions before the next one; None: no base.

    `delta`: payloads may refer to the base; otherwise changes against it are only counted. `undo`: keep the reverse delta, too.
    """

    base: str | None = None
    span: int = 1
    delta: bool = False
    undo: bool = False


class Holder(Protocol):
    """Encodes and stores the chunks of a version, and keeps them as the base of the next one."""

    @property
    def whole(self) -> bool:
        """True if this process has every chunk."""
        ...

    async def take(self, number: int, weights: Weights | WeightPart, *, check: bool, finite: bool) -> TakenWeights:
        """Take the weights of version `number`, which will be published. With `check`, raises BadWeights if they are invalid."""
        ...

    async def holds(self, root: str) -> bool:
        """Return whether the base is the version with this root, every byte as it was published. If not, drop the base."""
        ...

    def due(self, base: str) -> list[tuple[int, str]]:
        """Return (span, root) of the older versions from which the version after `base` should also get a delta."""
        ...

    async def pack(self, how: How) -> PackedChunks:
        """Encode and store the weights taken last.

        Raises like `write_packs`, NotFound if the base is a different version, and Corrupt if the base cannot be rebuilt.
        """
        ...

    async def keep(self, root: str, parent: str | None) -> None:
        """Make the weights taken last, now published, the next base. `parent`: the previous version if this one continues its line."""
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


class PartHolder:
    """The `Holder` of this process's own chunks.

    The base is kept in a file in `config.scratch`. Without `scratch` the weights' own arrays are kept, and must not change afterwards.

    Example::

        holder = PartHolder(store, config)
        taken = await holder.take(1, weights, check=True, finite=True)
        packed = await holder.pack(How())
        await holder.keep(root, None)
    """

    def __init__(self, store: WeightStore, config: PublisherConfig) -> None:
        self._store, self._config = store, config
        self._history = VersionHistory(config.skips, _HISTORY_BYTES)
        self._base: Base | None = None
        self._new: tuple[WeightPart, Hashes] | None = None
        self._undo: Undo | None = None
        self.whole = True

    async def take(self, number: int, weights: Weights | WeightPart, *, check: bool, finite: bool) -> TakenWeights:
        del number
        if check:
            await asyncio.to_thread(check_weights, weights, finite=finite)
        part = part_of(weights)
        hashes = await asyncio.to_thread(hash_chunks, part)
        self._new, self._undo = (part, hashes), None
        return TakenWeights(forms=dict(part.forms), hashes=hashes)

    async def holds(self, root: str) -> bool:
        base, self._base = self._base, None
        if base is not None and base.root == root and await asyncio.to_thread(base.is_intact):
            self._base = base
        return self._base is not None

    async def adopt(self, root: str, weights: Weights) -> None:
        """Use a version that was read from the store as the base."""
        part = part_of(weights)
        self._base = await self._kept(root, part, await asyncio.to_thread(hash_chunks, part))

    def due(self, base: str) -> list[tuple[int, str]]:
        return [(span, self._history.root(span)) for span in self._history.due(base)]

    async def pack(self, how: How) -> PackedChunks:
        part, hashes = self._taken()
        config = self._config
        coding = Coding(
            base=None if how.base is None else self._old(how.base, how.span, part),
            delta=how.delta,
            undo=how.undo and how.delta and bool(config.skips),
            level=config.level,
            object_bytes=config.object_bytes,
            verify=config.verify,
            threads=config.threads,
        )
        packed = await write_packs(self._store, part, hashes, coding)
        self._undo = packed.undo if how.undo else self._undo
        return packed

    def _old(self, root: str, span: int, part: WeightPart) -> OldChunk:
        base = self._base
        if base is not None and span > 1 and self._history.root(span) == root:
            return self._history.chunks(span, base.chunk, part)
        if base is None or span > 1 or base.root != root:
            raise NotFound(f"version {root} is not the base that the last publication left in memory", field="base")
        return base.chunk

    async def keep(self, root: str, parent: str | None) -> None:
        part, hashes = self._taken()
        undo = self._undo if parent is not None else None
        self._history.add(parent, root, hashes, undo)
        self._base = None  # frees its file before the next one is written
        self._base = await self._kept(root, part, hashes)
        self._new = self._undo = None

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _taken(self) -> tuple[WeightPart, Hashes]:
        if self._new is None:
            raise NotFound("there are no weights that are about to be published", field="weights")
        return self._new

    async def _kept(self, root: str, part: WeightPart, hashes: Hashes) -> Base:
        return await asyncio.to_thread(kept, root, part, hashes, self._config.scratch)
