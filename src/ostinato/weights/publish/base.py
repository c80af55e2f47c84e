"""The last published chunks, the base of the next delta: one copy, in memory or on a disk."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ostinato.core.errors import Corrupt
from ostinato.core.weights import ChunkName, WeightPart
from ostinato.weights import delta
from ostinato.weights.version.content import Hashes, hash_of
from ostinato.weights.version.packing import OldChunk

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """The chunks of a published version that this process holds. `chunk` raises Corrupt if one cannot be read.

    Example::

        base = kept(root, part, hashes, directory)
        old = base.chunk("model.norm.weight", 0)
    """

    root: str
    hashes: Hashes
    chunk: OldChunk

    def is_intact(self) -> bool:
        """True if every chunk still has the hash that was published."""
        try:
            return all(hash_of(self.chunk(*at)) == result for at, result in self.hashes.items())
        except Corrupt:
            return False


def kept(root: str, part: WeightPart, hashes: Hashes, directory: Path | None) -> Base:
    """Keep the chunks in an unnamed file in `directory`, so that their arrays can be freed; without directory or room, in memory."""
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
