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
"""Renamed options by reward function: name in the last release -> current name."""

Users = Literal["declared", "verified"]
"""Who counts as a person for the caps: any user that the caller names, or only users whose identity the tenant proved."""


class BaselineConfig(BaseModel, frozen=True, extra="forbid"):
    """The learned baseline b(x, user)."""

    shrinkage: float = Field(
        default=10.0,
        gt=0,
        description="Shrinkage of each user's and each prompt's mean towards the overall mean, as a pseudo-count of turns at the overall "
        "mean.",
    )
    ridge: float = Field(
        default=1.0,
        gt=0,
        description="Ridge penalty of the regression. It pulls predictions towards the overall mean plus the user's and the prompt's "
        "deviation.",
    )
    length_exponent: float = Field(
        default=1.5,
        ge=0,
        le=2,
        description="Exponent of a turn's number of sampled tokens, to which the turn's weight as evidence is proportional: the gradient "
        "of a long answer is large. 0: all turns weigh the same.",
    )
    forget: float = Field(
        default=0.999,
        gt=0,
        le=1,
        description="Factor by which the weight of older evidence is multiplied at each observed turn, because the policy changes.",
    )
    forget_key: float = Field(
        default=0.98,
        gt=0,
        le=1,
        description="Factor by which the weight of older evidence about a user, or a prompt, is multiplied at each of its own observed "
        "turns, because users and prompts change.",
    )
    max_keys: int = Field(
        default=100_000,
        ge=1,
        description="Most users, and most prompts, that are remembered. Those unseen for longest are forgotten first.",
    )


class CoverageConfig(BaseModel, frozen=True, extra="forbid"):
    """When missing feedback is taken to mean that feedback is lost."""

    enabled: bool = Field(
        default=True,
        description="Detect when a tenant's feedback stops arriving, and do not trust silence then. False: silence always counts as the "
        "reward function says.",
    )
    min_turns: int = Field(
        default=200,
        ge=1,
        description="Least number of a tenant's turns whose windows have closed before its silence can be judged.",
    )
    false_alarm_turns: float = Field(
        default=1e6,
        gt=1,
        description="Lower bound on the mean number of turns between two false alarms while feedback arrives.",
    )


class HintsConfig(BaseModel, frozen=True, extra="forbid"):
    """Self-distillation: feedback as hints for a teacher with the same weights, at the turn that it is about."""

    weight: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="Weight per token of the divergence from the teacher, in an answer that did worse than expected. It is relative to "
        "the answer's credit, which has an advantage of about 1. 0: nothing is learned from hints, because what one user writes would "
        "then change how others are answered. Needs `train.ranks` = 1.",
    )
    comments: tuple[str, ...] = Field(
        default=("rejected", "undone"),
        description="Signals whose `comment` is used as a hint. Do not name signals whose comments contain what the model must not know, "
        "such as the expected values of hidden tests.",
    )
    follow_ups: tuple[str, ...] = Field(
        default=("tool_error", "tool_rejected", "dissatisfied"),
        description="Signals after which the continuation of the conversation is used as a hint: the tool's error, or what the person "
        "said next.",
    )
    chars: int = Field(
        default=1_000,
        ge=16,
        le=100_000,
        description="Longest hint, in characters. Of a longer text, the beginning and the end are kept.",
    )


class BeliefConfig(BaseModel, frozen=True, extra="forbid"):
    """Division of a world rollout's credit by each turn's change in the probability of the task's known answer."""

    strength: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of a rollout's credit that is divided among its turns by how much each changed the probability of the "
        "known answer. The rest is shared evenly. 0: the answer is not scored. Above 0, the engine reads the whole conversation once more "
        "after each turn of a task with `known`.",
    )
    most: float = Field(
        default=8.0,
        gt=1,
        le=1000,
        description="Largest credit of one turn, as a multiple of its even share of the rollout's credit.",
    )


