"""Configuration of how Auto moves its shares. The arms are configured in the gateway (`serve.auto`)."""

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
        description="What each metric of a turn is worth: 'reward', 'seconds' (from the call to the answer's end).",
    )
    price: float = Field(
        default=0.0, ge=0.0, description="How much reward an answer may lose to cost one unit of money less."
    )
    low: FiniteFloat = Field(default=-1.0, description="The least reward; an answer that failed counts as this.")
    high: FiniteFloat = Field(default=1.0, description="The most reward; more counts as this.")
    longest_s: float = Field(default=120.0, gt=0.0, description="Seconds beyond which an answer is no slower.")
    rho: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="How alike a user's turns are taken to be: all that one user says weighs at most 1 / rho turns.",
    )
    users: Literal["declared", "verified"] = Field(
        default="declared",
        description="Who is a user of their own: any name that a caller gives, or only users that the tenant proved.",
    )
    kept: float = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="Share of what is known of the live release that a new one begins with.",
    )
    alpha: float = Field(
        default=1e-4, gt=0.0, lt=0.5, description="Chance of ever calling right propensities wrong, over all looks."
    )
    waiting: int = Field(default=200_000, ge=1, description="Turns whose reward may come yet; the oldest are given up.")
    fold_rows: int = Field(default=2_000, ge=1, description="Rows of the log after which what is known is saved.")
    poll_s: float = Field(default=2.0, gt=0.0, description="Pause between looks at the log.")

    @model_validator(mode="after")
    def _in_order(self) -> RouterConfig:
        if not self.low < self.high:
            raise ValueError(f"low {self.low} must be less than high {self.high}")
        if not self.weights:
            raise ValueError("weights must name a metric")
        return self
