"""Token shards: safetensors files with the concatenated tokens of many documents, their offsets and their digests; and their reader.

Data flow: tokenized documents -> `write_shards` (sorted by digest, so that every shard is a random sample) -> `ShardSet`, which verifies
every file's hash and format once and then keeps one shard's tokens in memory -> `CorpusReader`, which reads a mixture of corpora in a
deterministic order: batches by step, and held-out pieces for evaluation. A shard contains no executable code.

A corpus's manifest, `corpus.json`, is parsed strictly. Its paths cannot leave its directory, since shards are named by number.
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
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from ostinato.core.errors import BadConfig, Corrupt, NotFound
from ostinato.corpus.config import CorpusConfig
from ostinato.corpus.order import EndlessOrder, Phase, ReadingOrder, ReadPiece, held_out

# ---------------------------------------------------------------- the manifest


FORMAT = "ostinato-corpus@1"
MANIFEST = "corpus.json"
_MAX_BYTES = 256 << 20
_HASH = "^[0-9a-f]{64}$"


class Shard(BaseModel, frozen=True, extra="forbid"):
    """One shard's file, as listed in the manifest."""

    file: str = Field(pattern=r"^shard-[0-9]{5}\.safetensors$", description="File name, beside the manifest.")
    bytes: int = Field(ge=1, description="Size in bytes.")
    blake3: str = Field(pattern=_HASH, description="BLAKE3 of the file's bytes.")
    documents: int = Field(ge=1, description="Files in the shard.")
    tokens: int = Field(ge=2, description="Tokens in the shard, including the separators around each file.")


class SourceShare(BaseModel, frozen=True, extra="forbid"):
    """One source and its contribution to the corpus."""

    name: str = Field(description="Package with version, archive, or directory name.")
    licence: str = Field(description="Licence as its metadata states it.")
    sha256: str = Field(
        default="", description="SHA-256 of the archive, as the index states it. Empty for a directory."
    )
    documents: int = Field(default=0, ge=0, description="The source's files in the corpus.")
    tokens: int = Field(default=0, ge=0, description="Tokens of these files.")


class Refusal(BaseModel, frozen=True, extra="forbid"):
    """A refused source, or a file that overlaps with a test."""

    source: str = Field(description="The source it is from.")
    path: str = Field(description="The file. Empty for the whole source.")
    reason: str = Field(description="The reason, in a word.")
    detail: str = Field(description="The licence, or the test and the words that both contain.")


class CorpusManifest(BaseModel, frozen=True, extra="forbid"):
    """A corpus's manifest: its shards, and how it was built."""

    format: str = Field(pattern=f"^{FORMAT}$", description="Format of this file.")
    tokenizer: str = Field(pattern=_HASH, description="BLAKE3 of the model's tokenizer.json.")
    vocabulary: int = Field(ge=1, description="Exclusive upper bound of all token ids.")
    separator: int = Field(ge=0, description="The token id before and after each file.")
    settings: CorpusConfig = Field(description="Limits of the build.")
    against: dict[str, str] = Field(description="Tests that no file may contain a part of: name -> BLAKE3.")
    sources: tuple[SourceShare, ...] = Field(description="Sources in the order in which they were given.")
    left_out: dict[str, int] = Field(description="Number of files and sources left out, by reason.")
    refused: tuple[Refusal, ...] = Field(
        description="Each refused source, and each file that contains a part of a test."
    )
    documents: int = Field(ge=1, description="Files in all shards.")
    tokens: int = Field(ge=2, description="Tokens in all shards.")
    shards: tuple[Shard, ...] = Field(min_length=1, max_length=100_000, description="The shards, in order.")


def read_manifest(directory: Path) -> CorpusManifest:
    """Read and validate the manifest. Raises NotFound if it is missing, Corrupt if it is invalid; both name the remedy."""
    path = directory / MANIFEST
    if not path.is_file() or path.is_symlink():
        raise NotFound(
            f"{directory} holds no corpus: make one with `ostinato corpus build ... --out {directory}`", field="corpus"
        )
    if path.stat().st_size > _MAX_BYTES:
        raise Corrupt(f"{path} is larger than {_MAX_BYTES >> 20} MiB; build the corpus again")
    try:
        manifest = CorpusManifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Corrupt(f"{path}: {where}: {first['msg']}; build the corpus again") from error
    if len({shard.file for shard in manifest.shards}) != len(manifest.shards):
        raise Corrupt(f"{path}: shards: one is named twice; build the corpus again")
    if manifest.tokens != sum(s.tokens for s in manifest.shards) or manifest.documents != sum(
        s.documents for s in manifest.shards
    ):
        raise Corrupt(f"{path}: the shards' documents and tokens do not add up; build the corpus again")
    return manifest


# ---------------------------------------------------------------- the shards


Ints = NDArray[np.int64]
Tokens = NDArray[np.int32]
_DTYPES = {"tokens": np.int32, "offsets": np.int64, "digests": np.int64}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDocument:
    """A document's digest, and its tokens including the separators around it.

    Example: ``TokenDocument(digest=7, tokens=np.array([0, 318, 257, 0], np.int32))``
    """

    digest: int
    tokens: Tokens


def write_shards(documents: Sequence[TokenDocument], directory: Path, shard_tokens: int) -> tuple[Shard, ...]:
    """Write shards of about `shard_tokens` tokens. The same documents in any order give the same bytes. Raises OSError."""
    return tuple(_write(number, group, directory) for number, group in enumerate(_groups(documents, shard_tokens)))


