"""A version under construction, beside the one that is being served: its memory is at most one copy of the weights.

Tensors are shared with the version that it starts from until something is written to them. Objects are read ahead while others
are decoded; a payload that arrived damaged is asked for again, alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import Corrupt
from ostinato.core.records import WeightArray, Weights
from ostinato.core.seams import WeightStore
from ostinato.publish import delta
from ostinato.publish.content import CHUNK_ELEMENTS, hash_of, part_hash
from ostinato.publish.manifest import Chunk, Manifest, Tensor
from ostinato.publish.store import MAX_OBJECT_BYTES

_AHEAD = 4  # objects that are on their way at the same time
_THREADS = 2  # that decode; their memory is the result's own
_ATTEMPTS = 3  # to get a payload that is what the manifest names


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A version in memory, verified: every chunk has the hash that the manifest names."""

    hash: str
    manifest: Manifest
    weights: Weights


@dataclass(frozen=True, slots=True)
class _Item:
    """One chunk that is to be decoded into `target`, which holds the old bytes unless the version is a full snapshot."""

    tensor: Tensor
    index: int
    chunk: Chunk
    target: NDArray[np.uint8]

    @property
    def where(self) -> str:
        return f"object {self.chunk.object}: tensor {self.tensor.name} chunk {self.index}"


class Shadow:
    """Weights that become those of one manifest after the other. After an error they are a mixture and must be dropped.

    Example::

        shadow = Shadow(loaded)
        await shadow.apply(store, hash, manifest)
        weights = shadow.weights()
    """

    def __init__(self, base: Loaded | None) -> None:
        self._at = base.manifest if base is not None else None
        self._weights: dict[str, WeightArray] = dict(base.weights) if base is not None else {}
        self._own: dict[str, NDArray[np.uint8]] = {}

    @property
    def root(self) -> str | None:
        """The root of what has been built so far."""
        return self._at.root if self._at is not None else None

    async def apply(self, store: WeightStore, hash: str, manifest: Manifest) -> None:
        """Go on to the version of `manifest`, whose delta must start from what has been built. Raises NotFound, Corrupt."""
        full = manifest.kind == "full"
        if full:
            self._weights, self._at = {}, None
        else:
            self._check_base(hash, manifest)
        work: dict[str, list[_Item]] = {}
        for tensor in manifest.tensors:
            changed = [(at, chunk) for at, chunk in enumerate(tensor.chunks) if chunk.codec != delta.EQUAL]
            if changed or tensor.name not in self._weights:
                data = self._writable(tensor)
                for at, chunk in changed:
                    start = at * CHUNK_ELEMENTS * tensor.itemsize
                    target = data[start : start + chunk.elements * tensor.itemsize]
                    work.setdefault(str(chunk.object), []).append(_Item(tensor, at, chunk, target))
        await _decode_objects(store, work, old=not full)
        self._at = manifest

    def weights(self) -> Weights:
        """What was built, read-only from now on."""
        for data in self._own.values():
            data.setflags(write=False)
        return dict(self._weights)

    def _writable(self, tensor: Tensor) -> NDArray[np.uint8]:
        """The tensor's bytes in memory of our own; they hold what they held before, if there was something."""
        old = self._weights.get(tensor.name)
        data = self._own.get(tensor.name)
        if data is None or data.nbytes != tensor.nbytes:
            data = np.empty(tensor.nbytes, np.uint8)
            self._own[tensor.name] = data
            if old is not None:
                data[:] = old.data
        self._weights[tensor.name] = WeightArray(tensor.dtype, tensor.shape, data)
        return data

    def _check_base(self, hash: str, manifest: Manifest) -> None:
        """The same tensors; and a chunk that is said to be unchanged must promise the hash that it was verified to have."""
        form = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
        if self._at is None or form != {name: (array.dtype, array.shape) for name, array in self._weights.items()}:
            raise Corrupt(f"manifest {hash}: its tensors do not fit those of its parent {manifest.parent}; refused")
        results = {tensor.name: tensor.results for tensor in self._at.tensors}
        for tensor in manifest.tensors:
            for at, chunk in enumerate(tensor.chunks):
                if chunk.codec == delta.EQUAL and chunk.result != results[tensor.name][at]:
                    raise Corrupt(
                        f"manifest {hash}: tensor {tensor.name} chunk {at} is said to be unchanged but has another hash"
                    )


async def _decode_objects(store: WeightStore, work: Mapping[str, list[_Item]], *, old: bool) -> None:
    """Each object is read once, whatever order the manifest names them in; the next one is on its way while one is decoded."""
    names = list(work)
    coming = [asyncio.create_task(_payloads(store, name, work[name])) for name in names[:_AHEAD]]
    try:
        for at, name in enumerate(names):
            payloads = await coming[at]
            if at + _AHEAD < len(names):
                following = names[at + _AHEAD]
                coming.append(asyncio.create_task(_payloads(store, following, work[following])))
            pairs = list(zip(work[name], payloads, strict=True))
            parts = [pairs[start::_THREADS] for start in range(min(_THREADS, len(pairs)))]
            done = await asyncio.gather(
                *(asyncio.to_thread(_decode, part, old=old) for part in parts),
                return_exceptions=True,  # no thread may still be writing when the caller hears of an error
            )
            for error in done:
                if error is not None:
                    raise error
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)


async def _payloads(store: WeightStore, name: str, items: list[_Item]) -> list[memoryview]:
    """The payloads of one object: read together, and those that are not what the manifest names once more, each alone."""
    size = max(item.chunk.offset + item.chunk.length for item in items)
    if size > MAX_OBJECT_BYTES:
        raise Corrupt(
            f"{items[0].where}: the manifest needs {size} bytes of it; no object has more than {MAX_OBJECT_BYTES}"
        )
    try:
        data = memoryview(await store.get_range(name, 0, size))
    except Corrupt:  # shorter than it should be: perhaps what we need is there
        data = memoryview(b"")
    found = [data[item.chunk.offset : item.chunk.offset + item.chunk.length] for item in items]
    good = await asyncio.to_thread(
        lambda: [part_hash(part) == item.chunk.payload for item, part in zip(items, found, strict=True)]
    )
    for at, item in enumerate(items):
        if not good[at]:
            found[at] = await _again(store, name, item)
    return found


async def _again(store: WeightStore, name: str, item: _Item) -> memoryview:
    """One payload by itself, as often as is worth trying. Raises Corrupt or NotFound, which name the object."""
    why = ""
    for _ in range(_ATTEMPTS):
        try:
            data = await store.get_range(name, item.chunk.offset, item.chunk.length)
        except Corrupt as error:
            why = f" ({error})"
            continue
        if part_hash(data) == item.chunk.payload:
            return memoryview(data)
    raise Corrupt(
        f"{item.where}: its payload is not what the manifest names{why}. Restore the object, or publish again"
    )


def _decode(pairs: list[tuple[_Item, memoryview]], *, old: bool) -> None:
    for item, payload in pairs:
        try:
            delta.decode(item.chunk.codec, item.target, payload, dtype=item.tensor.dtype, old=old)
        except Corrupt as error:
            raise Corrupt(f"{item.where}: {error}. Restore the object, or publish again") from error
        if hash_of(item.target) != item.chunk.result:
            raise Corrupt(
                f"{item.where}: decodes to bytes with another hash than {item.chunk.result}. Restore it, or publish again"
            )
