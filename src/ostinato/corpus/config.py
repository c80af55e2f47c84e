"""Configuration of a corpus build."""

from __future__ import annotations

from pydantic import BaseModel, Field


class CorpusConfig(BaseModel, frozen=True, extra="forbid"):
    """The limits of a build, which are written into its manifest."""

    suffixes: tuple[str, ...] = Field(
        default=(".py", ".pyi", ".md", ".rst", ".txt"), min_length=1, description="Endings of the files that are read."
    )
    least_bytes: int = Field(default=64, ge=1, description="A shorter file is left out.")
    most_bytes: int = Field(
        default=256 << 10, ge=1, description="A longer file is left out: data more often than code."
    )
    longest_line: int = Field(
        default=1000, ge=1, description="Characters of a line beyond which a file is left out as generated."
    )
    least_letters: float = Field(
        default=0.25, ge=0, le=1, description="Share of letters below which a file is left out as data."
    )
    near: float = Field(
        default=0.7,
        gt=0,
        le=1,
        description="Jaccard similarity of two files' 5-word shingles from which the later one is left out; 1: exact copies only. "
        "0.7 with 5-grams is BigCode's.",
    )
    gram: int = Field(
        default=13,
        ge=2,
        description="Words in a row that a file may not share with what it is tested on. 13 is GPT-3's (2005.14165, appendix C).",
    )
    shortest: int = Field(
        default=8,
        ge=2,
        description="A tested string of fewer words than `gram` but at least these is looked for as a whole.",
    )
    shard_tokens: int = Field(
        default=1 << 22, ge=1024, description="Tokens of a shard, about: what a reader holds at once."
    )
