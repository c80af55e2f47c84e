"""The manifest of a corpus, `corpus.json`, parsed strictly. Its paths stay inside its directory: shards are named by number."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from ostinato.core.errors import Corrupt, NotFound
from ostinato.corpus.config import CorpusConfig

FORMAT = "ostinato-corpus@1"
MANIFEST = "corpus.json"
_MOST_BYTES = 256 << 20
_HASH = "^[0-9a-f]{64}$"


class Shard(BaseModel, frozen=True, extra="forbid"):
    """One file of tokens."""

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
    """A source that was refused, or a file that contains a part of a test."""

    source: str = Field(description="The source it is from.")
    path: str = Field(description="The file. Empty for the whole source.")
    reason: str = Field(description="The reason, in a word.")
    detail: str = Field(description="The licence, or the test and the words that both contain.")


class CorpusManifest(BaseModel, frozen=True, extra="forbid"):
    """A corpus: its shards, and how it was built."""

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
    """Read and check the manifest. Raises NotFound if it is missing, Corrupt if it cannot be used; both say what to do."""
    path = directory / MANIFEST
    if not path.is_file() or path.is_symlink():
        raise NotFound(
            f"{directory} holds no corpus: make one with `ostinato corpus build ... --out {directory}`", field="corpus"
        )
    if path.stat().st_size > _MOST_BYTES:
        raise Corrupt(f"{path} is larger than {_MOST_BYTES >> 20} MiB; build the corpus again")
    try:
        found = CorpusManifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Corrupt(f"{path}: {where}: {first['msg']}; build the corpus again") from error
    if len({shard.file for shard in found.shards}) != len(found.shards):
        raise Corrupt(f"{path}: shards: one is named twice; build the corpus again")
    if found.tokens != sum(s.tokens for s in found.shards) or found.documents != sum(s.documents for s in found.shards):
        raise Corrupt(f"{path}: the shards' documents and tokens do not add up; build the corpus again")
    return found
