"""Token shards: safetensors files with the concatenated tokens of many documents, their offsets and their digests; and their reader.

Data flow: documents as tokens -> `write_shards` (sorted by digest, so that every shard is a fair sample) -> `ShardSet`, which checks
every file's hash and format once and then holds the tokens of one shard at a time -> `CorpusReader`, which reads a mixture of corpora in
a given order: batches by step, and held-out pieces for evaluation. A shard holds no executable content.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from ostinato.core.errors import BadConfig, Corrupt
from ostinato.corpus.manifest import CorpusManifest, Shard, read_manifest
from ostinato.corpus.order import EndlessOrder, Phase, ReadingOrder, ReadPiece, held_out

Ints = NDArray[np.int64]
Tokens = NDArray[np.int32]
_FORMS = {"tokens": np.int32, "offsets": np.int64, "digests": np.int64}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDocument:
    """A document's digest and its tokens, including the separators around it.

    Example: ``TokenDocument(digest=7, tokens=np.array([0, 318, 257, 0], np.int32))``
    """

    digest: int
    tokens: Tokens


def write_shards(documents: Sequence[TokenDocument], directory: Path, shard_tokens: int) -> tuple[Shard, ...]:
    """Write shards of about `shard_tokens` tokens. The same documents in any order give the same bytes. Raises OSError."""
    return tuple(_write(number, group, directory) for number, group in enumerate(_groups(documents, shard_tokens)))


def _groups(documents: Sequence[TokenDocument], shard_tokens: int) -> Iterator[list[TokenDocument]]:
    group: list[TokenDocument] = []
    held = 0
    for each in sorted(documents, key=lambda document: document.digest):
        if group and held + len(each.tokens) > shard_tokens:
            yield group
            group, held = [], 0
        group.append(each)
        held += len(each.tokens)
    if group:
        yield group


def _write(number: int, group: Sequence[TokenDocument], directory: Path) -> Shard:
    name = f"shard-{number:05d}.safetensors"
    sizes = [len(each.tokens) for each in group]
    arrays = {
        "tokens": np.concatenate([each.tokens for each in group]).astype(np.int32),
        "offsets": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        "digests": np.array([each.digest for each in group], np.int64),
    }
    data = save(arrays)
    (directory / name).write_bytes(data)
    return Shard(file=name, bytes=len(data), blake3=blake3(data).hexdigest(), documents=len(group), tokens=sum(sizes))


def _hashed(path: Path) -> tuple[int, str]:
    return path.stat().st_size, blake3().update_mmap(path).hexdigest()


class ShardSet:
    """A corpus on disk. `sizes_D`, `digests_D`, `shards_D`: tokens, digest and shard of each document, in the order of the shards.

    Raises NotFound and Corrupt for a file that is missing, is a link, or does not match the manifest.

    Example: ``ShardSet(Path("corpus")).tokens(3, 0, 512)`` are the first 512 tokens of the fourth document.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: CorpusManifest = read_manifest(directory)
        parts = [self._index(shard) for shard in self.manifest.shards]
        self._starts = np.concatenate([offsets[:-1] for offsets, _ in parts])
        self.sizes_D: Ints = np.concatenate([np.diff(offsets) for offsets, _ in parts])
        self.digests_D: Ints = np.concatenate([digests for _, digests in parts])
        self.shards_D: Ints = np.repeat(np.arange(len(parts)), [len(digests) for _, digests in parts])
        self._open = -1
        self._tokens = np.empty(0, np.int32)

    def tokens(self, document: int, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of a document. Only one shard is in memory: a different shard replaces the last one."""
        shard = int(self.shards_D[document])
        if shard != self._open:
            self._tokens = np.empty(0, np.int32)  # frees the previous shard first
            self._tokens = _load(self.directory / self.manifest.shards[shard].file)["tokens"]
            self._open = shard
        first = int(self._starts[document])
        return self._tokens[first + start : first + min(stop, int(self.sizes_D[document]))]

    def _index(self, shard: Shard) -> tuple[Ints, Ints]:
        path = self.directory / shard.file
        again = f"build the corpus again, or fetch {shard.file} again"
        if path.is_symlink() or not path.is_file():
            raise Corrupt(f"{path}: missing, or not a plain file; {again}")
        if _hashed(path) != (shard.bytes, shard.blake3):
            raise Corrupt(f"{path}: not the bytes that {self.directory.name}'s manifest promises; {again}")
        arrays = _load(path)
        tokens, offsets, digests = (arrays[name] for name in _FORMS)
        sound = (
            len(tokens) == shard.tokens
            and len(digests) == shard.documents == len(offsets) - 1
            and offsets[0] == 0
            and offsets[-1] == len(tokens)
            and bool((np.diff(offsets) >= 2).all())
            and bool((digests >= 0).all())
            and int(tokens.min()) >= 0
            and int(tokens.max()) < self.manifest.vocabulary
        )
        if not sound:
            raise Corrupt(f"{path}: its documents and tokens do not fit each other or the manifest; {again}")
        return offsets, digests


def _load(path: Path) -> dict[str, NDArray[Any]]:
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise Corrupt(f"{path}: not a safetensors file: {error}") from error
    if {name: array.dtype for name, array in arrays.items()} != _FORMS or any(a.ndim != 1 for a in arrays.values()):
        raise Corrupt(f"{path}: not a shard of tokens; build the corpus again")
    return arrays


# ---------------------------------------------------------------- reading in a given order


class CorpusReader:
    """Reads a mixture of corpora. Memory: one shard of each corpus, 24 bytes a document and 56 a stretch of the longest phase's length.

    Args:
        corpora: all built with the same tokenizer.
        weights: each corpus's share of the tokens.
        phases: lengths of windows, in order.
        batch_tokens: predictions per step.
        steps: total number of steps.
        share: the share of documents that are held out, chosen by their digests.
        seed: seed of the order.

    Raises BadConfig for different tokenizers, or a corpus too small to hold some documents out and read the rest.

    Example::

        reader = CorpusReader([ShardSet(Path("corpus"))], [1.0], [Phase(length=512)], batch_tokens=8192, steps=100, share=0.01, seed=0)
        reader.batch(17)  # the pieces of step 17, each a tuple of tokens: the first is given, the others are predicted
    """

    def __init__(
        self,
        corpora: Sequence[ShardSet],
        weights: Sequence[float],
        phases: Sequence[Phase],
        *,
        batch_tokens: int,
        steps: int,
        share: float,
        seed: int,
    ) -> None:
        if len({(each.manifest.tokenizer, each.manifest.separator) for each in corpora}) != 1:
            raise BadConfig("--corpus: the corpora were made with different tokenizers; build them for one model")
        self._corpora, self._weights = corpora, weights
        self._longest = max(phase.length for phase in phases)
        rows: list[EndlessOrder] = []
        self._held: list[EndlessOrder] = []
        for number, each in enumerate(corpora):
            apart = held_out(each.digests_D, share)
            if apart.all() or (share and not apart.any()):
                raise BadConfig(
                    f"--held-out {share:g} of the {len(apart)} files in {each.directory} leaves {int((~apart).sum())} to read and "
                    f"{int(apart.sum())} to measure on, and it takes some of both: give another share, or more files"
                )
            arrays = (each.sizes_D, each.digests_D, each.shards_D)
            rows.append(EndlessOrder(number, *arrays, np.flatnonzero(~apart), longest=self._longest, seed=seed))
            self._held.append(EndlessOrder(number, *arrays, np.flatnonzero(apart), longest=self._longest, seed=0))
        self._rows = rows
        self._order = ReadingOrder(rows, weights, phases, batch_tokens=batch_tokens, steps=steps)

    def epochs(self, predictions: int) -> float:
        """The number of epochs, after so many predictions, of the corpus that is repeated most."""
        total = sum(self._weights)
        return max(predictions * w / total / row.length for w, row in zip(self._weights, self._rows, strict=True))

    def batch(self, step: int) -> list[tuple[int, ...]]:
        """The pieces of a step (from 0), `batch_tokens` predictions in total."""
        return self._tokens(self._order.pieces(step))

    def held_out(self, predictions: int) -> list[tuple[int, ...]]:
        """Pieces from anywhere in the held-out documents: about this many predictions, by the mixture's weights.

        They are the same for every seed.
        """
        found: list[tuple[int, ...]] = []
        for row, weight in zip(self._held, self._weights, strict=True):
            wanted = math.ceil(predictions * weight / sum(self._weights))
            found += self._tokens(row.pieces(0, min(wanted, row.length), self._longest))
        return found

    def _tokens(self, pieces: Sequence[ReadPiece]) -> list[tuple[int, ...]]:
        found = (self._corpora[each.corpus].tokens(each.document, each.start, each.stop + 1) for each in pieces)
        return [tuple(tokens.tolist()) for tokens in found]
