"""Codes the chunks of a version and packs their payloads into few objects, so that a delta is one file and not 300."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from ostinato.core.errors import BadWeights
from ostinato.core.records import Weights
from ostinato.core.seams import WeightStore
from ostinato.publish import delta
from ostinato.publish.content import ITEMSIZES, Hashes, chunk_count, chunk_of, chunk_sizes, hash_of, part_hash
from ostinato.publish.manifest import Chunk, Tensor

_GROUP_BYTES = 1 << 24  # coded per hop to a thread: long enough to be worth it, short enough to stay small in memory
_UNDER_WAY = 4  # objects that are being stored at the same time
_Made = tuple[delta.Coded, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A version's tensors with their payloads stored, and how many elements differ from the base (None without one)."""

    tensors: tuple[Tensor, ...]
    changed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """How to code: `base` is what changes are counted against; `delta` says whether payloads may refer to it."""

    base: Weights | None
    delta: bool
    level: int
    object_bytes: int
    verify: bool
    threads: int


@dataclass(frozen=True, slots=True)
class _Placed:
    coded: str
    pack: int | None
    offset: int
    length: int
    payload: str | None


async def pack(store: WeightStore, weights: Weights, hashes: Hashes, coding: Coding) -> Packed:
    """Code every chunk, several at a time, and put the payloads into the store in the order of the names.

    Raises: StorageFull from the store; BadWeights if the arrays changed while they were being read.
    """
    placed: dict[tuple[str, int], _Placed] = {}
    puts: list[asyncio.Task[str]] = []
    buffer = bytearray()
    changed = 0
    try:
        async with aclosing(_coded(weights, hashes, coding)) as groups:
            async for group, made in groups:
                for job, (chunk, name, differing) in zip(group, made, strict=True):
                    empty = chunk.codec == delta.EQUAL
                    placed[job] = _Placed(
                        coded=chunk.codec,
                        pack=None if empty else len(puts),
                        offset=0 if empty else len(buffer),
                        length=len(chunk.payload),
                        payload=None if empty else name,
                    )
                    buffer += chunk.payload
                    changed += differing
                    if len(buffer) >= coding.object_bytes:
                        if len(puts) >= _UNDER_WAY:
                            await puts[-_UNDER_WAY]  # those before it were waited for in their turn
                        puts.append(asyncio.create_task(store.put(bytes(buffer))))
                        buffer.clear()
        if buffer:
            puts.append(asyncio.create_task(store.put(bytes(buffer))))
        objects = [await put for put in puts]
    finally:
        for put in puts:
            put.cancel()
        await asyncio.gather(*puts, return_exceptions=True)
    tensors = tuple(_tensor(name, weights, hashes, placed, objects) for name in sorted(weights))
    return Packed(tensors=tensors, changed=None if coding.base is None else changed)


async def _coded(
    weights: Weights, hashes: Hashes, coding: Coding
) -> AsyncGenerator[tuple[list[tuple[str, int]], list[_Made]]]:
    """Groups of chunks in order, each with what `_code` makes of it; `coding.threads` of them are in the making."""
    jobs = [(name, index) for name in sorted(weights) for index in range(len(hashes[name]))]
    pending: deque[tuple[list[tuple[str, int]], asyncio.Task[list[_Made]]]] = deque()
    try:
        for group in _groups(jobs, weights):
            work = asyncio.to_thread(_code, group, weights, hashes, coding)
            pending.append((group, asyncio.create_task(work)))
            if len(pending) > coding.threads:
                first, task = pending.popleft()
                yield first, await task
        while pending:
            first, task = pending.popleft()
            yield first, await task
    finally:  # threads cannot be stopped: nobody may still be reading the weights when the caller goes on
        await asyncio.gather(*(task for _, task in pending), return_exceptions=True)


def _groups(jobs: Sequence[tuple[str, int]], weights: Weights) -> Iterator[list[tuple[str, int]]]:
    group: list[tuple[str, int]] = []
    size = 0
    for name, index in jobs:
        group.append((name, index))
        size += chunk_of(weights[name], index).nbytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _code(group: Sequence[tuple[str, int]], weights: Weights, hashes: Hashes, coding: Coding) -> list[_Made]:
    """Each chunk's payload, the payload's hash, and how many of its elements differ from the base."""
    found: list[_Made] = []
    for name, index in group:
        dtype = weights[name].dtype
        new = chunk_of(weights[name], index)
        before = None if coding.base is None else chunk_of(coding.base[name], index)
        old = before if coding.delta else None
        coded = delta.encode(old, new, dtype=dtype, level=coding.level)
        if coding.verify and _decoded(coded, old, dtype, new.size) != hashes[name][index]:
            raise BadWeights(
                f"tensor {name!r} chunk {index} changed while it was published; publish a copy that nobody writes to"
            )
        differing = 0
        if before is not None and coded.codec != delta.EQUAL:
            differing = delta.changed_elements(before, new, ITEMSIZES[dtype])
        found.append((coded, part_hash(coded.payload), differing))
    return found


def _decoded(coded: delta.Coded, old: delta.Bytes | None, dtype: str, size: int) -> str:
    """The hash of what the payload decodes to: another one than was taken before means that somebody wrote to the arrays."""
    target = np.empty(size, np.uint8) if old is None else old.copy()
    delta.decode(coded.codec, target, coded.payload, dtype=dtype, old=old is not None)
    return hash_of(target)


def _tensor(
    name: str, weights: Weights, hashes: Hashes, placed: dict[tuple[str, int], _Placed], objects: Sequence[str]
) -> Tensor:
    array = weights[name]
    elements = math.prod(array.shape)
    places = [placed[name, index] for index in range(chunk_count(elements))]
    chunks = tuple(
        Chunk(
            codec=place.coded,
            object=None if place.pack is None else objects[place.pack],
            offset=place.offset,
            length=place.length,
            payload=place.payload,
            elements=size,
            result=result,
        )
        for place, size, result in zip(places, chunk_sizes(elements), hashes[name], strict=True)
    )
    return Tensor(name=name, dtype=array.dtype, shape=array.shape, chunks=chunks)
