"""Encodes the chunks of a version, and packs their payloads into few objects, so that a delta is one file instead of 300."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from ostinato.core.errors import BadWeights
from ostinato.core.seams import WeightStore
from ostinato.core.weights import ITEMSIZES, ChunkName, Form, WeightPart
from ostinato.weights.delta import codec as delta
from ostinato.weights.version.content import Hashes, chunk_count, hash_of, part_hash
from ostinato.weights.version.manifest import StoredChunk, Tensor

# encoded per call on a thread: enough to amortise the thread switch, little enough to save memory
_GROUP_BYTES = 1 << 24
_CONCURRENT_PUTS = 4
OldChunk = Callable[[str, int], delta.Bytes]
"""Maps (tensor name, chunk index) to the chunk's old bytes as a flat uint8 array. Called from threads."""
Undo = dict[ChunkName, delta.Coded]
"""Reverse deltas, which turn the changed chunks of a version back into those of the previous version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedChunks:
    """Chunks whose payloads are stored. `changed`: the number of elements that differ from the base, None without a base."""

    chunks: Mapping[ChunkName, StoredChunk]
    changed: int | None
    undo: Undo

    @property
    def payload_bytes(self) -> int:
        """The size of all payloads."""
        return sum(chunk.length for chunk in self.chunks.values())

    @property
    def elements(self) -> int:
        """The number of elements in all chunks."""
        return sum(chunk.elements for chunk in self.chunks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """How to encode chunks. Changes are counted against `base`. `delta`: payloads may refer to it; `undo`: also encode the reverse
    delta.
    """

    base: OldChunk | None
    delta: bool
    undo: bool = False
    level: int
    object_bytes: int
    verify: bool
    threads: int


@dataclass(frozen=True, slots=True)
class _Made:
    coded: delta.Coded
    payload: str
    changed: int
    undo: delta.Coded | None


async def write_packs(store: WeightStore, part: WeightPart, hashes: Hashes, coding: Coding) -> PackedChunks:
    """Encode every chunk of the part, several at a time, and store the payloads, sorted by name.

    Raises: StorageFull from the store; BadWeights if the arrays changed while they were being read.
    """
    placed: dict[ChunkName, tuple[int, StoredChunk]] = {}  # with the index of its object
    undo: Undo = {}
    puts: list[asyncio.Task[str]] = []
    buffer = bytearray()
    changed = 0
    try:
        async with aclosing(_coded(part, hashes, coding)) as groups:
            async for group, made in groups:
                for job, chunk in zip(group, made, strict=True):
                    placed[job] = len(puts), _stored(job, part, hashes[job], chunk, len(buffer))
                    buffer += chunk.coded.payload
                    changed += chunk.changed
                    if chunk.undo is not None:
                        undo[job] = chunk.undo
                    if len(buffer) >= coding.object_bytes:
                        if len(puts) >= _CONCURRENT_PUTS:
                            await puts[-_CONCURRENT_PUTS]  # earlier puts were awaited before
                        puts.append(asyncio.create_task(store.put(memoryview(buffer))))
                        buffer = bytearray()
        if buffer:
            puts.append(asyncio.create_task(store.put(memoryview(buffer))))
        objects = [await put for put in puts]
    finally:
        for put in puts:
            put.cancel()
        await asyncio.gather(*puts, return_exceptions=True)
    chunks = {
        at: chunk if chunk.codec == delta.EQUAL else chunk.model_copy(update={"object": objects[number]})
        for at, (number, chunk) in placed.items()
    }
    return PackedChunks(chunks=chunks, changed=None if coding.base is None else changed, undo=undo)


def _stored(at: ChunkName, part: WeightPart, result: str, made: _Made, offset: int) -> StoredChunk:
    """Return the description of a chunk in an object whose hash is not known yet."""
    equal = made.coded.codec == delta.EQUAL
    return StoredChunk(
        codec=made.coded.codec,
        object=None,
        offset=0 if equal else offset,
        length=len(made.coded.payload),
        payload=None if equal else made.payload,
        elements=part.chunks[at].nbytes // ITEMSIZES[part.forms[at[0]][0]],
        result=result,
    )


async def _coded(
    part: WeightPart, hashes: Hashes, coding: Coding
) -> AsyncGenerator[tuple[list[ChunkName], list[_Made]]]:
    """Yield groups of chunks in order, each with its results from `_code`. `coding.threads` groups are encoded ahead."""
    pending: deque[tuple[list[ChunkName], asyncio.Task[list[_Made]]]] = deque()
    try:
        for group in _groups(part):
            work = asyncio.to_thread(_code, group, part, hashes, coding)
            pending.append((group, asyncio.create_task(work)))
            if len(pending) > coding.threads:
                first, task = pending.popleft()
                yield first, await task
        while pending:
            first, task = pending.popleft()
            yield first, await task
    finally:  # threads cannot be stopped, and none may still read the weights when the caller continues
        await asyncio.gather(*(task for _, task in pending), return_exceptions=True)


def _groups(part: WeightPart) -> Iterator[list[ChunkName]]:
    group: list[ChunkName] = []
    size = 0
    for at in sorted(part.chunks):
        group.append(at)
        size += part.chunks[at].nbytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _code(group: Sequence[ChunkName], part: WeightPart, hashes: Hashes, coding: Coding) -> list[_Made]:
    """Encode each chunk. Returns its payload, the payload's hash, the number of changed elements, and the reverse delta."""
    encoded: list[_Made] = []
    for name, index in group:
        dtype, new = part.forms[name][0], part.chunks[name, index]
        before = None if coding.base is None else coding.base(name, index)
        old = before if coding.delta else None
        coded = delta.encode(old, new, dtype=dtype, level=coding.level)
        if coding.verify and _decoded(coded, old, dtype, new.size) != hashes[name, index]:
            raise BadWeights(
                f"tensor {name!r} chunk {index} changed while it was being published; publish a copy that nobody writes to"
            )
        differing, undo = 0, None
        if before is not None and coded.codec != delta.EQUAL:
            differing = delta.changed_elements(before, new, ITEMSIZES[dtype])
            undo = delta.encode(new, before, dtype=dtype, level=coding.level) if coding.undo else None
        encoded.append(_Made(coded, part_hash(coded.payload), differing, undo))
    return encoded


def _decoded(coded: delta.Coded, old: delta.Bytes | None, dtype: str, size: int) -> str:
    """Return the hash of the decoded payload. If it differs from the chunk's hash, the array was written to meanwhile."""
    target = np.empty(size, np.uint8) if old is None else old.copy()
    delta.decode(coded.codec, target, coded.payload, dtype=dtype, old=old is not None)
    return hash_of(target)


def tensors_of(forms: Mapping[str, Form], chunks: Mapping[ChunkName, StoredChunk]) -> tuple[Tensor, ...]:
    """Return the tensors with these dtypes and shapes, sorted by name. `chunks` must hold every chunk."""
    return tuple(
        Tensor(
            name=name,
            dtype=dtype,
            shape=shape,
            chunks=tuple(chunks[name, index] for index in range(chunk_count(math.prod(shape)))),
        )
        for name, (dtype, shape) in sorted(forms.items())
    )