class SurrogateConfig(BaseModel, frozen=True, extra="forbid"):
    """Learning from a predicted late reward, for products whose outcome is known only later (surrogate index)."""

    truth_after_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds after a turn's end at which its late reward is known, such as 86400. When the turn's window closes, it is "
        "then learned from with a prediction of its late reward. The late reward itself only trains the predictor; the policy is never "
        "trained on it. 0: nothing is predicted.",
    )
    function: str = Field(
        default="",
        description="The function that computes late rewards, as 'module:function'. Empty: `reward.function`, with `truth_after_s` as "
        "its option `window`.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of `function`, if one is named."
    )
    signals: tuple[str, ...] = Field(
        default=(),
        max_length=16,
        description="Signals used as features of the prediction: whether each arrived in the window, and its last value there.",
    )
    memory: int = Field(default=2000, ge=100, description="Newest late rewards that are remembered per tenant.")
    most_awaited: int = Field(
        default=20_000,
        ge=100,
        description="Most turns whose late reward is awaited at once. If a tenant has too many, only one in 2, 4, ... of its turns is "
        "followed.",
    )
    ridge: float = Field(
        default=10.0,
        gt=0,
        description="Ridge penalty: the number of turns that move the prediction halfway away from the early reward.",
    )
    forget: float = Field(
        default=0.999,
        gt=0,
        le=1,
        description="Factor by which the weight of older late rewards is multiplied at each newer one of the same tenant.",
    )
    least_correlation: float = Field(
        default=0.3,
        ge=-1,
        le=1,
        description="Correlation of predicted and late rewards below which the alarm `surrogate:<tenant>` is raised.",
    )

    @property
    def label(self) -> str:
        """The predicted reward, as a part of a reward's function name. Example: ``"86400 s"``"""
        return f"{self.function} {self.truth_after_s:g} s".lstrip()


