"""Configuration of publishing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from ostinato.weights.version.content import MAX_LINKS


class PublisherConfig(BaseModel, frozen=True, extra="forbid"):
    """When a full snapshot is due, and how payloads are stored."""

    anchor_every: int = Field(
        default=25, ge=1, le=MAX_LINKS, description="Deltas after which a full snapshot is published."
    )
    skips: tuple[Annotated[int, Field(ge=2, le=256)], ...] = Field(
        default=(4, 16),
        max_length=8,
        description="For each N here, every N-th version gets a delta over N versions, for followers that are behind. "
        "[]: none.",
    )
    anchor_share: float = Field(
        default=0.4,
        gt=0,
        description="Publish a full snapshot once the deltas since the last one exceed this share of the model's "
        "bytes.",
    )
    level: int = Field(default=1, ge=1, le=3, description="zstd compression level.")
    object_bytes: int = Field(
        default=1 << 26,
        ge=1 << 12,
        le=1 << 29,
        description="Payloads are packed into objects of about this many bytes.",
    )
    verify: bool = Field(
        default=True, description="Decode every payload before it is stored and compare it with the weights."
    )
    finite: bool = Field(default=True, description="Refuse weights that hold NaN or infinity.")
    key: Path | None = Field(
        default=None, description="File with the key that signs versions (made by `ostinato weights key`)."
    )
    threads: int = Field(default=2, ge=1, le=64, description="Threads that encode chunks.")
    scratch: Path | None = Field(
        default=None,
        description="An existing directory on a disk with room for two copies of the weights, where the trainer's "
        "publisher keeps the last weights instead of in memory. None: the run's directory.",
    )
    max_bytes: int = Field(
        default=2**38, gt=0, description="A base version that declares more bytes of weights than this is refused."
    )
