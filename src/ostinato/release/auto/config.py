"""Configuration of how Auto adjusts its shares. The arms themselves are configured in the gateway (`serve.auto`)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, FiniteFloat, model_validator

Metric = Literal["reward", "seconds"]


class RouterConfig(BaseModel, frozen=True, extra="forbid"):
    """The router's objective, and how fast it learns.

    Example: ``RouterConfig(floor=0.05, price=2.0)``
    """

    floor: float = Field(
        default=0.02, ge=0.0, le=0.5, description="Share of episodes that every arm keeps, however badly it does."
    )
    weights: dict[Metric, FiniteFloat] = Field(
        default_factory=lambda: {"reward": 1.0},
        description="Weight of each metric of a turn: 'reward', or 'seconds' (from the call to the end of the answer).",
    )
    price: float = Field(
        default=0.0,
        ge=0.0,
        description="Reward that an answer may lose for each unit of money by which it is cheaper.",
    )
    low: FiniteFloat = Field(
        default=-1.0, description="Smallest reward. Smaller rewards and failed answers count as this."
    )
    high: FiniteFloat = Field(default=1.0, description="Largest reward. Larger rewards count as this.")
    longest_s: float = Field(
        default=120.0,
        gt=0.0,
        description="Longest time that counts for an answer, in seconds. Slower answers count as this.",
    )
    rho: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Assumed correlation of one user's rewards. All turns of one user together count as at most 1 / rho turns.",
    )
    users: Literal["declared", "verified"] = Field(
        default="declared",
        description="Who counts as a separate user: 'declared', any name that a caller gives; 'verified', only users that the tenant "
        "proved.",
    )
    kept: float = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="Share of the previous live release's evidence with which a new release begins.",
    )
    alpha: float = Field(
        default=1e-4,
        gt=0.0,
        lt=0.5,
        description="Probability of ever flagging correct propensities as wrong, over all looks.",
    )
    waiting: int = Field(
        default=200_000,
        ge=1,
        description="Most turns that wait for their reward. Beyond this, the oldest are given up.",
    )
    fold_rows: int = Field(
        default=20_000,
        ge=1,
        description="Rows of the log between two saves of the state. The gateway's streams stand still while it is made, for up to a "
        "second.",
    )
    poll_s: float = Field(default=2.0, gt=0.0, description="Seconds between two checks of the log.")

    @model_validator(mode="after")
    def _in_order(self) -> RouterConfig:
        if not self.low < self.high:
            raise ValueError(f"low {self.low} must be less than high {self.high}")
        if not any(self.weights.values()):
            raise ValueError("weights must name a metric, and give one of them another weight than 0")
        return self
