"""Settings of a run's processes: when they are restarted, what they clean up, and where Ray places them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class SuperviseConfig(BaseModel, frozen=True, extra="forbid"):
    """When `ostinato up` considers a worker hung, and when it gives up on it."""

    silence_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds without a sign of life after which a worker is killed and restarted.",
    )
    start_s: float = Field(
        default=3600.0,
        gt=0,
        description="Longest start of a worker, in seconds. It includes download, self-test and loading of the model, and version 0.",
    )
    work_s: float = Field(
        default=3600.0,
        gt=0,
        description="Longest single piece of work, in seconds, such as an optimizer step with its publication, or a garbage collection.",
    )
    engine_s: float = Field(
        default=300.0,
        gt=0,
        description="Longest step or command (such as a swap or a scoring) of the engine, in seconds. Then the gateway restarts.",
    )
    stop_s: float = Field(
        default=20.0, gt=0, description="Seconds that a worker has to end after it was asked to. Then it is killed."
    )
    tries: int = Field(
        default=5, ge=1, description="Number of failures of one worker, within `window_s`, after which `up` gives up."
    )
    window_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds without a failure after which a worker's earlier failures are forgotten.",
    )
    longest_wait_s: float = Field(
        default=30.0,
        gt=0,
        description="Longest pause before a failed worker is restarted, in seconds. The first pause is half a second.",
    )


class HousekeepingConfig(BaseModel, frozen=True, extra="forbid"):
    """What `ostinato up` cleans up by itself, and how often."""

    every_s: float = Field(default=3600.0, gt=0, description="Seconds between two rounds of housekeeping.")
    collect: bool = Field(
        default=True, description="Delete versions of the weights that nothing needs, by the rules in `collect`."
    )
    log_mb: float = Field(
        default=16.0,
        gt=0,
        description="Size of a worker's output or progress file, in megabytes, above which it is rotated. One old part is kept.",
    )


class RayConfig(BaseModel, frozen=True, extra="forbid"):
    """Where Ray places the workers of `ostinato up --on ray`."""

    address: str = Field(
        default="auto",
        description="Address of the Ray cluster: auto for the one that this machine belongs to, or host:port.",
    )
    rollouts: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Rollout workers at the start. `ostinato scale rollout 4` changes the number while the run is up.",
    )
    cpus: dict[str, float] = Field(
        default_factory=dict[str, float],
        description="CPUs per worker, by the worker's name (serve, train, release, housekeeping, rollout). Default: 1 each.",
    )
    resources: dict[str, dict[str, float]] = Field(
        default_factory=dict[str, dict[str, float]],
        description="Other node resources per worker, by the worker's name: [ray.resources.train] with GPU = 1, or a name given to `ray "
        "start --resources`.",
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="SPREAD",
        description="How Ray places the workers other than rollouts on nodes: together (PACK) or apart (SPREAD). With STRICT_ in front, "
        "Ray does not place them at all if it cannot do so.",
    )
    patience_s: float = Field(
        default=10.0, gt=0, description="Seconds without an answer after which a node counts as unreachable."
    )
