"""Holders of the weights being published: this process with every chunk, or one of several processes, each with its own chunks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from ostinato.core.errors import NotFound
from ostinato.core.seams import WeightStore
from ostinato.core.weights import Form, WeightPart, Weights
from ostinato.weights.publish.base import Base, kept
from ostinato.weights.publish.config import PublisherConfig
from ostinato.weights.publish.history import History
from ostinato.weights.version.content import Hashes, check_weights, hash_chunks, part_of
from ostinato.weights.version.packing import Coding, OldChunk, Packed, Undo, write_packs

_PAST_BYTES = 1 << 30  # beyond this size the oldest reverse deltas are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Weights that are about to be published: every tensor's form, and the hashes of the chunks that this holder has."""

    forms: dict[str, Form]
    hashes: Hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How chunks are encoded: against the version with root `base`, which is `span` versions before the next (None: against nothing).

    `delta`: payloads may refer to the base; otherwise changes are only counted. `undo`: the reverse delta is kept too.
    """

    base: str | None = None
    span: int = 1
    delta: bool = False
    undo: bool = False


class Holder(Protocol):
    """Encodes and stores the chunks of a version, and keeps them as the base of the next one."""

    @property
    def whole(self) -> bool:
        """Whether this process has every chunk."""
        ...

    async def take(self, number: int, weights: Weights | WeightPart, *, check: bool, finite: bool) -> Taken:
        """Take the weights of version `number`, which are to be published. Raises BadWeights if `check` is set and they are unfit."""
        ...

    async def holds(self, root: str) -> bool:
        """Whether the base is the version of this root, with every byte as it was published; otherwise the base is dropped."""
        ...

    def due(self, base: str) -> list[tuple[int, str]]:
        """(span, root) of the older versions from which the version after `base` should also get a delta."""
        ...

    async def pack(self, how: How) -> Packed:
        """Store the weights taken last.

        Raises like `write_packs`, NotFound if the base is a different version, and Corrupt if the base cannot be rebuilt.
        """
        ...

    async def keep(self, root: str, parent: str | None) -> None:
        """Make the weights taken last, now published, the next base. `parent`: the previous version if the line is unbroken."""
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


class PartHolder:
    """The `Holder` of this process's own chunks.

    The base is kept in a file in `config.scratch`. Without one the weights' own arrays are kept, and must not change afterwards.

    Example::

        holder = PartHolder(store, config)
        taken = await holder.take(1, weights, check=True, finite=True)
        packed = await holder.pack(How())
        await holder.keep(root, None)
    """

    def __init__(self, store: WeightStore, config: PublisherConfig) -> None:
        self._store, self._config = store, config
        self._history = History(config.skips, _PAST_BYTES)
        self._base: Base | None = None
        self._new: tuple[WeightPart, Hashes] | None = None
        self._undo: Undo | None = None
        self.whole = True

    async def take(self, number: int, weights: Weights | WeightPart, *, check: bool, finite: bool) -> Taken:
        """See `Holder`."""
        del number
        if check:
            await asyncio.to_thread(check_weights, weights, finite=finite)
        part = part_of(weights)
        hashes = await asyncio.to_thread(hash_chunks, part)
        self._new, self._undo = (part, hashes), None
        return Taken(forms=dict(part.forms), hashes=hashes)

    async def holds(self, root: str) -> bool:
        """See `Holder`."""
        base, self._base = self._base, None
        if base is not None and base.root == root and await asyncio.to_thread(base.is_intact):
            self._base = base
        return self._base is not None

    async def adopt(self, root: str, weights: Weights) -> None:
        """Take a version that was read from the store as the base."""
        part = part_of(weights)
        self._base = await self._kept(root, part, await asyncio.to_thread(hash_chunks, part))

    def due(self, base: str) -> list[tuple[int, str]]:
        """See `Holder`."""
        return [(span, self._history.root(span)) for span in self._history.due(base)]

    async def pack(self, how: How) -> Packed:
        """See `Holder`."""
        part, hashes = self._taken()
        config = self._config
        undo = how.undo and how.delta and self._history.wanted
        coding = Coding(
            base=None if how.base is None else self._old(how.base, how.span, part),
            delta=how.delta,
            undo=undo,
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
            raise NotFound(f"version {root} is not what the last publication left in memory", field="base")
        return base.chunk

    async def keep(self, root: str, parent: str | None) -> None:
        """See `Holder`."""
        part, hashes = self._taken()
        undo = self._undo if parent is not None else None
        self._history.add(parent, root, hashes, undo)
        self._base = None  # frees its file before the next one is written
        self._base = await self._kept(root, part, hashes)
        self._new = self._undo = None

    async def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def _taken(self) -> tuple[WeightPart, Hashes]:
        if self._new is None:
            raise NotFound("there are no weights that are about to be published", field="weights")
        return self._new

    async def _kept(self, root: str, part: WeightPart, hashes: Hashes) -> Base:
        return await asyncio.to_thread(kept, root, part, hashes, self._config.scratch)
