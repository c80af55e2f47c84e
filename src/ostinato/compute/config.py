"""Configuration of compute allocation: serving replicas lent to rollouts, and the number of rollout workers."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator


class LendConfig(BaseModel, frozen=True, extra="forbid"):
    """When vLLM servers of the live slot sample rollouts. Users' traffic comes first."""

    most: int = Field(default=0, ge=0, description="Most servers lent at once. 0: none is ever lent.")
    carries: float = Field(
        default=0.0,
        ge=0,
        description="Answers per second that one server can give to people. Measure it with traffic like yours.",
    )
    lend_below: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Share of the other servers' capacity. A server is lent while the highest rate of answers in the last `window_s` is "
        "at most this share.",
    )
    return_above: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Share of the capacity of people's servers. Once the current rate of answers exceeds it, enough servers are given "
        "back that it no longer does.",
    )
    guard_s: float = Field(
        default=2.0,
        gt=0,
        description="Longest acceptable wait for the live slot's first token, in seconds. All servers are given back once a tenth of "
        "people's recent calls (at least three, of two users or more) wait longer. With one user at a time, only the load brings servers "
        "back.",
    )
    window_s: float = Field(
        default=1800.0, gt=0, description="Length of past traffic that `lend_below` considers, in seconds."
    )
    hold_s: float = Field(
        default=900.0, ge=0, description="Seconds after the start and after each return during which no server is lent."
    )
    step: int = Field(default=2, ge=1, description="Most servers lent at a time.")
    end_s: float = Field(
        default=10.0,
        ge=0,
        description="Seconds that rollouts' answers have to end on a server that is wanted back. Then they are cut off and requested "
        "again.",
    )
    only_gateway: bool = Field(
        default=False,
        description="Confirms that no other gateway uses engine.urls. It is required with a log in Postgres, which several gateways may "
        "share.",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.most and not self.carries:
            raise ValueError(
                "most is set without carries; set carries to the answers per second that one server can give, or most = 0"
            )
        if self.lend_below >= self.return_above:
            raise ValueError("lend_below must be below return_above, or lent servers would be taken back at once")
        return self


class ComputeConfig(BaseModel, frozen=True, extra="forbid"):
    """Allocation of compute; everything is off by default."""

    share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of all operations that goes to sampling. `up --on ray` maintains it by changing the number of rollout "
        "workers. 0: only `ray.rollouts` and `ostinato scale` set that number.",
    )
    least_workers: int = Field(default=1, ge=1, description="With `share`: fewest rollout workers.")
    most_workers: int = Field(default=8, ge=1, le=1000, description="With `share`: most rollout workers.")
    every_s: float = Field(
        default=600.0,
        gt=0,
        description="With `share`: seconds between two decisions. Each decision also waits for another optimizer step in the log.",
    )

    lend: LendConfig = Field(
        default_factory=LendConfig, description="When vLLM servers that serve people sample rollouts."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.least_workers > self.most_workers:
            raise ValueError("least_workers is above most_workers; lower the first or raise the second")
        return self
