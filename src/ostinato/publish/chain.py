"""Manifests in the store, and the walk from a version back to a full snapshot and forward again to its weights.

Readers trust nothing: a manifest is parsed at the boundary, every decoded chunk must have the hash that the manifest promises,
and the manifest's root was recomputed when it was parsed. Weights are built beside the old ones, never in place.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.records import WeightArray, Weights
from ostinato.core.seams import WeightStore
from ostinato.publish import delta
from ostinato.publish.content import CHUNK_ELEMENTS, check_hash, hash_of, part_hash
from ostinato.publish.manifest import MAX_LINKS, Chunk, Manifest, Tensor, parse, plain

_KEPT_MANIFESTS = 64
_AHEAD = 4  # objects that are on their way at the same time
_THREADS = 2  # that decode; their memory is the result's own
_Item = tuple[Tensor, int, Chunk]  # a tensor, the number of one of its chunks, and the chunk


def version_ref(root: str) -> str:
    """The ref under which the manifest of a root is found."""
    return f"version/{check_hash(root)}"


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A version in memory, verified: every chunk has the hash that the manifest names."""

    hash: str
    manifest: Manifest
    weights: Weights


class Manifests:
    """Reads manifests, and keeps the last few: they never change."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._kept: OrderedDict[str, Manifest] = OrderedDict()

    async def read(self, hash: str) -> Manifest:
        """The manifest of this name. Raises NotFound or Corrupt, which name the object."""
        if hash in self._kept:
            self._kept.move_to_end(hash)
            return self._kept[hash]
        data = await self._store.get(hash)
        if hash_of(data) != hash:
            raise Corrupt(
                f"manifest {hash} does not have the bytes that its name promises. Restore it, or publish again"
            )
        manifest = await asyncio.to_thread(lambda: parse(plain(data, f"manifest {hash}"), f"manifest {hash}"))
        self._kept[hash] = manifest
        while len(self._kept) > _KEPT_MANIFESTS:
            self._kept.popitem(last=False)
        return manifest

    async def find(self, value: str) -> str:
        """The hash of the manifest that `value`, a root or a manifest hash, stands for."""
        return await self._store.read_ref(version_ref(value)) or value

    async def of_root(self, root: str) -> tuple[str, Manifest]:
        """The manifest of a version. Raises NotFound for a root that was never published."""
        hash = await self._store.read_ref(version_ref(root))
        if hash is None:
            raise NotFound(
                f"version {root} was never published to this weight store; `ostinato weights log` lists them",
                field="policy",
            )
        manifest = await self.read(hash)
        if manifest.root != root:
            raise Corrupt(
                f"ref {version_ref(root)} leads to manifest {hash}, which is of root {manifest.root}. Publish it again"
            )
        return hash, manifest

    async def walk(self, hash: str) -> AsyncIterator[tuple[str, Manifest]]:
        """A manifest and its ancestors, newest first."""
        at: str | None = hash
        while at is not None:
            manifest = await self.read(at)
            yield at, manifest
            at = manifest.parent


async def rebuild(
    store: WeightStore, manifests: Manifests, hash: str, known: Callable[[str], Weights | None], max_bytes: int
) -> Loaded:
    """The weights of the manifest `hash`, built from the nearest known ancestor or full snapshot, each link verified.

    `known` gives the weights of a root that were verified before and are still in memory.

    Raises:
        NotFound: an object of the chain is missing.
        Corrupt: an object, manifest or chunk is not what it promises; the message names the object.
    """
    links: list[tuple[str, Manifest]] = []
    base: Loaded | None = None
    async for at, manifest in manifests.walk(hash):
        weights = known(manifest.root)
        if weights is not None:
            base = Loaded(at, manifest, weights)
            break
        _check_link(links, at, manifest, max_bytes)
        links.append((at, manifest))
        if manifest.kind == "full":
            break
    while links:
        at, manifest = links.pop()
        base = Loaded(at, manifest, await _apply(store, at, manifest, base))
    if base is None:
        raise Corrupt(f"manifest {hash} leads to no full snapshot")
    return base


def _check_link(links: list[tuple[str, Manifest]], at: str, manifest: Manifest, max_bytes: int) -> None:
    if manifest.full_bytes > max_bytes:
        raise Corrupt(
            f"manifest {at}: declares {manifest.full_bytes} bytes of weights; the follower's max_bytes is {max_bytes}"
        )
    if len(links) > MAX_LINKS or (links and links[-1][1].links != manifest.links + 1):
        raise Corrupt(
            f"manifest {links[-1][0]}: field links: {links[-1][1].links} does not follow its parent's {manifest.links}"
        )


async def _apply(store: WeightStore, hash: str, manifest: Manifest, base: Loaded | None) -> Weights:
    """One link: the base's weights -> the manifest's. Unchanged tensors are shared with the base, others are new memory."""
    old: Mapping[str, WeightArray] = {} if manifest.kind == "full" or base is None else base.weights
    if manifest.kind == "delta" and (base is None or base.hash != manifest.parent or not _same_form(manifest, old)):
        raise Corrupt(f"manifest {hash}: its tensors do not fit those of its parent {manifest.parent}; refused")
    results = {tensor.name: tensor.results for tensor in base.manifest.tensors} if old and base is not None else {}
    new: dict[str, NDArray[np.uint8]] = {}
    work: dict[str, list[_Item]] = {}
    for tensor in manifest.tensors:
        changed = [(tensor, index, chunk) for index, chunk in enumerate(tensor.chunks) if chunk.codec != delta.EQUAL]
        if old:
            _check_equal(hash, tensor, results[tensor.name])
        if changed or tensor.name not in old:
            new[tensor.name] = old[tensor.name].data.copy() if old else np.empty(tensor.nbytes, np.uint8)
        for item in changed:
            work.setdefault(str(item[2].object), []).append(item)
    await _decode_objects(store, work, bool(old), new)
    for data in new.values():
        data.setflags(write=False)
    return {
        tensor.name: WeightArray(tensor.dtype, tensor.shape, new[tensor.name])
        if tensor.name in new
        else old[tensor.name]
        for tensor in manifest.tensors
    }


def _same_form(manifest: Manifest, old: Mapping[str, WeightArray]) -> bool:
    form = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
    return form == {name: (array.dtype, array.shape) for name, array in old.items()}


def _check_equal(hash: str, tensor: Tensor, results: tuple[str, ...]) -> None:
    """An unchanged chunk must promise the hash that the parent's chunk was verified to have."""
    for index, chunk in enumerate(tensor.chunks):
        if chunk.codec == delta.EQUAL and chunk.result != results[index]:
            raise Corrupt(
                f"manifest {hash}: tensor {tensor.name} chunk {index} is said to be unchanged but has another hash"
            )


