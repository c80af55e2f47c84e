"""Configuration of how turns and signals of the log are joined."""

from __future__ import annotations

from pydantic import BaseModel, Field


class OutcomeConfig(BaseModel, frozen=True, extra="forbid"):
    """How long a turn may wait for its signals, and how much is held in memory."""

    maturity_s: float = Field(default=30.0, ge=0.0, description="Seconds after a turn before its outcome is evaluated.")
    window: int = Field(
        default=50_000,
        ge=100,
        description="Newest turns kept in memory, and as many signals about turns that are not in the log yet.",
    )
    past: int = Field(
        default=200_000, ge=100, description="Newest turns before a trial that show what each user usually does."
    )
    early_s: float = Field(
        default=3600.0, gt=0, description="Seconds until such a signal, about a turn not yet in the log, is forgotten."
    )
    nothing: str = Field(
        default="-",
        description="The answer that suggests nothing, as in the reward function `tab`; an empty answer does so, too.",
    )
