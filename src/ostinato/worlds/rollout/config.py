"""Settings for rollouts in simulated worlds."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from ostinato.worlds.grading.effort import EffortConfig
from ostinato.worlds.grading.rubrics import RubricConfig
from ostinato.worlds.remote.config import ConnectConfig, DoorConfig


class WorldsConfig(BaseModel, frozen=True, extra="forbid"):
    """Rollouts in simulated worlds, for `learn.source` "worlds" or "both"."""

    file: str = Field(default="", description="The taskset file (JSONL). Empty: there is no simulated world.")
    group: int = Field(default=16, ge=1, le=128, description="Rollouts per task, which are compared with each other.")
    groups: int = Field(default=8, ge=1, description="Groups per optimizer step.")
    concurrency: int = Field(default=16, ge=1, description="Rollouts at once.")
    lead: int = Field(
        default=2,
        ge=1,
        description="Steps' worth of groups that may be under way or wait for the trainer; then no new one is begun.",
    )
    window: int = Field(
        default=16,
        ge=1,
        description="Groups, counted from the oldest that has not ended, that may be under way: within them whatever ends first counts "
        "first, and beyond them nothing begins, so that what is quick does not crowd out what takes long. With `lead` it bounds how far a "
        "group falls behind: lead + window / groups + 2 steps; beyond `reward.world_staleness` what takes long is held back.",
    )
    epochs: int = Field(
        default=1, ge=0, description="How often each task is drawn; 0: for ever. 1 as published: no prompt is repeated."
    )
    seed: int = Field(default=0, description="Seeds the order of the tasks.")
    curriculum: bool = Field(
        default=True,
        description="Draw tasks first of which a tenth to nine tenths of the latest rollouts were solved, or that were never tried. "
        "Nothing is left out, and in a first epoch nothing is known.",
    )
    temperature: float = Field(default=1.0, gt=0, le=2, description="Sampling temperature of rollouts.")
    tries: int = Field(
        default=3,
        ge=1,
        description="Tries at one rollout that something other than the policy ends; then its group does without.",
    )
    measure_every: int = Field(
        default=0, ge=0, description="Groups between two measurements of the held-out tasks; 0: they are never tried."
    )
    patience_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds that a gateway, sandbox or grader may be away in one piece; then the worker ends, and says why.",
    )
    retry_pause_s: float = Field(
        default=1.0, gt=0, description="Pause before a gateway, sandbox or grader that failed is tried again."
    )
    poll_s: float = Field(default=0.2, gt=0, description="Pause between two looks at what the trainer has taken.")
    harness: dict[str, dict[str, Any]] = Field(
        default_factory=dict[str, dict[str, Any]], description="Settings of harnesses, by name: [worlds.harness.tools]."
    )
    door: DoorConfig = Field(
        default_factory=DoorConfig, description="Where rollout workers of other machines come in, over mutual TLS."
    )
    connect: ConnectConfig = Field(
        default_factory=ConnectConfig, description="The door of another machine's run to make rollouts for."
    )
    effort: EffortConfig = Field(default_factory=EffortConfig, description="What effort takes off an outcome's value.")
    judge: RubricConfig | None = Field(
        default=None,
        description="A model that judges outcomes beside the verifier, axis by axis: [worlds.judge] with url, model, key_env, and "
        "[[worlds.judge.axes]]. What was asked and written is sent there. None: nobody does.",
    )
    cheat_quiet: int = Field(
        default=500,
        ge=1,
        description="Graded rollouts in a row in which nobody cheated, after which the alarm that somebody did is cleared.",
    )
