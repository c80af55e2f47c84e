"""Configuration of when a candidate on trial advances, goes live, or is taken back."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

HOUR = 3600.0

Require = Literal["no_loss", "win"]
"""What a candidate must be shown to be: not worse than the margin, or better."""


class TrialConfig(BaseModel, frozen=True, extra="forbid"):
    """One candidate's trial, from its first per cent of users to the verdict about it."""

    slot_s: float = Field(
        default=HOUR / 2, gt=0.0, description="Length of the slots of time in which the arms are compared, in seconds."
    )
    margin: float = Field(
        default=0.02,
        gt=0.0,
        lt=1.0,
        description="A candidate goes live once it is shown to lose no more than this of a goal that names no `tolerance`.",
    )
    ship_alpha: float = Field(
        default=0.05, gt=0.0, lt=0.5, description="Chance that one that loses more of a goal goes live all the same."
    )
    false_stops: float = Field(
        default=0.5,
        gt=0.0,
        description="Of `trials_a_week` trials, how many at most may end as 'worse' though nothing is; spent evenly.",
    )
    trials_a_week: float = Field(
        default=20.0,
        gt=0.0,
        description="Trials that this traffic can carry in a week; `false_stops` is divided by it, and more trials spend more.",
    )
    better_evidence: float = Field(
        default=50.0, gt=1.0, description="Odds against 'no difference' from which on a release is called better."
    )
    better_after_s: float = Field(
        default=24 * HOUR, ge=0.0, description="Seconds before which none is called better: what is new may please."
    )
    retest_s: float = Field(
        default=48 * HOUR,
        gt=0.0,
        description="Seconds of later outcomes by which a release that was called better is tested again, and harm is looked for anew.",
    )
    limit_s: float = Field(
        default=96 * HOUR, gt=0.0, description="Seconds after which a candidate without enough evidence is refused."
    )
    min_people: float = Field(
        default=20.0, ge=2.0, description="Effective users on each side before anything is decided."
    )
    min_turns: float = Field(default=200.0, ge=2.0, description="Turns with an outcome on each side, likewise.")
    tenant_people: float = Field(
        default=50.0,
        ge=1.0,
        description="People of the week before, from which on a tenant is compared by itself; smaller ones are pooled with each other.",
    )
    first_people: float = Field(
        default=200.0, gt=0.0, description="Active users of a day that the first step shall reach, at least."
    )
    shares: tuple[float, ...] = Field(
        default=(0.01, 0.05, 0.10, 0.25, 0.50), description="Shares of users that a ramp goes through."
    )
    risk: float = Field(
        default=0.02,
        gt=0.0,
        description="Share of users times the loss that cannot be ruled out: the largest such product that a ramp accepts.",
    )
    holdback: float = Field(
        default=0.10,
        gt=0.0,
        lt=1.0,
        description="Share of users who stay on the previous release while the new one is being proven.",
    )
    most_turns_a_day: float = Field(default=20.0, gt=0.0, description="Turns of one user and day that count.")
    imbalance: float = Field(
        default=1000.0, gt=1.0, description="Odds against the set shares from which on a trial is void."
    )
