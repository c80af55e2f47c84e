"""Configuration of publishing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from ostinato.weights.version.content import MAX_LINKS


class PublisherConfig(BaseModel, frozen=True, extra="forbid"):
    """When a full snapshot is due, and how payloads are stored."""

    anchor_every: int = Field(default=25, ge=1, le=MAX_LINKS, description="A full snapshot after this many deltas.")
    skips: tuple[Annotated[int, Field(ge=2, le=256)], ...] = Field(
        default=(4, 16),
        max_length=8,
        description="Every so many versions a delta over as many, for followers that are behind; [] for none.",
    )
    anchor_share: float = Field(
        default=0.4,
        gt=0,
        description="A full snapshot once the deltas since the last one exceed this share of the model's bytes.",
    )
    level: int = Field(default=1, ge=1, le=3, description="zstd level.")
    object_bytes: int = Field(
        default=1 << 26, ge=1 << 12, le=1 << 29, description="Payloads are packed into objects of about this size."
    )
    verify: bool = Field(
        default=True, description="Decode every payload before it is stored and compare it with the weights."
    )
    finite: bool = Field(default=True, description="Refuse weights that hold NaN or infinity.")
    key: Path | None = Field(
        default=None, description="File with the key that signs versions (`ostinato weights key`)."
    )
    threads: int = Field(default=2, ge=1, le=64, description="Threads that code chunks.")
    scratch: Path | None = Field(
        default=None,
        description="An existing directory on a disk with room for two copies of the weights. The trainer's publisher keeps the "
        "last ones there and not in memory. None: the run's directory.",
    )
    max_bytes: int = Field(
        default=2**38, gt=0, description="A base that declares more bytes of weights than this is refused."
    )
