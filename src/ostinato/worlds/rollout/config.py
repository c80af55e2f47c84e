"""Settings for rollouts in simulated worlds, on this machine and on others."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from ostinato.worlds.grading.effort import EffortConfig
from ostinato.worlds.grading.rubrics import RubricConfig

# ---------------------------------------------------------------- rollouts on other machines


class DoorConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.door]`: where rollout workers on other machines connect, each with its own certificate."""

    host: str = Field(default="", description="Address to bind. Empty: no door.")
    port: int = Field(default=8443, ge=0, le=65535, description="TCP port; 0 lets the system choose.")
    certificate: str = Field(default="", description="The door's certificate chain (PEM file).")
    key: str = Field(default="", description="The door's private key (PEM file).")
    authority: str = Field(
        default="",
        description="Certificates (PEM file) that sign the workers' certificates. They should sign nobody else's.",
    )
    names: tuple[str, ...] = Field(
        default=(), description="Common names of the certificates of workers that may connect. Empty: all signed ones."
    )
    refused: str = Field(
        default="",
        description="File of the serial numbers of certificates that are refused though validly signed, one a line, in hexadecimal as "
        "`openssl x509 -serial` prints them; `#` begins a comment. It is read again within a second of a change. Empty: none.",
    )
    connections: int = Field(default=256, ge=1, description="Open connections per worker; more are closed at once.")
    calls: int = Field(default=64, ge=1, description="Concurrent requests per worker; more get 429.")
    body_bytes: int = Field(default=2 << 20, ge=1024, description="Longest request, in bytes; longer ones get 413.")


class ConnectConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.connect]`, or the options of `ostinato rollout`: the door that the worker connects to."""

    url: str = Field(
        default="", pattern=r"^(https://[^/]+/?)?$", description="The door's URL, https://host:port. Empty: none."
    )
    certificate: str = Field(default="", description="This worker's certificate chain (PEM file).")
    key: str = Field(default="", description="This worker's private key (PEM file).")
    authority: str = Field(default="", description="Certificates (PEM file) that sign the door's certificate.")


class WorldsConfig(BaseModel, frozen=True, extra="forbid"):
    """Rollouts in simulated worlds, for `learn.source` "worlds" or "both"."""

    file: str = Field(default="", description="The taskset file (JSONL). Empty: no simulated world.")
    group: int = Field(
        default=16, ge=1, le=128, description="Rollouts per task, whose values are compared with each other."
    )
    group_first: int = Field(
        default=4,
        ge=0,
        description="Rollouts of a group that are made before the others, which are made only if the first were not all worth the same. 0: "
        "all at once.",
    )
    suspects: int = Field(
        default=0,
        ge=0,
        le=128,
        description="Failed rollouts of a group that are sampled anew from the turn at which the belief in the task's "
        "known answer (its field `known`) fell most; their calls before that are repeated in a new sandbox. 0: none.",
    )
    suspect_tries: int = Field(
        default=8,
        ge=2,
        le=128,
        description="How often each of them is sampled anew; the answers at that turn are compared with each other.",
    )
    groups: int = Field(default=8, ge=1, description="Groups per optimizer step.")
    concurrency: int = Field(default=16, ge=1, description="Rollouts in progress at once.")
    lead: int = Field(
        default=2,
        ge=1,
        description="Steps' worth of groups that may be in progress or waiting for the trainer; beyond that no group "
        "begins.",
    )
    window: int = Field(
        default=16,
        ge=1,
        description="Groups that may be in progress, counted from the oldest unfinished one. Within the window groups "
        "that finish first are used first; none begins beyond it, so that quick groups do not crowd out slow ones. A "
        "group falls behind by at most lead + window / groups + 2 steps; beyond `reward.world_staleness` it is held "
        "back.",
    )
    epochs: int = Field(
        default=1,
        ge=0,
        description="How often each task is drawn. 0: without end. 1, as published: no prompt is repeated.",
    )
    seed: int = Field(default=0, description="Seeds the order of the tasks.")
    curriculum: bool = Field(
        default=True,
        description="Draw first the tasks of whose latest rollouts a tenth to nine tenths were solved, or that were "
        "never tried. No task is left out; in the first epoch nothing is known yet.",
    )
    temperature: float = Field(default=1.0, gt=0, le=2, description="Sampling temperature of rollouts.")
    tries: int = Field(
        default=3,
        ge=1,
        description="Tries at a rollout that fails for reasons other than the policy; then its group goes on without "
        "it.",
    )
    measure_every: int = Field(
        default=0, ge=0, description="Groups between two measurements of the tasks not in the split `train`. 0: never."
    )
    patience_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds that a gateway, sandbox or grader may be unavailable in one piece; then the worker ends, "
        "and says why.",
    )
    retry_pause_s: float = Field(
        default=1.0, gt=0, description="Seconds before a failed gateway, sandbox or grader is tried again."
    )
    poll_s: float = Field(default=0.2, gt=0, description="Seconds between two looks at what the trainer has taken.")
    harness: dict[str, dict[str, Any]] = Field(
        default_factory=dict[str, dict[str, Any]],
        description="Settings of harnesses, by name, as in [worlds.harness.tools].",
    )
    graders: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="Graders of your own, by the name that tasks and suites use: module:function. The function takes the task and the "
        "rollout, and gives a number from 0 to 1. It is your code, and runs in a process of its own "
        "with the worker's permissions, not in a sandbox.",
    )
    grader_memory_bytes: int = Field(
        default=4 << 30, gt=0, description="Most memory of the process of a grader of your own, in bytes."
    )
    door: DoorConfig = Field(
        default_factory=DoorConfig, description="Where rollout workers on other machines connect, over mutual TLS."
    )
    connect: ConnectConfig = Field(
        default_factory=ConnectConfig, description="The door of a run on another machine to make rollouts for."
    )
    effort: EffortConfig = Field(
        default_factory=EffortConfig, description="How much effort reduces an outcome's value."
    )
    judge: RubricConfig | None = Field(
        default=None,
        description="A model that judges outcomes besides the verifier, and alone for the grader `rubric`, axis by axis: "
        "[worlds.judge] with url, model, key_env, and [[worlds.judge.axes]]. It is sent the prompt and the answer. None: no judge.",
    )
    cheat_quiet: int = Field(
        default=500,
        ge=1,
        description="Graded rollouts in a row without cheating after which the alarm about cheating is cleared.",
    )