def _groups(documents: Sequence[TokenDocument], shard_tokens: int) -> Iterator[list[TokenDocument]]:
    group: list[TokenDocument] = []
    size = 0
    for each in sorted(documents, key=lambda document: document.digest):
        if group and size + len(each.tokens) > shard_tokens:
            yield group
            group, size = [], 0
        group.append(each)
        size += len(each.tokens)
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


class ShardSet:
    """A corpus on disk, verified when it is opened.

    `sizes_D`, `digests_D`, `shards_D`: number of tokens, digest and shard of each document, in the order of the shards. Raises NotFound or
    Corrupt for a file that is missing, is a link, or does not match the manifest.

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
        """Return tokens [start, stop) of a document. Only one shard is kept in memory; another document's shard replaces it."""
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
        if (path.stat().st_size, blake3().update_mmap(path).hexdigest()) != (shard.bytes, shard.blake3):
            raise Corrupt(f"{path}: its size or hash differs from {self.directory.name}'s manifest; {again}")
        arrays = _load(path)
        tokens, offsets, digests = (arrays[name] for name in _DTYPES)
        valid = (
            len(tokens) == shard.tokens
            and len(digests) == shard.documents == len(offsets) - 1
            and offsets[0] == 0
            and offsets[-1] == len(tokens)
            and bool((np.diff(offsets) >= 2).all())
            and bool((digests >= 0).all())
            and int(tokens.min()) >= 0
            and int(tokens.max()) < self.manifest.vocabulary
        )
        if not valid:
            raise Corrupt(f"{path}: its documents and tokens contradict each other or the manifest; {again}")
        return offsets, digests


def _load(path: Path) -> dict[str, NDArray[Any]]:
    try:
        arrays = load_file(path)
    # AttributeError: a dtype that numpy lacks
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path}: not a safetensors file: {error}") from error
    if {name: array.dtype for name, array in arrays.items()} != _DTYPES or any(a.ndim != 1 for a in arrays.values()):
        raise Corrupt(f"{path}: not a shard of tokens; build the corpus again")
    return arrays


# ---------------------------------------------------------------- the reader


class CorpusReader:
    """Reads a mixture of corpora, with held-out documents for evaluation.

    Memory: one shard of each corpus, 24 bytes per document and 56 bytes per stretch of the longest phase's length.

    Args:
        corpora: all built with the same tokenizer.
        weights: each corpus's share of the tokens.
        phases: window lengths, in order.
        batch_tokens: predictions per step.
        steps: total number of steps.
        share: the share of documents that are held out, chosen by their digests.
        seed: seed of the order.

    Raises BadConfig for different tokenizers, or a corpus too small to split into documents to read and to hold out.

    Example::

        reader = CorpusReader([ShardSet(Path("corpus"))], [1.0], [Phase(length=512)], batch_tokens=8192, steps=100, share=0.01, seed=0)
        reader.batch(17)  # the pieces of step 17, each a tuple of tokens: the first is context only, the others are predicted
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
        self._held_out_rows: list[EndlessOrder] = []
        for number, each in enumerate(corpora):
            is_held_out = held_out(each.digests_D, share)
            if is_held_out.all() or (share and not is_held_out.any()):
                raise BadConfig(
                    f"--held-out {share:g} of the {len(is_held_out)} files in {each.directory} leaves {int((~is_held_out).sum())} "
                    f"to train on and {int(is_held_out.sum())} to evaluate on; both must be at least 1: give another share, or more files"
                )
            arrays = (each.sizes_D, each.digests_D, each.shards_D)
            rows.append(EndlessOrder(number, *arrays, np.flatnonzero(~is_held_out), longest=self._longest, seed=seed))
            self._held_out_rows.append(
                EndlessOrder(number, *arrays, np.flatnonzero(is_held_out), longest=self._longest, seed=0)
            )
        self._rows = rows
        self._order = ReadingOrder(rows, weights, phases, batch_tokens=batch_tokens, steps=steps)

    def epochs(self, predictions: int) -> float:
        """Return the number of epochs over the corpus that is repeated most, after this many predictions."""
        total = sum(self._weights)
        return max(predictions * w / total / row.length for w, row in zip(self._weights, self._rows, strict=True))

    def batch(self, step: int) -> list[tuple[int, ...]]:
        """Return the pieces of a step (from 0) as tuples of tokens, `batch_tokens` predictions in total."""
        return self._tokens(self._order.pieces(step))

    def held_out(self, predictions: int) -> list[tuple[int, ...]]:
        """Return a shuffled sample of pieces of the held-out documents: about this many predictions, by the mixture's weights.

        The sample is the same for every seed.
        """
        token_pieces: list[tuple[int, ...]] = []
        for row, weight in zip(self._held_out_rows, self._weights, strict=True):
            wanted = math.ceil(predictions * weight / sum(self._weights))
            token_pieces += self._tokens(row.pieces(0, min(wanted, row.length), self._longest))
        return token_pieces

    def _tokens(self, pieces: Sequence[ReadPiece]) -> list[tuple[int, ...]]:
        token_pieces = (self._corpora[each.corpus].tokens(each.document, each.start, each.stop + 1) for each in pieces)
        return [tuple(tokens.tolist()) for tokens in token_pieces]
