"""Configuration of compute allocation: serving replicas lent to rollouts, and the number of rollout workers."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator


class LendConfig(BaseModel, frozen=True, extra="forbid"):
    """When vLLM servers of the live slot sample rollouts. Users' traffic comes first."""

    most: int = Field(default=0, ge=0, description="The most servers that are lent at once; 0: none ever.")
    carries: float = Field(
        default=0.0,
        ge=0,
        description="Answers a second that one server carries for people; measure it with traffic like yours.",
    )
    lend_below: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="A server is lent while the highest rate of the last `window_s` is at most this share of what the others carry.",
    )
    return_above: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Once the present rate is above this share of what people's servers carry, so many are given back that it is not.",
    )
    guard_s: float = Field(
        default=2.0,
        gt=0,
        description="Everything is given back once a tenth of people's calls of late, three at least and not all of one user, wait longer "
        "than this for the live slot's first token; a product with one user at a time has its servers back by load alone.",
    )
    window_s: float = Field(default=1800.0, gt=0, description="Seconds of traffic that are looked back on.")
    hold_s: float = Field(
        default=900.0, ge=0, description="Nothing is lent for so long after the start and after a return."
    )
    step: int = Field(default=2, ge=1, description="The most that are lent in one go.")
    end_s: float = Field(
        default=10.0,
        ge=0,
        description="Rollouts' answers on a server that is wanted back may end for so long; then they are cut off and asked for again.",
    )
    only_gateway: bool = Field(
        default=False,
        description="Needed with a log in Postgres, which several gateways may share: no other one asks the servers of engine.urls.",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.most and not self.carries:
            raise ValueError(
                "most is set, and nobody knows what a server carries; set carries to the answers a second that one gives, or most = 0"
            )
        if self.lend_below >= self.return_above:
            raise ValueError("lend_below must lie below return_above, or what is lent is wanted back at once")
        return self


class ComputeConfig(BaseModel, frozen=True, extra="forbid"):
    """Allocation of compute; everything is off by default."""

    share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Sampling's share of all operations, which `up --on ray` holds by the number of rollout workers; 0: "
        "`ray.rollouts` and `ostinato scale` alone say how many there are.",
    )
    least_workers: int = Field(default=1, ge=1, description="With `share`, the fewest rollout workers.")
    most_workers: int = Field(default=8, ge=1, le=1000, description="With `share`, the most rollout workers.")
    every_s: float = Field(
        default=600.0,
        gt=0,
        description="With `share`, seconds between two decisions; none is made before another optimizer step was logged.",
    )

    lend: LendConfig = Field(default_factory=LendConfig, description="People's vLLM servers sample rollouts.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.least_workers > self.most_workers:
            raise ValueError("least_workers is above most_workers; lower the first or raise the second")
        return self
