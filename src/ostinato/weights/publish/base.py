"""The last published weights, which the next delta is taken against: one copy, in memory or on a disk."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ostinato.core.errors import Corrupt
from ostinato.core.weights import ITEMSIZES, Weights
from ostinato.weights import delta
from ostinato.weights.version.chain import Loaded
from ostinato.weights.version.content import CHUNK_ELEMENTS, chunk_of, hash_of
from ostinato.weights.version.manifest import Manifest
from ostinato.weights.version.packing import OldChunk

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """A published version and its chunks. `chunk` raises Corrupt if one cannot be read.

    Example::

        base = kept(loaded, directory)
        old = base.chunk("model.norm.weight", 0)
    """

    hash: str
    manifest: Manifest
    chunk: OldChunk

    def is_intact(self) -> bool:
        """True if every chunk still has the hash that was published."""
        try:
            return all(
                hash_of(self.chunk(tensor.name, index)) == result
                for tensor in self.manifest.tensors
                for index, result in enumerate(tensor.results)
            )
        except Corrupt:
            return False

    def has_form_of(self, weights: Weights) -> bool:
        """True for the same names, dtypes and shapes."""
        return {tensor.name: (tensor.dtype, tensor.shape) for tensor in self.manifest.tensors} == {
            name: (array.dtype, array.shape) for name, array in weights.items()
        }


def kept(loaded: Loaded, directory: Path | None) -> Base:
    """The version in a file without a name in `directory`, so that its arrays can go; without one, or without room, in memory."""
    if directory is not None:
        try:
            return Base(loaded.hash, loaded.manifest, _on_disk(loaded.weights, directory))
        except OSError as error:
            logger.warning("the last published weights stay in memory: %s cannot hold them: %s", directory, error)
    weights = loaded.weights
    return Base(loaded.hash, loaded.manifest, lambda name, index: chunk_of(weights[name], index))


def _on_disk(weights: Weights, directory: Path) -> OldChunk:
    places: dict[str, tuple[int, int, int]] = {}
    at = 0
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for name, array in weights.items():
            places[name] = (at, array.data.nbytes, CHUNK_ELEMENTS * ITEMSIZES[array.dtype])
            rest = np.ascontiguousarray(array.data).data
            while rest:
                rest = rest[file.write(rest) :]
            at += array.data.nbytes
        descriptor = os.dup(file.fileno())

    def chunk(name: str, index: int) -> delta.Bytes:
        start, size, step = places[name]
        data = np.empty(min(step, size - index * step), np.uint8)
        try:
            got = os.preadv(descriptor, [data.data], start + index * step)
        except OSError as error:
            raise Corrupt(f"the last published weights cannot be read: {error}") from error
        if got != data.nbytes:
            raise Corrupt(f"the last published weights end within tensor {name!r}")
        return data

    weakref.finalize(chunk, os.close, descriptor)
    return chunk
