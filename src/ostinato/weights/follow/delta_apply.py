"""Applies deltas: builds a version beside the one that is being served, with the memory of one further copy of the weights.

Tensors are shared with the base version until they are written to (copy-on-write). Objects are read in pieces, some ahead while others are
decoded. A payload takes less memory than its decoded chunk and is freed once decoded. A payload that arrives damaged is fetched again by
itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import Corrupt, NotFound
from ostinato.core.seams import WeightStore
from ostinato.core.weights import WeightArray, Weights
from ostinato.weights.delta import codec as delta
from ostinato.weights.version.chain import Known, Loaded, Manifests, cheapest, check_size
from ostinato.weights.version.content import CHUNK_ELEMENTS, MAX_OBJECT_BYTES, hash_of, part_hash
from ostinato.weights.version.manifest import Manifest, StoredChunk, Tensor

_PIECE_BYTES = 1 << 23  # adjacent payloads are read together up to this size
# in flight or waiting to be decoded: three times the bandwidth-delay product of 1 Gbit/s and 300 ms
_READ_AHEAD_BYTES = 1 << 27
_DECODER_THREADS = 2  # they decode directly into the result's memory
_ATTEMPTS = 3  # to fetch a payload that matches the manifest's hash


@dataclass(frozen=True, slots=True)
class _Item:
    """One chunk to decode into `target`, which holds the old bytes if `old`."""

    tensor: Tensor
    index: int
    chunk: StoredChunk
    target: NDArray[np.uint8]
    old: bool

    @property
    def where(self) -> str:
        return f"object {self.chunk.object}: tensor {self.tensor.name} chunk {self.index}"


class Shadow:
    """Weights to which manifests are applied one after another. After an error they are a mixture of versions and must be dropped.

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
        """The root of the version built so far."""
        return self._at.root if self._at is not None else None

    async def apply(self, store: WeightStore, hash: str, manifest: Manifest) -> None:
        """Advance to the version of `manifest`, whose delta must start from the version built so far. Raises NotFound, Corrupt."""
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
                    work.setdefault(str(chunk.object), []).append(_Item(tensor, at, chunk, target, not full))
        await _decode_all(store, work)
        self._at = manifest

    def weights(self) -> Weights:
        """Return the weights built so far, which are read-only from then on."""
        for data in self._own.values():
            data.setflags(write=False)
        return dict(self._weights)

    def _writable(self, tensor: Tensor) -> NDArray[np.uint8]:
        """Return the tensor's bytes in memory of this object's own, with the old content if there was any."""
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
        """Check that the tensors are the same, and that each chunk declared unchanged has the hash that was verified before."""
        form = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
        if self._at is None or form != {name: (array.dtype, array.shape) for name, array in self._weights.items()}:
            raise Corrupt(f"manifest {hash}: its tensors do not match those of its parent {manifest.parent}; refused")
        results = {tensor.name: tensor.results for tensor in self._at.tensors}
        for tensor in manifest.tensors:
            for at, chunk in enumerate(tensor.chunks):
                if chunk.codec == delta.EQUAL and chunk.result != results[tensor.name][at]:
                    raise Corrupt(
                        f"manifest {hash}: tensor {tensor.name} chunk {at} is said to be unchanged but has another hash"
                    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Adjacent payloads in an object that are read together: bytes `start` to `end`."""

    object: str
    items: list[_Item]
    start: int
    end: int


def _pieces(work: Mapping[str, list[_Item]]) -> Iterator[_Piece]:
    """Group the items into pieces, object by object. Raises Corrupt for a range beyond the largest allowed object."""
    for name, items in work.items():
        together: list[_Item] = []
        start = end = 0
        for item in sorted(items, key=lambda item: item.chunk.offset):
            first, last = item.chunk.offset, item.chunk.offset + item.chunk.length
            if last > MAX_OBJECT_BYTES:
                raise Corrupt(
                    f"{item.where}: the manifest needs {last} bytes of it; no object has more than {MAX_OBJECT_BYTES}"
                )
            if together and max(end, last) - start > _PIECE_BYTES:
                yield _Piece(name, together, start, end)
                together = []
            start, end = (start, max(end, last)) if together else (first, last)
            together.append(item)
        yield _Piece(name, together, start, end)


async def _decode_all(store: WeightStore, work: Mapping[str, list[_Item]]) -> None:
    """Read each payload once and decode it. Pieces are read ahead, up to `_READ_AHEAD_BYTES`, while others are decoded."""
    running: dict[asyncio.Task[None], int] = {}
    threads = ThreadPoolExecutor(_DECODER_THREADS)
    try:
        for piece in _pieces(work):
            size = piece.end - piece.start
            while running and sum(running.values()) + size > _READ_AHEAD_BYTES:
                await _first_done(running)
            running[asyncio.create_task(_decode_piece(store, piece, threads))] = size
        while running:
            await _first_done(running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(threads.shutdown)  # no thread may still write when the caller sees an error


async def _first_done(running: dict[asyncio.Task[None], int]) -> None:
    """Wait until a task is done, and remove it. Raises its error."""
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        del running[task]
    for task in done:
        task.result()


async def _decode_piece(store: WeightStore, piece: _Piece, threads: Executor) -> None:
    payloads = await _payloads(store, piece)
    pairs = list(zip(piece.items, payloads, strict=True))
    parts = [pairs[start::_DECODER_THREADS] for start in range(_DECODER_THREADS)]  # a small delta is a single piece
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.run_in_executor(threads, _decode, part) for part in parts))


async def _payloads(store: WeightStore, piece: _Piece) -> list[memoryview]:
    """Read the payloads of one piece together. Payloads with a wrong hash are read again, each by itself."""
    try:
        data = memoryview(await store.get_range(piece.object, piece.start, piece.end - piece.start))
    except Corrupt:  # the object is too short, but may hold some of the payloads
        data = memoryview(b"")
    places = [item.chunk.offset - piece.start for item in piece.items]
    payloads = [data[at : at + item.chunk.length] for at, item in zip(places, piece.items, strict=True)]
    good = await asyncio.to_thread(
        lambda: [part_hash(part) == item.chunk.payload for item, part in zip(piece.items, payloads, strict=True)]
    )
    for at, item in enumerate(piece.items):
        if not good[at]:
            payloads[at] = await _read_again(store, piece.object, item)
    return payloads


async def _read_again(store: WeightStore, name: str, item: _Item) -> memoryview:
    """Read one payload by itself, in up to `_ATTEMPTS` attempts. Raises Corrupt or NotFound, naming the object."""
    why = ""
    start, length = item.chunk.offset, item.chunk.length
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if attempt < _ATTEMPTS:
                data = await store.get_range(name, start, length)
            else:  # the last attempt reads the whole object, because some stores verify their copy only then
                data = (await store.get(name))[start : start + length]
        except Corrupt as error:
            why = f" ({error})"
            continue
        if part_hash(data) == item.chunk.payload:
            return memoryview(data)
    raise Corrupt(
        f"{item.where}: its payload does not have the hash in the manifest{why}. Restore the object, or publish again"
    )


def _decode(pairs: list[tuple[_Item, memoryview]]) -> None:
    for item, payload in pairs:
        try:
            delta.decode(item.chunk.codec, item.target, payload, dtype=item.tensor.dtype, old=item.old)
        except Corrupt as error:
            raise Corrupt(f"{item.where}: {error}. Restore the object, or publish again") from error
        if hash_of(item.target) != item.chunk.result:
            raise Corrupt(
                f"{item.where}: its decoded bytes do not have the hash {item.chunk.result}. Restore it, or publish again"
            )


# ---------------------------------------------------------------- rebuilding


logger = logging.getLogger(__name__)


async def rebuild(store: WeightStore, manifests: Manifests, hash: str, known: Known, max_bytes: int) -> Loaded:
    """Build the weights of the manifest `hash` by the cheapest undamaged route, with every step verified.

    Raises:
        NotFound: an object is missing, and every route needs it.
        Corrupt: an object, manifest or chunk does not match its hash or declaration; the message names the object.
    """
    target = await manifests.read(hash)
    damaged: dict[str, NotFound | Corrupt] = {}
    while True:
        try:
            start, hops = await cheapest(manifests, hash, known, frozenset(damaged), max_bytes)
        except (NotFound, Corrupt):
            if damaged:  # the first error is more informative than "no route is left"
                raise next(iter(damaged.values())) from None
            raise
        shadow = Shadow(start)
        for hop in hops:
            try:
                manifest = await manifests.read(hop)
                check_size(hop, manifest, max_bytes)
                await shadow.apply(store, hop, manifest)
            except (NotFound, Corrupt) as error:
                logger.warning("version %s: %s; trying another route", target.policy, error)
                damaged[hop] = error
                break
        else:
            if shadow.root == target.root:
                return Loaded(hash, target, shadow.weights())
            damaged[hops[-1]] = Corrupt(f"manifest {hops[-1]}: has root {shadow.root}, not {target.root}; refused")
