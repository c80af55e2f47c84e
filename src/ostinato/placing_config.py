"""Settings of a run's processes: when they are restarted, what they clean up, and where Ray places them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class SuperviseConfig(BaseModel, frozen=True, extra="forbid"):
    """When `ostinato up` considers a worker hung, and when it gives up on it."""

    silence_s: float = Field(
        default=30.0, gt=0, description="A worker that gives no sign of life for so long is killed and started again."
    )
    start_s: float = Field(
        default=3600.0,
        gt=0,
        description="Longest start of a worker: download, self-test and loading of the model, version 0.",
    )
    work_s: float = Field(
        default=3600.0,
        gt=0,
        description="Longest single piece of work: an optimizer step with its publication, a collection of garbage.",
    )
    engine_s: float = Field(
        default=300.0,
        gt=0,
        description="Longest step or order (a swap, a scoring) of the engine; then the gateway starts again.",
    )
    stop_s: float = Field(
        default=20.0, gt=0, description="Seconds in which a worker ends when it is told to; then it is killed."
    )
    tries: int = Field(
        default=5, ge=1, description="Failures of one worker within `window_s` after which `up` gives up."
    )
    window_s: float = Field(
        default=600.0, gt=0, description="A worker that ran well for so long starts from no failures."
    )
    longest_wait_s: float = Field(
        default=30.0,
        gt=0,
        description="Longest pause before a failed worker is started again; the first is half a second.",
    )


class HousekeepingConfig(BaseModel, frozen=True, extra="forbid"):
    """What `ostinato up` cleans up by itself, and how often."""

    every_s: float = Field(default=3600.0, gt=0, description="Seconds between two rounds.")
    collect: bool = Field(
        default=True, description="Delete versions of the weights that nothing needs, by the rules in `collect`."
    )
    log_mb: float = Field(
        default=16.0,
        gt=0,
        description="A worker's output or progress lines beyond this many MB are set aside; one such part is kept.",
    )


class RayConfig(BaseModel, frozen=True, extra="forbid"):
    """Where Ray places the workers of `ostinato up --on ray`."""

    address: str = Field(
        default="auto", description="The cluster: auto for the one that this machine belongs to, or host:port."
    )
    rollouts: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Rollout workers to begin with; `ostinato scale rollout 4` changes it while the run is up.",
    )
    cpus: dict[str, float] = Field(
        default_factory=dict[str, float],
        description="CPUs that a worker takes, by its name (serve, train, release, housekeeping, rollout); 1 where nothing is said.",
    )
    resources: dict[str, dict[str, float]] = Field(
        default_factory=dict[str, dict[str, float]],
        description="What else a worker takes of a node, by its name: [ray.resources.train] with GPU = 1, or a name that `ray start "
        "--resources` gave.",
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="SPREAD",
        description="How Ray lays the workers other than rollouts over nodes: together (PACK) or apart; STRICT: or not at all.",
    )
    patience_s: float = Field(
        default=10.0, gt=0, description="Seconds without an answer after which a node counts as away."
    )