async def _decode_objects(
    store: WeightStore, work: Mapping[str, list[_Item]], old: bool, new: dict[str, NDArray[np.uint8]]
) -> None:
    """Each object is read once, whatever order the manifest names them in; the next one is on its way while one is decoded."""
    names = list(work)
    coming = [asyncio.create_task(store.get(name)) for name in names[:_AHEAD]]
    try:
        for at, name in enumerate(names):
            data = await coming[at]
            if at + _AHEAD < len(names):
                coming.append(asyncio.create_task(store.get(names[at + _AHEAD])))
            items = work[name]
            parts = [items[start::_THREADS] for start in range(min(_THREADS, len(items)))]
            done = await asyncio.gather(
                *(asyncio.to_thread(_decode_object, name, data, part, old, new) for part in parts),
                return_exceptions=True,  # no thread may still be writing when the caller hears of an error
            )
            for error in done:
                if error is not None:
                    raise error
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)


def _decode_object(name: str, data: bytes, items: list[_Item], old: bool, new: dict[str, NDArray[np.uint8]]) -> None:
    """Decode in place: `new` holds the old bytes, if there are any."""
    view = memoryview(data)
    for tensor, index, chunk in items:
        where = f"object {name}: tensor {tensor.name} chunk {index}"
        payload = view[chunk.offset : chunk.offset + chunk.length]
        if part_hash(payload) != chunk.payload:
            raise Corrupt(f"{where}: its payload is not what the manifest names. Restore the object, or publish again")
        start = index * CHUNK_ELEMENTS * tensor.itemsize
        target = new[tensor.name][start : start + chunk.elements * tensor.itemsize]
        try:
            delta.decode(chunk.codec, target, payload, dtype=tensor.dtype, old=old)
        except Corrupt as error:
            raise Corrupt(f"{where}: {error}. Restore the object, or publish again") from error
        if hash_of(target) != chunk.result:
            raise Corrupt(
                f"{where}: decodes to bytes with another hash than {chunk.result}. Restore it, or publish again"
            )
