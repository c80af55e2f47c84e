"""What can be set about rewards and credit."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


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


class RewardConfig(BaseModel, frozen=True, extra="forbid"):
    """Rewards and credit."""

    function: str = Field(
        default="ostinato.reward.functions:copilot", description="The reward function, as 'module:function'."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword options of the reward function.")
    settle_s: float = Field(
        default=0.5, ge=0, description="Seconds granted to signals that were received in the window to reach the disk."
    )
    max_staleness: int = Field(
        default=4, ge=0, description="Optimizer steps that a turn's oldest token may lie behind the trainer."
    )
    user_cap: float = Field(
        default=0.1, gt=0, le=1, description="Largest share of a batch's absolute advantage that one user may have."
    )
    baseline: BaselineConfig = Field(default_factory=BaselineConfig, description="The learned baseline.")
