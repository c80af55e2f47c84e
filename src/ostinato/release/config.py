"""How candidates come before users, as configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints, ValidationInfo, field_validator

from ostinato.release.auto.config import RouterConfig
from ostinato.release.guard import GuardConfig
from ostinato.release.metrics.builtin import SIGNALS
from ostinato.release.metrics.config import DEFAULT_METRICS, MetricConfig, completed
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.outcome_config import OutcomeConfig
from ostinato.release.trial.config import TrialConfig

SignalName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]


class ReleaseConfig(BaseModel, frozen=True, extra="forbid"):
    """How candidates come before users, and when they are taken back."""

    poll_s: float = Field(default=1.0, gt=0.0, description="Pause between looks at the refs when nothing is due.")
    canary: bool = Field(
        default=False,
        description="Try each candidate on a growing share of users, and keep some on the release before it until the verdict. It takes "
        "hundreds of users a day; without it candidates go live on the gate alone.",
    )
    signals: tuple[SignalName, ...] = Field(
        default=(),
        description="Signals of your product that metrics name, so that a name that is misspelt there is an error. Known without it: "
        f"{', '.join(SIGNALS)}.",
    )
    metrics: tuple[MetricConfig, ...] = Field(
        default=DEFAULT_METRICS,
        description="What a release is judged by; a list of tables, [[release.metrics]]. Without a goal among them it is acceptance; the "
        "guardrails here stand beside those that you declare; one of the same name takes its place.",
    )
    trial: TrialConfig = Field(default=TrialConfig(), description="How a candidate is tried before users.")
    guard: GuardConfig = Field(default=GuardConfig(), description="When harm to users takes a version back.")
    outcomes: OutcomeConfig = Field(default=OutcomeConfig(), description="How turns and signals are joined.")
    auto: RouterConfig = Field(default=RouterConfig(), description="How Auto moves its shares.")
    monitors: MonitorsConfig = Field(
        default=MonitorsConfig(), description="Which behaviour is watched, and against what."
    )

    @field_validator("metrics")
    @classmethod
    def _completed(cls, metrics: tuple[MetricConfig, ...], info: ValidationInfo) -> tuple[MetricConfig, ...]:
        return completed(metrics, info.data.get("signals", ()))
