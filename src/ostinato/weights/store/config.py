"""Configuration of the weight store's location."""

from __future__ import annotations

from pydantic import BaseModel, Field


class BucketConfig(BaseModel, frozen=True, extra="forbid"):
    """Where weights are kept, and the settings of a bucket's client."""

    url: str = Field(
        default="",
        description="s3://bucket/path, gs://bucket/path, az://container/path, a relay (http://host:port, read only) "
        "or a directory. Empty: inside the run's directory.",
    )
    part_bytes: int = Field(
        default=1 << 23, ge=5 << 20, le=1 << 28, description="Larger objects are sent in parallel parts of this size."
    )
    parallel: int = Field(default=16, ge=1, le=64, description="Parts sent at once.")
    timeout_s: float = Field(default=60.0, gt=0, description="Longest wait for one request, in seconds.")
    retries: int = Field(default=10, ge=0, description="Retries of a failed request, at growing intervals.")
    renew_s: float = Field(
        default=3600.0,
        ge=0,
        description="An existing object older than this many seconds is sent again, so that no collection deletes it "
        "meanwhile.",
    )
    options: dict[str, str] = Field(
        default_factory=dict,
        description="obstore's own settings, such as aws_region or aws_endpoint. For http(s): request headers.",
    )
