"""Configuration of garbage collection."""

from __future__ import annotations

from pydantic import BaseModel, Field


class CollectConfig(BaseModel, frozen=True, extra="forbid"):
    """What garbage collection keeps in addition to the versions that refs name."""

    keep: int = Field(default=20, ge=1, description="How many of the newest versions are kept, by number.")
    releases: int = Field(default=10, ge=0, description="How many of the last released versions are kept.")
    grace_hours: float = Field(
        default=24.0,
        ge=0,
        description="Nothing younger is deleted. Set it longer than any publication takes, and to 0 only while nobody "
        "publishes.",
    )
    lease_s: float = Field(
        default=3600.0, gt=0, description="Seconds that a follower's lease stays valid after it was renewed."
    )
    parallel: int = Field(default=8, ge=1, le=64, description="Concurrent requests.")
