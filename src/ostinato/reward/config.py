"""Settings for rewards and credit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, Field, model_validator

from ostinato.core.records import Purpose
from ostinato.reward.functions import OUTCOMES

logger = logging.getLogger(__name__)

DAY = 86_400.0

RENAMED: Mapping[str, Mapping[str, str]] = {"ostinato.reward.functions:agent": {"said": "explicit"}}
"""By reward function, options of the last release and their present names."""

Users = Literal["declared", "verified"]
"""Whom the caps count as a person: any user that the caller names, or only users that the tenant proved."""


class BaselineConfig(BaseModel, frozen=True, extra="forbid"):
    """The learned baseline b(x, user)."""

    shrinkage: float = Field(
        default=10.0, gt=0, description="Pseudo-count of turns at the overall mean in each user's and prompt's mean."
    )
    ridge: float = Field(
        default=1.0,
        gt=0,
        description="Ridge penalty, which pulls the regression towards the overall mean plus the user's and the "
        "prompt's deviation.",
    )
    length_exponent: float = Field(
        default=1.5,
        ge=0,
        le=2,
        description="A turn's evidence counts in proportion to its sampled tokens to this power, since the gradient "
        "of a long answer is large; 0: every turn counts alike.",
    )
    forget: float = Field(
        default=0.999,
        gt=0,
        le=1,
        description="Weight that older evidence keeps per observed turn, as the policy changes.",
    )
    forget_key: float = Field(
        default=0.98,
        gt=0,
        le=1,
        description="Weight that older evidence about a user, or a prompt, keeps per observed turn of theirs, as they "
        "change.",
    )
    max_keys: int = Field(
        default=100_000,
        ge=1,
        description="Users, and prompts, remembered; those unseen for longest are forgotten first.",
    )


class CoverageConfig(BaseModel, frozen=True, extra="forbid"):
    """When too little feedback is taken to mean that feedback is not arriving."""

    enabled: bool = Field(default=True, description="False: silence always counts as the reward function says.")
    min_turns: int = Field(default=200, ge=1, description="Matured turns of a tenant before its silence can be judged.")
    false_alarm_turns: float = Field(
        default=1e6, gt=1, description="Least mean number of turns between two false alarms while feedback arrives."
    )


class HintsConfig(BaseModel, frozen=True, extra="forbid"):
    """Feedback as hints for a teacher of the same weights, at the turn that it is about (self-distillation)."""

    weight: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="Weight of the divergence from the teacher per token of an answer that did worse than expected, whose credit has "
        "an advantage of about 1. 0: nothing is learned from hints, because what one user wrote then moves what others are answered. "
        "Needs `train.ranks` = 1.",
    )
    comments: tuple[str, ...] = Field(
        default=("rejected", "undone"),
        description="Signals whose `comment` is a hint. Name none whose comments hold what the model must not know, such as the expected "
        "values of hidden tests.",
    )
    follow_ups: tuple[str, ...] = Field(
        default=("tool_error", "tool_rejected", "dissatisfied"),
        description="Signals that make a hint of what the conversation went on with: the tool's error, or what the person said next.",
    )
    chars: int = Field(
        default=1_000,
        ge=16,
        le=100_000,
        description="Longest hint, in characters; of a longer text the beginning and the end are taken.",
    )


class BeliefConfig(BaseModel, frozen=True, extra="forbid"):
    """Credit within a world's rollout by how each turn changed the probability of its task's known answer."""

    strength: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Part of a rollout's credit that is divided among its turns by their changes; the rest is shared "
        "evenly. 0: the answer is not scored. Above 0, the engine reads the whole conversation once more after each turn of a task with "
        "`known`.",
    )
    most: float = Field(
        default=8.0,
        gt=1,
        le=1000,
        description="Most times its even share of the rollout's credit that one turn may get.",
    )


class SurrogateConfig(BaseModel, frozen=True, extra="forbid"):
    """Learning early from the late reward that is predicted, where what is wanted is known late."""

    truth_after_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds after a turn's end at which its late reward is known, such as 86400. When its window closes, a turn is then "
        "learned from with the late reward that is predicted; the late reward itself teaches the prediction and is never trained on. "
        "0: nothing is predicted.",
    )
    function: str = Field(
        default="",
        description="The function that gives late rewards, as 'module:function'. Empty: `reward.function`, with `truth_after_s` as its "
        "option `window`.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of `function`, if it is not empty."
    )
    signals: tuple[str, ...] = Field(
        default=(),
        max_length=16,
        description="Signals that help to predict: whether they came in the window, and their last value there.",
    )
    memory: int = Field(default=2000, ge=100, description="Late rewards remembered of a tenant, the newest.")
    most_awaited: int = Field(
        default=20_000,
        ge=100,
        description="Turns whose late reward is awaited at once. Of a tenant with too many, one in 2, 4, ... is followed.",
    )
    ridge: float = Field(
        default=10.0,
        gt=0,
        description="Ridge penalty: how many turns it takes to move the prediction halfway from the early reward itself.",
    )
    forget: float = Field(
        default=0.999, gt=0, le=1, description="Weight that older late rewards keep per newer one of the tenant."
    )
    least_correlation: float = Field(
        default=0.3,
        ge=-1,
        le=1,
        description="Correlation of prediction and late reward below which the alarm `surrogate:<tenant>` is raised.",
    )

    @property
    def label(self) -> str:
        """What is predicted, as part of a reward's function. Example: ``"86400 s"``"""
        return f"{self.function} {self.truth_after_s:g} s".lstrip()


