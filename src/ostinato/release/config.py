"""How candidates come before users, as configuration."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ostinato.release.auto.config import RouterConfig
from ostinato.release.guard import GuardConfig
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.outcome_config import OutcomeConfig
from ostinato.release.trial.config import TrialConfig


class ReleaseConfig(BaseModel, frozen=True, extra="forbid"):
    """How candidates come before users, and when they are taken back."""

    poll_s: float = Field(default=1.0, gt=0.0, description="Pause between looks at the refs when nothing is due.")
    canary: bool = Field(
        default=False,
        description="Try each candidate on a growing share of users, and keep some on the release before it until the verdict. It takes "
        "hundreds of users a day; without it candidates go live on the gate alone.",
    )
    trial: TrialConfig = Field(default=TrialConfig(), description="How a candidate is tried before users.")
    guard: GuardConfig = Field(default=GuardConfig(), description="When harm to users takes a version back.")
    outcomes: OutcomeConfig = Field(default=OutcomeConfig(), description="How turns and signals become outcomes.")
    auto: RouterConfig = Field(default=RouterConfig(), description="How Auto moves its shares.")
    monitors: MonitorsConfig = Field(
        default=MonitorsConfig(), description="Which behaviour is watched, and against what."
    )
