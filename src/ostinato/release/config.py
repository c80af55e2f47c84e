"""Configuration of how candidates are released to users."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints, ValidationInfo, field_validator, model_validator

from ostinato.release.auto.config import RouterConfig
from ostinato.release.guard import GuardConfig
from ostinato.release.metrics.config import DEFAULT_METRICS, SIGNALS, MetricConfig, OutcomeConfig, completed
from ostinato.release.metrics.metric import metrics_of
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.trial.config import HOUR, Require, TrialConfig
from ostinato.release.trial.incumbent_test import StandingConfig

SignalName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]


class ReleaseConfig(BaseModel, frozen=True, extra="forbid"):
    """How candidates are released to users, and when they are rolled back."""

    poll_s: float = Field(
        default=1.0, gt=0.0, description="Seconds between two checks of the refs when nothing is due."
    )
    canary: bool = Field(
        default=False,
        description="Try each candidate on a growing share of users, and keep some users on the previous release until the verdict. This "
        "needs hundreds of users a day. False: candidates go live on the gate's verdict alone.",
    )
    require: Require = Field(
        default="no_loss",
        description="What must be shown before a candidate ships. 'no_loss': that it is not worse than the margin. 'win': that it is "
        "better. If `canary` is on, this is shown on users; otherwise on the suite, against the best release so far.",
    )
    approval: Literal["auto", "manual"] = Field(
        default="auto",
        description="Who lets a candidate that has passed ship. 'auto': it ships by itself. 'manual': it waits for a person's `ostinato "
        "approve` or `ostinato refuse`, or for the button on the page.",
    )
    cooldown_s: float = Field(
        default=6 * HOUR,
        ge=0.0,
        description="Seconds after a rollback during which nothing ships by itself and no trial begins. A person can still ship.",
    )
    rollbacks_a_day: int = Field(
        default=1,
        ge=0,
        description="Automatic rollbacks allowed within 24 hours. After one more, nothing ships by itself until a person ships or "
        "approves.",
    )
    signals: tuple[SignalName, ...] = Field(
        default=(),
        description="Your product's own signals that metrics refer to. A metric with an unlisted signal is an error, which catches "
        "misspelt names. These need not be listed: "
        f"{', '.join(SIGNALS)}.",
    )
    metrics: tuple[MetricConfig, ...] = Field(
        default=DEFAULT_METRICS,
        description="Metrics by which a release is judged, as tables [[release.metrics]]. If none of them is a goal, the goal is "
        "acceptance. The default guardrails apply in addition to your metrics; a metric of yours with the same name replaces a default.",
    )
    trial: TrialConfig = Field(default=TrialConfig(), description="How a candidate is tried on users.")
    best_arm: bool = Field(
        default=False,
        description="Keep a share of the users (release.standing.share) on the release that users have shown to be the best so far, and "
        "compare live with it all the time. This detects losses that are too small for one trial but add up. It takes the memory of one "
        "more version.",
    )
    standing: StandingConfig = Field(
        default=StandingConfig(), description="The comparison of live with the best release."
    )
    guard: GuardConfig = Field(default=GuardConfig(), description="When harm to users causes a rollback.")
    outcomes: OutcomeConfig = Field(default=OutcomeConfig(), description="How turns and signals are joined.")
    auto: RouterConfig = Field(default=RouterConfig(), description="How Auto adjusts the shares of its arms.")
    monitors: MonitorsConfig = Field(
        default=MonitorsConfig(), description="Which behaviour is monitored, and what it is compared with."
    )

    @model_validator(mode="after")
    def _best_is_compared(self) -> ReleaseConfig:
        goal = metrics_of(self.metrics, self.trial.margin)[0]
        if self.best_arm and (goal.daily or goal.quantile is not None):
            raise ValueError(
                f"release.best_arm compares live with the best release by the first goal, turn by turn, and {goal.name!r} is one of "
                "users' days or of a quantile: declare another goal before it, or leave best_arm off"
            )
        return self

    @property
    def verified_share(self) -> float:
        """The share of users who stay on the verified release."""
        return self.standing.share if self.best_arm else 0.0

    @field_validator("metrics")
    @classmethod
    def _completed(cls, metrics: tuple[MetricConfig, ...], info: ValidationInfo) -> tuple[MetricConfig, ...]:
        return completed(metrics, info.data.get("signals", ()))
