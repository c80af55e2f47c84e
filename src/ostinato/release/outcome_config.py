"""How turns and signals become outcomes, as configuration."""

from __future__ import annotations

from pydantic import BaseModel, Field


class OutcomeConfig(BaseModel, frozen=True, extra="forbid"):
    """Which signals make a turn good or bad, and how long a turn may wait for them."""

    good: tuple[str, ...] = Field(
        default=("accepted",),
        description="Signal names that mean that the turn was good; with a value of 0 or less, that it was not.",
    )
    bad: tuple[str, ...] = Field(
        default=("rejected", "ignored", "undone"),
        description="Signal names that mean that it was not, unless their value is 0 or less; they win over good.",
    )
    maturity_s: float = Field(default=30.0, ge=0.0, description="Seconds after a turn before its outcome is read.")
    window: int = Field(
        default=50_000,
        ge=100,
        description="Turns kept in memory, newest first; and as many signals about turns that are not in the log yet.",
    )
    early_s: float = Field(default=3600.0, gt=0, description="Seconds after which such a signal is forgotten.")
