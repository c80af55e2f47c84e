"""Settings of rollouts in simulated worlds, on this machine and on remote workers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from ostinato.worlds.grading.effort import EffortConfig
from ostinato.worlds.grading.rubrics import RubricConfig

# ---------------------------------------------------------------- remote workers


class DoorConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.door]`: the server to which remote rollout workers connect, each with its own certificate."""

    host: str = Field(default="", description="Address to bind. Empty: no server for remote workers.")
    port: int = Field(default=8443, ge=0, le=65535, description="TCP port. 0 lets the system choose.")
    certificate: str = Field(default="", description="The door's certificate chain (PEM file).")
    key: str = Field(default="", description="The door's private key (PEM file).")
    authority: str = Field(
        default="",
        description="PEM file of the CA certificates that sign the workers' certificates. They should sign no others.",
    )
    names: tuple[str, ...] = Field(
        default=(),
        description="Common names of the workers that may connect, as in their certificates. Empty: every worker with a validly signed "
        "certificate.",
    )
    refused: str = Field(
        default="",
        description="Revocation list: a file with the serial numbers of certificates that are refused although validly signed. One number "
        "per line, in hexadecimal as `openssl x509 -serial` prints it; `#` begins a comment. It is read again within a second of a change. "
        "Empty: none.",
    )
    connections: int = Field(
        default=256, ge=1, description="Most open connections per worker. More are closed at once."
    )
    calls: int = Field(default=64, ge=1, description="Most concurrent requests per worker. More get 429.")
    body_bytes: int = Field(
        default=2 << 20, ge=1024, description="Longest request body, in bytes. Longer ones get 413."
    )


class ConnectConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.connect]`, or the options of `ostinato rollout`: the door that the worker connects to."""

    url: str = Field(
        default="", pattern=r"^(https://[^/]+/?)?$", description="The door's URL, https://host:port. Empty: none."
    )
    certificate: str = Field(default="", description="This worker's certificate chain (PEM file).")
    key: str = Field(default="", description="This worker's private key (PEM file).")
    authority: str = Field(default="", description="PEM file of the CA certificates that sign the door's certificate.")


class WorldsConfig(BaseModel, frozen=True, extra="forbid"):
    """Rollouts in simulated worlds, for `learn.source` "worlds" or "both"."""

    file: str = Field(default="", description="The taskset file (JSONL). Empty: there is no simulated world.")
    group: int = Field(
        default=16,
        ge=1,
        le=128,
        description="Group size: rollouts per task. Their values are compared with each other.",
    )
    group_first: int = Field(
        default=4,
        ge=0,
        description="Rollouts of a group that run first. The others do not run if the first all get the same grade. 0: all run at once.",
    )
    suspects: int = Field(
        default=0,
        ge=0,
        le=128,
        description="Failed rollouts of a group that are resampled from one of their turns: the turn at which the belief in the task's "
        "known answer (its field `known`) fell most. The calls before that turn are replayed in a new sandbox. 0: none.",
    )
    suspect_tries: int = Field(
        default=8,
        ge=2,
        le=128,
        description="Number of times that each of these rollouts is resampled. The answers at that turn are compared with each other.",
    )
    groups: int = Field(default=8, ge=1, description="Groups of rollouts per optimizer step.")
    concurrency: int = Field(default=16, ge=1, description="Rollouts in progress at once.")
    lead: int = Field(
        default=2,
        ge=1,
        description="Backpressure: no new group begins while this many optimizer steps' worth of groups are in progress or wait for the "
        "trainer.",
    )
    window: int = Field(
        default=16,
        ge=1,
        description="Number of consecutive groups that may be in progress, counted from the oldest unfinished one. Within this window, "
        "groups are trained on in the order in which they finish. No group begins beyond it, so that quick groups do not crowd out slow "
        "ones. A group is at most lead + window / groups + 2 steps stale. Beyond `reward.world_staleness` it is held back.",
    )
    epochs: int = Field(
        default=1,
        ge=0,
        description="Number of times that each task is drawn. 0: no limit. With 1, as published, no prompt is repeated.",
    )
    seed: int = Field(default=0, description="Seed for the order of the tasks.")
    curriculum: bool = Field(
        default=True,
        description="Draw tasks first whose recent solve rate is between a tenth and nine tenths, and tasks that were never tried. No task "
        "is left out. In the first epoch no rates are known yet.",
    )
    temperature: float = Field(default=1.0, gt=0, le=2, description="Sampling temperature of rollouts.")
    tries: int = Field(
        default=3,
        ge=1,
        description="Attempts at a rollout that fails for reasons outside the policy. After the last, its group goes on without it.",
    )
    measure_every: int = Field(
        default=0,
        ge=0,
        description="Number of groups between two measurements of the tasks outside the split `train`. 0: no measurements.",
    )
    patience_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds for which a gateway, sandbox or grader may be unavailable without interruption before the worker exits with "
        "the reason.",
    )
    retry_pause_s: float = Field(
        default=1.0, gt=0, description="Seconds before the first retry of a failed gateway, sandbox or grader."
    )
    poll_s: float = Field(default=0.2, gt=0, description="Seconds between two checks of what the trainer has taken.")
    harness: dict[str, dict[str, Any]] = Field(
        default_factory=dict[str, dict[str, Any]],
        description="Settings of harnesses, by name, as in [worlds.harness.tools].",
    )
    graders: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="Your own graders, by the name that tasks and suites use: module:function. The function takes the task and the "
        "rollout and returns a number from 0 to 1. It runs in a separate process with the worker's permissions, not in a sandbox.",
    )
    grader_memory_bytes: int = Field(
        default=4 << 30, gt=0, description="Memory limit of the process of each of your own graders, in bytes."
    )
    door: DoorConfig = Field(
        default_factory=DoorConfig, description="The server to which remote rollout workers connect, over mutual TLS."
    )
    connect: ConnectConfig = Field(
        default_factory=ConnectConfig,
        description="The door of a run on another machine for which this worker makes rollouts.",
    )
    effort: EffortConfig = Field(
        default_factory=EffortConfig, description="How much effort reduces an outcome's value."
    )
    judge: RubricConfig | None = Field(
        default=None,
        description="A model that judges outcomes axis by axis, in addition to the verifier, or alone for the grader `rubric`: "
        "[worlds.judge] with url, model, key_env, and [[worlds.judge.axes]]. It is sent the prompt and the answer. None: no judge.",
    )
    cheat_quiet: int = Field(
        default=500,
        ge=1,
        description="Number of consecutive graded rollouts without cheating after which the cheating alarm is cleared.",
    )