class RewardConfig(BaseModel, frozen=True, extra="forbid"):
    """Rewards and credit."""

    function: str = Field(
        default="ostinato.reward.functions:copilot", description="The reward function, as 'module:function'."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reward function.")
    answer_s: float = Field(
        default=5.0,
        gt=0,
        description="Longest computation of one turn's reward, in seconds; then the reward function's process is killed.",
    )
    memory_bytes: int = Field(
        default=4 << 30, gt=0, description="Most memory of the reward function's process, in bytes."
    )
    load_s: float = Field(default=60.0, gt=0, description="Longest import of the reward function's module, in seconds.")
    max_abs: float = Field(
        default=100.0, gt=0, le=1e6, description="Largest absolute value of a reward that is accepted."
    )
    settle_s: float = Field(
        default=0.5,
        ge=0,
        description="Seconds after the window's end for signals received within it to reach the disk.",
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
        description="Longest wait of a turn for a batch after its reward was due, in seconds; then it is held back. It waits while there "
        "are too few other turns to fill a batch, or, while the trainer waits for the gate, because newer turns fill it.",
    )
    max_signals: int = Field(
        default=100, ge=1, description="Most signals that count per turn; the first ones written count."
    )
    max_orphans: int = Field(
        default=10_000,
        ge=0,
        description="Most signals that are remembered although their turns are not in the log yet.",
    )
    orphan_bytes: int = Field(default=4 << 20, ge=0, description="Most memory for the ids of such signals, in bytes.")
    orphan_s: float = Field(default=3600.0, gt=0, description="Seconds after which such a signal is forgotten.")
    remember: int = Field(
        default=50_000,
        ge=0,
        description="Decided turns that are remembered, to tell late feedback from feedback about an unknown turn.",
    )
    fold_rows: int = Field(
        default=50_000, ge=1, description="Rows of the log between two saves of the totals computed from it."
    )
    min_temperature: float = Field(
        default=0.1,
        ge=0,
        description="Lowest sampling temperature of turns that are learned from: gradients grow as 1 / temperature.",
    )
    purposes: tuple[Purpose, ...] = Field(
        default=(Purpose.TASK, Purpose.SUBAGENT, Purpose.COMPACTION),
        description="Which calls are learned from, by their purpose: task, subagent, compaction, side.",
    )
    max_staleness: int = Field(
        default=4,
        ge=0,
        description="Largest staleness of a turn that is learned from: optimizer steps by which its tokens, on average, lag behind the "
        "trainer.",
    )
    world_staleness: int = Field(
        default=8,
        ge=0,
        description="Largest staleness of a turn in simulated worlds, in optimizer steps. It counts from the oldest token, since the "
        "weights may change midway. A staler turn is held back alone; its whole group is held back only if the turn is the last of its "
        "rollout.",
    )
    flat_groups: Literal["hold_back", "train"] = Field(
        default="hold_back",
        description="What happens to groups of rollouts with equal values, whose advantages are 0. 'hold_back': a batch of "
        "`worlds.groups` contains none of them, so that the trainer spends its time where there is something to learn. 'train': they are "
        "trained on, which applies the KL penalty to them.",
    )
    episode_wait_s: float = Field(
        default=3600.0,
        ge=0,
        description="Seconds after a decided turn's end until it is learned from even if its episode continues.",
    )
    batch_tokens: int = Field(
        default=1 << 17,
        ge=64,
        description="Most tokens per batch; tokens shared within an episode or group count once. Set no more than a step can process in "
        "`supervise.work_s`. An episode of people's turns that exceeds a quarter of this is split; a group or a single turn that does is "
        "held back as too_long. Groups of rollouts are held back only beyond `group_tokens`.",
    )
    group_tokens: int = Field(
        default=1 << 20,
        ge=64,
        description="Most tokens of one group of rollouts. A group larger than `batch_tokens` gets a step of its own, which may take "
        "longer than `supervise.work_s` in proportion.",
    )
    episode_turns: int = Field(
        default=256, ge=1, description="Most turns of one episode in a batch. Longer episodes are split."
    )
    group_wait_s: float = Field(
        default=60.0, ge=0, description="Seconds without a new turn after which a group counts as complete."
    )
    discount: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="Discount factor: how much of a turn's reward counts for the turn before it in its episode. Rewards that count one "
        "of `outcomes` are not discounted.",
    )
    outcomes: tuple[str, ...] = Field(
        default=OUTCOMES,
        description="Signals that say how a whole session ended. A reward that counts one of them reaches all earlier turns of its "
        "episode at full value, without `discount`. If an episode has several such rewards, they are averaged.",
    )
    users: Users = Field(
        default="declared",
        description="Who counts as a user for the caps: 'declared', any name that a caller gives; 'verified', only verified users, with "
        "all others of a tenant counted as one.",
    )
    user_cap: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Largest share of a batch that one user may have, where each turn counts equally. If 2 / users is more, that is the "
        "cap, so that one or two users are not capped.",
    )
    user_steps: int = Field(
        default=50,
        ge=0,
        description="Optimizer steps over which one user gets at most an equal share, however much traffic they have: 0.2% among 500 "
        "equally active users. A new user may have ten steps' worth at once. 0: shares are capped in each batch only.",
    )
    tenant_cap: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Largest share of a batch that one tenant may have, where each turn counts equally. The cap is higher if 2 / tenants "
        "is more (one or two are not capped), or if the others' users cannot fill the rest under `user_cap`. Tenants with turns to learn "
        "from fill a batch in turn.",
    )
    propensity_cap: float = Field(
        default=4.0,
        ge=1,
        le=100,
        description="Bound on inverse propensity weights. Where a tenant's answers of one length are rewarded less often than its "
        "others, rewarded turns of that length are weighted up by at most this factor; where more often, down by at most this factor. 1: "
        "all weights are 1.",
    )
    baseline: BaselineConfig = Field(default_factory=BaselineConfig, description="The learned baseline.")
    belief: BeliefConfig = Field(
        default_factory=BeliefConfig, description="Credit by the change of belief in a known answer."
    )
    equal_states: bool = Field(
        default=False,
        description="Compare each turn of a rollout with the turns of the group's other rollouts at the same prompt, where there are any.",
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
        """Rename options given under their names in the last release, with a warning. Raises ValueError if both names are given."""
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
