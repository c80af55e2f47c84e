"""How candidates are measured and judged, as configuration."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator


class GateConfig(BaseModel, frozen=True, extra="forbid"):
    """How much worse a candidate may be, how sure we must be, how long we may look."""

    margin: float = Field(
        default=0.05, gt=0.0, lt=1.0, description="Largest tolerated true loss in mean suite score (0.05 = 5 points)."
    )
    alpha: float = Field(
        default=0.05,
        gt=0.0,
        lt=0.5,
        description="Probability of shipping a candidate that is worse by the margin, all looks together.",
    )
    first_draws: int = Field(default=2, ge=1, le=1024, description="Samples per item and policy at the first look.")
    max_draws: int = Field(default=8, ge=1, le=1024, description="Samples per item and policy at the last look.")
    early_share: float = Field(
        default=0.5,
        gt=0.0,
        lt=1.0,
        description="Share of alpha spent on all looks before the last; the rest is kept for the last.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> GateConfig:
        if self.max_draws < self.first_draws:
            raise ValueError(f"max_draws={self.max_draws} is below first_draws={self.first_draws}; raise it")
        return self

    def schedule(self) -> tuple[int, ...]:
        """Draw counts at which the gate looks: doubling from `first_draws` and ending at `max_draws`.

        Example: ``GateConfig(first_draws=2, max_draws=6).schedule()`` is ``(2, 4, 6)``.
        """
        looks = [self.first_draws]
        while looks[-1] < self.max_draws:
            looks.append(min(2 * looks[-1], self.max_draws))
        return tuple(looks)

    def alpha_at(self, draws: int) -> float:
        """The part of `alpha` that the look with this many draws may spend."""
        looks = len(self.schedule())
        if looks == 1:
            return self.alpha
        if draws >= self.max_draws:
            return self.alpha * (1.0 - self.early_share)
        return self.alpha * self.early_share / (looks - 1)

    def next_draws(self, held: int) -> int:
        """The draw count of the next look when `held` draws per item are known."""
        return next((draws for draws in self.schedule() if draws > held), self.max_draws)


class RunnerConfig(BaseModel, frozen=True, extra="forbid"):
    """How hard the gateway is driven and how long we wait for it."""

    concurrency: int = Field(default=16, ge=1, le=1024, description="Requests in flight.")
    samples_per_request: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Draws of one item per request. Part of what a draw means: changing it resamples.",
    )
    request_timeout_s: float = Field(
        default=120.0, gt=0.0, description="Seconds for one request, its queueing included."
    )
    slot_timeout_s: float = Field(
        default=120.0, gt=0.0, description="Seconds for a slot to serve the expected version."
    )
    deadline_s: float = Field(default=3600.0, gt=0.0, description="Seconds for a whole run.")
    retry_pause_s: float = Field(default=0.5, gt=0.0, description="First pause after a failed try; doubles up to 8 s.")
    attempts: int = Field(default=8, ge=1, le=100, description="Tries per request before the run is given up.")
    seed: int = Field(
        default=0, ge=0, le=2**31 - 1, description="Shifts all item seeds: another sample of the same suite."
    )
