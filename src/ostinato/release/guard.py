"""Is this version harming people? Pure arithmetic over per-user tallies, used on live after each release.

A look is due whenever the number of outcomes has doubled. Once the log has grown by as many rows as the window holds turns, a look is due
each time it has grown by as many again, since a window's content stops growing and harm may begin late. Look k = 0, 1, ... may spend
alpha / ((k+1) (k+2)), which adds up to alpha: by the union bound the probability of ever condemning an equally good version is at most
alpha, however long the version is watched and however users are correlated in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, Field

from ostinato.core.records import Person

Tally = Mapping[Person, tuple[float, float]]
"""Tenant and user -> (sum of outcomes in [0, 1], number of outcomes); both may be weighted."""


class Bounds(Protocol):
    """A difference of means with a two-sided interval."""

    @property
    def mean(self) -> float: ...
    @property
    def lower(self) -> float: ...
    @property
    def upper(self) -> float: ...


class Compare(Protocol):
    """User-clustered difference of two arms, treated minus control (`evaluate.statistics.clustered_difference`)."""

    def __call__(self, treated: Tally, control: Tally, confidence: float) -> Bounds: ...


class GuardConfig(BaseModel, frozen=True, extra="forbid"):
    """When a version that serves users is rolled back automatically."""

    enabled: bool = Field(default=True, description="False: only a person rolls back.")
    alpha: float = Field(
        default=0.02,
        gt=0.0,
        lt=0.5,
        description="Chance per release of rolling back an equally good version, all looks together.",
    )
    tolerance: float = Field(
        default=0.02, ge=0.0, lt=1.0, description="Tolerated loss in share of accepted turns (or rise in errors)."
    )
    min_outcomes: int = Field(default=60, ge=2, description="Outcomes of the watched version before the first look.")
    min_users: int = Field(default=5, ge=2, description="Users on each side before any look.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """A significant loss. Example: ``Harm(measure="acceptance", loss=0.21, at_least=0.08, look=2)``"""

    measure: str
    loss: float
    at_least: float
    look: int

    def __str__(self) -> str:
        return (
            f"{self.measure} worse by {100 * self.loss:.1f} pp, at least {100 * self.at_least:.1f} pp "
            f"(look {self.look + 1}, spending alpha over all looks)"
        )


def look_at(outcomes: int, config: GuardConfig) -> int | None:
    """Which look is due with that many outcomes (0, 1, ...), or None before the first.

    Example: with ``min_outcomes=60``: 59 -> None, 60 -> 0, 119 -> 0, 120 -> 1, 240 -> 2.
    """
    if outcomes < config.min_outcomes:
        return None
    return (outcomes // config.min_outcomes).bit_length() - 1


def look_due(outcomes: int, rows: int, window: int, config: GuardConfig) -> int | None:
    """Which look is due: by doublings at first, by rows of the log since the release as soon as there are `window` of them.

    Example: with ``min_outcomes=60`` and a window of 1,000 turns: 960 outcomes in 999 rows -> 4, in 1,000 -> 5, in 3,500 -> 7.
    """
    doubled, full = look_at(outcomes, config), look_at(window, config)
    if doubled is None or full is None or rows < window:
        return doubled
    return full + rows // window


def total(tally: Mapping[Any, tuple[float, int]]) -> int:
    """Number of outcomes."""
    return sum(count for _, count in tally.values())


def users(tally: Tally) -> int:
    """Users with at least one outcome."""
    return sum(1 for _, count in tally.values() if count > 0)


def judge(
    measure: str, watched: Tally, baseline: Tally, look: int, config: GuardConfig, compare: Compare
) -> Harm | None:
    """Harm if the watched version's mean is below the baseline's by more than the tolerance, one-sided at this look's level.

    `measure` names the outcomes, of which 1 is the good one. The caller makes each look at most once.
    """
    if min(users(watched), users(baseline)) < config.min_users:
        return None
    level = config.alpha / ((look + 1) * (look + 2))
    bounds = compare(watched, baseline, 1.0 - 2.0 * level)
    if bounds.upper >= -config.tolerance:
        return None
    return Harm(measure=measure, loss=-bounds.mean, at_least=-bounds.upper, look=look)
