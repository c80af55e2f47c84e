"""Configuration of a relay."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field

from ostinato.weights.version.content import MAX_OBJECT_BYTES


class RelayConfig(BaseModel, frozen=True, extra="forbid"):
    """What a relay keeps, where it listens, and how old its refs may be."""

    directory: Path | None = Field(
        default=None,
        description="Directory for objects; one process per directory. None: relay/ in the run's directory.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address to bind. Anyone who can reach it can read the weights: use a private network.",
    )
    port: int = Field(default=8330, ge=0, le=65535, description="TCP port; 0 lets the system choose.")
    max_bytes: int = Field(
        default=1 << 36,
        ge=MAX_OBJECT_BYTES,
        description="Bytes of objects above which the least recently used ones are deleted.",
    )
    parallel: int = Field(default=4, ge=1, le=64, description="Objects fetched at once; each is held in memory.")
    fresh_s: float = Field(
        default=1.0, ge=0, description="Seconds that a ref is served before upstream is asked again."
    )
    timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="Longest wait for upstream's answer about a ref, in seconds; then the last known one is served, "
        "and upstream is left alone as long again.",
    )
