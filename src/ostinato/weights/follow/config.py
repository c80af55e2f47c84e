"""Configuration of followers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field


class FollowerConfig(BaseModel, frozen=True, extra="forbid"):
    """How a follower holds weights."""

    keep: int = Field(default=3, ge=1, le=64, description="Versions kept in memory to build the next ones from.")
    trusted: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")], ...] = Field(
        default=(),
        description="Public keys; a version that none of them signed is refused. Empty: signatures are not checked.",
    )
    interval_s: float = Field(default=1.0, gt=0, description="Seconds between two looks at the refs.")
    cache: Path | None = Field(
        default=None, description="Directory, for this engine only, that caches objects, up to relay.max_bytes."
    )
    max_bytes: int = Field(
        default=2**38, gt=0, description="A version that declares more bytes of weights than this is refused."
    )
