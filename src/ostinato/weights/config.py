"""The weight store's configuration: its location, publishing, following, garbage collection, and relays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from ostinato.weights.version.content import MAX_LINKS, MAX_OBJECT_BYTES


class BucketConfig(BaseModel, frozen=True, extra="forbid"):
    """The location of the weight store, and the settings of a bucket's client."""

    url: str = Field(
        default="",
        description="Where versions of the weights are stored: s3://bucket/path, gs://bucket/path, az://container/path, a relay "
        "(http://host:port, read only) or a directory. Empty: inside the run's directory.",
    )
    part_bytes: int = Field(
        default=1 << 23,
        ge=5 << 20,
        le=1 << 28,
        description="Part size in bytes. Larger objects are uploaded and read in parallel parts of this size.",
    )
    parallel: int = Field(
        default=16, ge=1, le=64, description="Concurrent parts of an upload, and concurrent reads of parts."
    )
    timeout_s: float = Field(default=60.0, gt=0, description="Timeout of one request, in seconds.")
    retries: int = Field(default=10, ge=0, description="Retries of a failed request, with exponential back-off.")
    renew_s: float = Field(
        default=3600.0,
        ge=0,
        description="Age, in seconds, above which an existing object is uploaded again, so that a concurrent garbage collection does not "
        "delete it.",
    )
    options: dict[str, str] = Field(
        default_factory=dict,
        description="Settings passed to obstore, such as aws_region or aws_endpoint. For http(s) URLs: request headers.",
    )


# ---------------------------------------------------------------- following


class FollowerConfig(BaseModel, frozen=True, extra="forbid"):
    """How a follower fetches, verifies and keeps weights."""

    keep: int = Field(
        default=3, ge=1, le=64, description="Versions kept in memory, as bases for the deltas to later versions."
    )
    trusted: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")], ...] = Field(
        default=(),
        description="Public keys. A version that none of them signed is refused. Empty: signatures are not checked.",
    )
    interval_s: float = Field(default=1.0, gt=0, description="Seconds between two checks of the refs.")
    cache: Path | None = Field(
        default=None,
        description="Directory in which this engine caches objects, up to relay.max_bytes. No other process may use it.",
    )
    max_bytes: int = Field(
        default=2**38,
        gt=0,
        description="Most bytes of weights that a version may declare. A larger version is refused.",
    )


# ---------------------------------------------------------------- garbage collection


class CollectConfig(BaseModel, frozen=True, extra="forbid"):
    """What garbage collection keeps in addition to the versions that refs name."""

    keep: int = Field(default=20, ge=1, description="Number of newest versions that are kept, by version number.")
    releases: int = Field(default=10, ge=0, description="Number of last released versions that are kept.")
    grace_hours: float = Field(
        default=24.0,
        ge=0,
        description="Grace period, in hours: nothing younger is deleted. It must be longer than any publication takes; set it to 0 only "
        "while nobody publishes.",
    )
    lease_s: float = Field(
        default=3600.0, gt=0, description="Seconds for which a follower's lease is valid after its last renewal."
    )
    parallel: int = Field(default=8, ge=1, le=64, description="Concurrent requests to the store.")


# ---------------------------------------------------------------- publishing


class PublisherConfig(BaseModel, frozen=True, extra="forbid"):
    """When a full snapshot is due, and how payloads are stored."""

    anchor_every: int = Field(
        default=25, ge=1, le=MAX_LINKS, description="Number of deltas after which a full snapshot is published."
    )
    skips: tuple[Annotated[int, Field(ge=2, le=256)], ...] = Field(
        default=(4, 16),
        max_length=8,
        description="Spans of further deltas, in versions: for each N in this list, every N-th version also gets a delta over N "
        "versions, for followers that have fallen behind. []: none.",
    )
    anchor_share: float = Field(
        default=0.4,
        gt=0,
        description="A full snapshot is also published once the deltas since the last one exceed this share of the model's bytes.",
    )
    level: int = Field(default=1, ge=1, le=3, description="zstd compression level.")
    object_bytes: int = Field(
        default=1 << 26,
        ge=1 << 12,
        le=1 << 29,
        description="Approximate size, in bytes, of the objects that payloads are packed into.",
    )
    verify: bool = Field(
        default=True, description="Decode every payload before it is stored and compare it with the weights."
    )
    finite: bool = Field(default=True, description="Refuse weights that hold NaN or infinity.")
    key: Path | None = Field(
        default=None, description="File with the private key that signs versions, made by `ostinato weights key`."
    )
    threads: int = Field(default=2, ge=1, le=64, description="Threads that encode chunks.")
    scratch: Path | None = Field(
        default=None,
        description="An existing directory on a disk with room for two copies of the weights, where the trainer's publisher keeps the "
        "last published weights instead of in memory. None: the run's directory.",
    )
    max_bytes: int = Field(
        default=2**38,
        gt=0,
        description="Most bytes of weights that a base version may declare. A larger one is refused.",
    )


# ---------------------------------------------------------------- relaying


class RelayConfig(BaseModel, frozen=True, extra="forbid"):
    """The relay: its cache, the address it listens on, and how stale its refs may be."""

    directory: Path | None = Field(
        default=None,
        description="Directory for cached objects. Each process needs its own. None: relay/ in the run's directory.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address to bind. Anyone who can reach it can read the weights, so use a private network.",
    )
    port: int = Field(default=8330, ge=0, le=65535, description="TCP port. 0 lets the system choose.")
    max_bytes: int = Field(
        default=1 << 36,
        ge=MAX_OBJECT_BYTES,
        description="Size of the cache, in bytes. Beyond it, the least recently used objects are evicted.",
    )
    parallel: int = Field(
        default=4, ge=1, le=64, description="Concurrent fetches of objects, each of which is held in memory."
    )
    fresh_s: float = Field(
        default=1.0, ge=0, description="Time to live of a cached ref, in seconds. Then upstream is asked again."
    )
    timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="Timeout, in seconds, of reading a ref from upstream. After a timeout the last known value is served, and upstream is "
        "not asked again for the same time.",
    )
