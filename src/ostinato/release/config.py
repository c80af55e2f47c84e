"""How candidates come before users, as configuration."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ostinato.release.guard import GuardConfig
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.outcomes import OutcomeConfig


class ReleaseConfig(BaseModel, frozen=True, extra="forbid"):
    """How candidates come before users, and when they are taken back."""

    poll_s: float = Field(default=1.0, gt=0.0, description="Pause between looks at the refs when nothing is due.")
    canary_outcomes: int = Field(default=200, ge=1, description="Outcomes on the canary arm that end the trial.")
    canary_timeout_s: float = Field(
        default=3600.0, gt=0.0, description="Seconds after which a trial without harm ends anyway."
    )
    guard: GuardConfig = Field(default=GuardConfig(), description="When harm to users takes a version back.")
    outcomes: OutcomeConfig = Field(default=OutcomeConfig(), description="How turns and signals become outcomes.")
    monitors: MonitorsConfig = Field(
        default=MonitorsConfig(), description="Which behaviour is watched, and against what."
    )
