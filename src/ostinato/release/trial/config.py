"""Configuration of trials: when a candidate advances, goes live, or is rolled back."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

HOUR = 3600.0
DAY = 24 * HOUR

Require = Literal["no_loss", "win"]
"""What a candidate must be shown to be: no worse than the margin, or better."""


class TrialConfig(BaseModel, frozen=True, extra="forbid"):
    """One candidate's trial, from its first per cent of users to the verdict about it."""

    slot_s: float = Field(
        default=HOUR / 2, gt=0.0, description="Length of the time slots in which the arms are compared, in seconds."
    )
    margin: float = Field(
        default=0.02,
        gt=0.0,
        lt=1.0,
        description="Largest tolerated loss of each goal without a `tolerance`. A candidate goes live once it is shown to lose no more.",
    )
    ship_alpha: float = Field(
        default=0.05,
        gt=0.0,
        lt=0.5,
        description="Probability that a candidate that loses more than the margin of a goal still goes live.",
    )
    false_stops: float = Field(
        default=0.5,
        gt=0.0,
        description="Largest expected number of trials, out of `trials_a_week`, that end as 'worse' by chance alone. It is spent evenly.",
    )
    trials_a_week: float = Field(
        default=20.0,
        gt=0.0,
        description="Trials that this traffic can carry per week. `false_stops` is divided among them; further trials exceed it.",
    )
    better_evidence: float = Field(
        default=50.0, gt=1.0, description="Odds against 'no difference' at which a release is called better."
    )
    better_after_s: float = Field(
        default=24 * HOUR,
        ge=0.0,
        description="Seconds before a release may be called better, because novelty alone may please users.",
    )
    retest_s: float = Field(
        default=48 * HOUR,
        gt=0.0,
        description="Seconds of later outcomes on which a release that was called better is tested again, and over which a new check for "
        "harm runs.",
    )
    limit_s: float = Field(
        default=96 * HOUR, gt=0.0, description="Seconds after which a candidate without enough evidence is refused."
    )
    min_people: float = Field(
        default=20.0, ge=2.0, description="Least number of effective users on each side before anything is decided."
    )
    min_turns: float = Field(
        default=200.0,
        ge=2.0,
        description="Least number of turns with an outcome on each side before anything is decided.",
    )
    tenant_people: float = Field(
        default=50.0,
        ge=1.0,
        description="Users in the week before the trial from which a tenant is compared on its own. Smaller tenants are pooled.",
    )
    first_people: float = Field(
        default=200.0,
        gt=0.0,
        description="Number of daily active users that the first step of the ramp should reach at least.",
    )
    shares: tuple[float, ...] = Field(
        default=(0.01, 0.05, 0.10, 0.25, 0.50), description="Shares of users that the ramp steps through."
    )
    risk: float = Field(
        default=0.02,
        gt=0.0,
        description="Largest risk that a ramp step accepts: the share of users, times the loss that cannot be ruled out.",
    )
    holdback: float = Field(
        default=0.10,
        gt=0.0,
        lt=1.0,
        description="Share of users who stay on the previous release while the new one is being proven.",
    )
    most_turns_a_day: float = Field(default=20.0, gt=0.0, description="Most turns of one user that count per day.")
    imbalance: float = Field(
        default=1000.0, gt=1.0, description="Odds against the configured shares of users at which a trial is void."
    )
