"""Configuration of a corpus build."""

from __future__ import annotations

from pydantic import BaseModel, Field


class CorpusConfig(BaseModel, frozen=True, extra="forbid"):
    """The limits of a build, which are written into its manifest."""

    suffixes: tuple[str, ...] = Field(
        default=(".py", ".pyi", ".md", ".rst", ".txt"), min_length=1, description="Suffixes of the files that are read."
    )
    least_bytes: int = Field(default=64, ge=1, description="Files of fewer bytes are left out.")
    most_bytes: int = Field(
        default=256 << 10, ge=1, description="Files of more bytes are left out: they are more often data than code."
    )
    longest_line: int = Field(
        default=1000, ge=1, description="A file with a line of more characters than this is left out as generated."
    )
    least_letters: float = Field(
        default=0.25, ge=0, le=1, description="A file with a smaller share of letters than this is left out as data."
    )
    near: float = Field(
        default=0.7,
        gt=0,
        le=1,
        description="Jaccard similarity of two files' 5-word shingles from which the later one is left out. 1: exact "
        "copies only. 0.7 with 5-grams is BigCode's setting.",
    )
    gram: int = Field(
        default=13,
        ge=2,
        description="Words in a row that a file may not share with a test. 13 is GPT-3's setting (2005.14165, "
        "appendix C).",
    )
    shortest: int = Field(
        default=8,
        ge=2,
        description="A test string with fewer words than `gram` but at least this many is searched for as a whole.",
    )
    shard_tokens: int = Field(
        default=1 << 22, ge=1024, description="Approximate tokens per shard, which a reader holds at once."
    )
