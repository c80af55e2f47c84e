"""Settings for rewards and credit."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from ostinato.core.records import Purpose

DAY = 86_400.0

Users = Literal["declared", "verified"]
"""Whom the caps count as a person: any user that the caller names, or only users that the tenant proved."""


class BaselineConfig(BaseModel, frozen=True, extra="forbid"):
    """The learned baseline b(x, user)."""

    shrinkage: float = Field(
        default=10.0, gt=0, description="How many turns at the overall mean each user's and prompt's mean starts with."
    )
    ridge: float = Field(default=10.0, gt=0, description="Strength of the pull of the regression's weights towards 0.")
    forget: float = Field(
        default=0.999,
        gt=0,
        le=1,
        description="Weight that older evidence keeps per observed turn: the policy moves on.",
    )
    max_keys: int = Field(
        default=100_000, ge=1, description="Users, and prompts, remembered; the longest unseen go first."
    )


class CoverageConfig(BaseModel, frozen=True, extra="forbid"):
    """When too little feedback is taken to mean that feedback is not arriving."""

    enabled: bool = Field(default=True, description="False: silence is always read as the reward function reads it.")
    min_turns: int = Field(
        default=200, ge=1, description="Turns of a tenant that must have matured before its silence can be judged."
    )
    false_alarm_turns: float = Field(
        default=1e6,
        gt=1,
        description="Turns between two false alarms, at least and on average, while feedback arrives.",
    )


class RewardConfig(BaseModel, frozen=True, extra="forbid"):
    """Rewards and credit."""

    function: str = Field(
        default="ostinato.reward.functions:copilot", description="The reward function, as 'module:function'."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword options of the reward function.")
    answer_s: float = Field(
        default=5.0, gt=0, description="Seconds that a reward function has for one turn before its process is killed."
    )
    memory_bytes: int = Field(
        default=4 << 30, gt=0, description="Bytes of memory that a reward function's process may take for itself."
    )
    load_s: float = Field(default=60.0, gt=0, description="Seconds that a reward function's module has to be imported.")
    max_abs: float = Field(default=100.0, gt=0, le=1e6, description="Largest absolute reward that is believed.")
    settle_s: float = Field(
        default=0.5, ge=0, description="Seconds granted to signals that were received in the window to reach the disk."
    )
    delivery_s: float = Field(
        default=60.0, ge=0, description="Seconds after a turn's end in which its delivery must be on record."
    )
    longest_wait_s: float = Field(
        default=7 * DAY, gt=0, description="Seconds after a turn's end in which its reward must be known."
    )
    batch_wait_s: float = Field(
        default=7 * DAY,
        gt=0,
        description="Seconds after its reward was due until a turn is held back because too few others are there to fill a batch, or, "
        "while the trainer waits for the gate, because newer ones fill it.",
    )
    max_signals: int = Field(default=100, ge=1, description="Signals of one turn that count: the first to be written.")
    max_orphans: int = Field(default=10_000, ge=0, description="Signals about turns yet to come that are remembered.")
    orphan_bytes: int = Field(default=4 << 20, ge=0, description="Bytes of such signals' ids that are remembered.")
    orphan_s: float = Field(default=3600.0, gt=0, description="Seconds after which such a signal is forgotten.")
    remember: int = Field(
        default=50_000, ge=0, description="Decided turns remembered, to tell late feedback from feedback about no turn."
    )
    fold_rows: int = Field(
        default=50_000, ge=1, description="Rows of the log read between two savings of what they add up to."
    )
    min_temperature: float = Field(
        default=0.1,
        ge=0,
        description="Turns sampled below this are not learned from: gradients grow as 1 / temperature.",
    )
    purposes: tuple[Purpose, ...] = Field(
        default=(Purpose.TASK, Purpose.SUBAGENT),
        description="What calls must have been for to be learned from: task, subagent, compaction, side.",
    )
    max_staleness: int = Field(
        default=4, ge=0, description="Optimizer steps that a turn's oldest token may lie behind the trainer."
    )
    world_staleness: int = Field(
        default=8,
        ge=0,
        description="The same for rollouts in simulated worlds, while newer weights answer in the middle of them. A group with one token "
        "that lies further behind is held back as a whole.",
    )
    flat_groups: Literal["hold_back", "train"] = Field(
        default="hold_back",
        description="Groups of a world's rollouts that are all worth the same: their advantages are 0, so that a batch of `worlds.groups` "
        "holds none of them and the trainer's time goes where there is something to learn; train: they are computed all the same, which "
        "applies the KL to them.",
    )
    episode_wait_s: float = Field(
        default=7200.0,
        ge=0,
        description="Seconds after a decided turn's end until it is learned from although its episode goes on.",
    )
    batch_tokens: int = Field(
        default=1 << 17,
        ge=64,
        description="Tokens of a batch at most, what an episode or group shares counted once; no more than a step can learn from in "
        "`supervise.work_s`. A batch has fewer turns if no more fit. An episode of people's beyond a quarter of it is parted, a "
        "group or a single turn held back as too_long; a group of a world's rollouts only beyond all of it.",
    )
    episode_turns: int = Field(
        default=256, ge=1, description="Turns of one episode in a batch; a longer one is parted."
    )
    group_wait_s: float = Field(
        default=60.0, ge=0, description="Seconds without a new turn after which a group counts as complete."
    )
    discount: float = Field(
        default=0.9, ge=0, le=1, description="What a later turn's reward is worth to the turn before it in its episode."
    )
    users: Users = Field(
        default="declared",
        description="Who is a person to the caps: any name that a caller gives, or only verified users, a tenant's others together.",
    )
    user_cap: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Largest share of a batch that one user may have, each episode counting alike, or 2 / users where that is more: one or "
        "two are not capped.",
    )
    user_steps: int = Field(
        default=50,
        ge=0,
        description="Optimizer steps over which one user may have an equal share of what comes at most, whatever their traffic: 0.2% "
        "among 500 users who are equally active. Somebody new may have ten steps' worth at once. 0: only a batch is capped.",
    )
    tenant_cap: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Largest share of a batch that one tenant may have, each episode counting alike; or 2 / tenants where that is more "
        "(one or two are not capped), or what the others' users cannot fill under `user_cap`. Tenants with turns to learn from are dealt "
        "into a batch in turn.",
    )
    baseline: BaselineConfig = Field(default_factory=BaselineConfig, description="The learned baseline.")
    coverage: CoverageConfig = Field(default_factory=CoverageConfig, description="When silence is not believed.")
