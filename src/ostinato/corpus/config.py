"""Configuration of a corpus build."""

from __future__ import annotations

from pydantic import BaseModel, Field


class CorpusConfig(BaseModel, frozen=True, extra="forbid"):
    """The filter settings of a build. They are recorded in its manifest."""

    suffixes: tuple[str, ...] = Field(
        default=(".py", ".pyi", ".md", ".rst", ".txt"), min_length=1, description="Suffixes of the files that are read."
    )
    least_bytes: int = Field(
        default=64, ge=1, description="Smallest size of a file, in bytes. Smaller files are left out."
    )
    most_bytes: int = Field(
        default=256 << 10,
        ge=1,
        description="Largest size of a file, in bytes. Larger files are left out: they are more often data than code.",
    )
    longest_line: int = Field(
        default=1000,
        ge=1,
        description="Longest line, in characters. A file with a longer line is left out as generated.",
    )
    least_letters: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Least share of letters in a file. A file with a smaller share is left out as data.",
    )
    near: float = Field(
        default=0.7,
        gt=0,
        le=1,
        description="Jaccard similarity of two files' 5-word shingles at which the later file is left out as a near copy. 1: exact "
        "copies only. 0.7 with 5-grams is BigCode's setting.",
    )
    gram: int = Field(
        default=13,
        ge=2,
        description="Number of consecutive words that a file must not share with a test. 13 is GPT-3's setting (2005.14165, appendix C).",
    )
    shortest: int = Field(
        default=8,
        ge=2,
        description="Least number of words of a test string with fewer words than `gram` for which it is searched for as a whole.",
    )
    shard_tokens: int = Field(
        default=1 << 22, ge=1024, description="Approximate tokens per shard. A reader holds a whole shard at once."
    )