class RewardConfig(BaseModel, frozen=True, extra="forbid"):
    """Rewards and credit."""

    function: str = Field(
        default="ostinato.reward.functions:copilot", description="The reward function, as 'module:function'."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reward function.")
    answer_s: float = Field(
        default=5.0, gt=0, description="Seconds that the reward function has for one turn; then its process is killed."
    )
    memory_bytes: int = Field(
        default=4 << 30, gt=0, description="Most memory of the reward function's process, in bytes."
    )
    load_s: float = Field(default=60.0, gt=0, description="Longest import of the reward function's module, in seconds.")
    max_abs: float = Field(default=100.0, gt=0, le=1e6, description="Largest absolute reward that is accepted.")
    settle_s: float = Field(
        default=0.5, ge=0, description="Seconds that signals received in the window are given to reach the disk."
    )
    delivery_s: float = Field(
        default=60.0, ge=0, description="Seconds after a turn's end within which its delivery must be recorded."
    )
    longest_wait_s: float = Field(
        default=7 * DAY, gt=0, description="Seconds after a turn's end within which its reward must be known."
    )
    batch_wait_s: float = Field(
        default=7 * DAY,
        gt=0,
        description="Seconds after its reward was due until a turn is held back because too few others fill a batch, "
        "or, while the trainer waits for the gate, because newer turns fill it.",
    )
    max_signals: int = Field(default=100, ge=1, description="Signals per turn that count, the first ones written.")
    max_orphans: int = Field(
        default=10_000, ge=0, description="Most signals remembered about turns that are not in the log yet."
    )
    orphan_bytes: int = Field(default=4 << 20, ge=0, description="Most bytes of ids of such signals.")
    orphan_s: float = Field(default=3600.0, gt=0, description="Seconds after which such a signal is forgotten.")
    remember: int = Field(
        default=50_000,
        ge=0,
        description="Decided turns remembered, to tell late feedback from feedback about an unknown turn.",
    )
    fold_rows: int = Field(
        default=50_000, ge=1, description="Rows of the log between two saves of the totals computed from it."
    )
    min_temperature: float = Field(
        default=0.1,
        ge=0,
        description="Turns with a lower temperature are not learned from: gradients grow as 1 / temperature.",
    )
    purposes: tuple[Purpose, ...] = Field(
        default=(Purpose.TASK, Purpose.SUBAGENT, Purpose.COMPACTION),
        description="Purposes of the calls that are learned from: task, subagent, compaction, side.",
    )
    max_staleness: int = Field(
        default=4, ge=0, description="Optimizer steps by which a turn's tokens, on average, may lag behind the trainer."
    )
    world_staleness: int = Field(
        default=8,
        ge=0,
        description="The same for the oldest token of turns in simulated worlds, whose weights may change midway. An older turn is held "
        "back alone, and its whole group only if it is the last of its rollout.",
    )
    flat_groups: Literal["hold_back", "train"] = Field(
        default="hold_back",
        description="Groups of rollouts with equal values, whose advantages are 0. 'hold_back': a batch of "
        "`worlds.groups` contains none, so that the trainer's time goes where there is something to learn. 'train': "
        "they are trained on, which applies the KL to them.",
    )
    episode_wait_s: float = Field(
        default=3600.0,
        ge=0,
        description="Seconds after a decided turn's end until it is learned from even if its episode goes on.",
    )
    batch_tokens: int = Field(
        default=1 << 17,
        ge=64,
        description="Most tokens per batch, with tokens shared within an episode or group counted once; set no more "
        "than a step can process in `supervise.work_s`. People's episodes beyond a quarter of it are split, their "
        "groups and single turns held back as too_long; groups of rollouts only beyond `group_tokens`.",
    )
    group_tokens: int = Field(
        default=1 << 20,
        ge=64,
        description="Most tokens of one group of rollouts. One beyond `batch_tokens` is a step of its own, which may "
        "take longer than `supervise.work_s` in proportion.",
    )
    episode_turns: int = Field(
        default=256, ge=1, description="Most turns of one episode in a batch; longer episodes are split."
    )
    group_wait_s: float = Field(
        default=60.0, ge=0, description="Seconds without a new turn after which a group counts as complete."
    )
    discount: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="Factor by which a turn's reward counts for the turn before it in its episode, unless it counts "
        "one of `outcomes`.",
    )
    outcomes: tuple[str, ...] = Field(
        default=OUTCOMES,
        description="Signals that say how a whole session ended. A reward that counts one reaches all earlier turns of "
        "its episode at full value, without `discount`; several of an episode are averaged.",
    )
    users: Users = Field(
        default="declared",
        description="Whom the caps count as a user: any name that a caller gives, or only verified users, a tenant's "
        "others as one.",
    )
    user_cap: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Largest share of a batch that one user may have, each turn counting equally, or 2 / users if "
        "that is more: one or two users are not capped.",
    )
    user_steps: int = Field(
        default=50,
        ge=0,
        description="Optimizer steps over which one user gets at most an equal share, whatever their traffic: 0.2% "
        "among 500 equally active users. A new user may have ten steps' worth at once. 0: only each batch is capped.",
    )
    tenant_cap: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Largest share of a batch that one tenant may have, each turn counting equally; or, if more, 2 "
        "/ tenants (one or two are not capped) or what the others' users cannot fill under `user_cap`. Tenants with "
        "turns to learn from fill a batch in turn.",
    )
    propensity_cap: float = Field(
        default=4.0,
        ge=1,
        le=100,
        description="Most by which a rewarded turn's weight is multiplied, or divided, because answers of its length are "
        "rewarded less, or more, often than the tenant's others (inverse propensity weighting). 1: no turn's is.",
    )
    baseline: BaselineConfig = Field(default_factory=BaselineConfig, description="The learned baseline.")
    belief: BeliefConfig = Field(
        default_factory=BeliefConfig, description="Credit by the change of belief in a known answer."
    )
    equal_states: bool = Field(
        default=False,
        description="Compare the turns of a group of rollouts with those of others at the same prompt, where there are any.",
    )
    hints: HintsConfig = Field(default_factory=HintsConfig, description="Learning from feedback as hints.")
    surrogate: SurrogateConfig = Field(
        default_factory=SurrogateConfig, description="Predicting late rewards from what is known early."
    )
    coverage: CoverageConfig = Field(default_factory=CoverageConfig, description="When silence is not trusted.")

    @model_validator(mode="after")
    def _check_late(self) -> Self:
        late, window = self.surrogate.truth_after_s, self.options.get("window", 0.0)
        if late and late >= self.longest_wait_s:
            raise ValueError(
                f"surrogate.truth_after_s = {late:g} is not before longest_wait_s ({self.longest_wait_s:g}); raise that"
            )
        if late and isinstance(window, int | float) and late <= window:
            raise ValueError(
                f"surrogate.truth_after_s = {late:g} is within options.window ({window:g}); set a shorter window"
            )
        if self.surrogate.options and not self.surrogate.function:
            raise ValueError(
                "surrogate.options are those of surrogate.function, which is empty; name a function, or use options"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _take_old_names(cls, given: Any) -> Any:
        """Options under their names of the last release, with a warning. Raises ValueError if both names are given."""
        if not isinstance(given, dict):
            return given
        fields = cast("dict[str, Any]", given)
        options = fields.get("options")
        if not isinstance(options, dict):
            return fields
        present = dict(cast("dict[str, Any]", options))
        for old, new in RENAMED.get(str(fields.get("function")), {}).items():
            if old not in present:
                continue
            if new in present:
                raise ValueError(f"reward.options: {old!r} is the old name of {new!r}; give {new!r} alone")
            logger.warning("reward.options.%s is now reward.options.%s; rename it: the next release drops it", old, new)
            present[new] = present.pop(old)
        return {**fields, "options": present}
