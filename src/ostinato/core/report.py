"""What an evaluation found: a candidate beside what it must hold its own against, and what the gate makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ostinato.core.records import PolicyVersion


class Verdict(StrEnum):
    """The gate's answer. EXTEND means: not enough evidence yet, draw more."""

    SHIP = "SHIP"
    BLOCK = "BLOCK"
    EXTEND = "EXTEND"


class Incumbent(StrEnum):
    """Whom a candidate is compared with: what is before users, the best release so far, the frozen first one."""

    LIVE = "live"
    BEST = "best"
    ANCHOR = "anchor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbents:
    """The versions that stand when a candidate is judged. Several of them may be one and the same.

    `best` is the last release that was proven better than the best before it; None where it cannot be sampled. `round` counts the
    candidates that were judged before this one: items and seeds are drawn anew in each round.

    Example: ``Incumbents(live=v9, best=v6, anchor=v0, round=12)``
    """

    live: PolicyVersion
    best: PolicyVersion | None
    anchor: PolicyVersion
    round: int

    def named(self) -> dict[Incumbent, PolicyVersion]:
        """Those that can be sampled, by name."""
        found = {Incumbent.LIVE: self.live, Incumbent.ANCHOR: self.anchor}
        return found if self.best is None else found | {Incumbent.BEST: self.best}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemScore:
    """One graded sample of one suite item: `score` in [0, 1]. Items are paired across policies by (item, draw).

    `formed` says that the answer is not empty and ended by itself. `seconds` is how long the request took that it was a part of: a
    measurement, so two samples with different ones are still the same.

    Example: ``ItemScore(item="add-1", draw=0, score=1.0, formed=True, seconds=0.4)``
    """

    item: str
    draw: int
    score: float
    formed: bool = True
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Candidate minus one incumbent on one suite, in [-1, 1]. `lower` and `upper` are the one-sided bounds that the gate used.

    `margin` is the tolerated loss; None where nothing but harm is looked for. `error` is the standard error.

    Example: ``Comparison(suite="held-out", against=Incumbent.BEST, policy=v6, difference=0.004, lower=-0.021, upper=0.029,
    error=0.008, margin=0.03, items=1000, draws=8)``
    """

    suite: str
    against: Incumbent
    policy: PolicyVersion
    difference: float
    lower: float
    upper: float
    error: float
    margin: float | None
    items: int
    draws: int

    @property
    def holds(self) -> bool:
        """True if a loss of the margin or more is ruled out."""
        return self.margin is None or self.lower > -self.margin


@dataclass(frozen=True, slots=True, kw_only=True)
class BarResult:
    """Whether a candidate clears one quality bar: `bound`, the one-sided 99% bound of `value`, against `wanted`.

    `n` is the number of items that say so; with none the bar is not cleared.

    Example: ``BarResult(suite="safety", axis="score", value=1.0, bound=0.977, wanted=0.97, n=200, holds=True)``
    """

    suite: str
    axis: str
    value: float
    bound: float
    wanted: float
    n: int
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemMean:
    """A mean over items with a two-sided interval. Example: ``ItemMean(mean=0.31, lower=0.25, upper=0.37, items=164)``"""

    mean: float
    lower: float
    upper: float
    items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRates:
    """What a version solves at the first try, and at the best of `k`. Example: ``PassRates(k=8, first=first, best=best)``"""

    k: int
    first: ItemMean
    best: ItemMean


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharpening:
    """A candidate's pass rates minus an incumbent's, on the items that both answered.

    Example: ``Sharpening(against=Incumbent.ANCHOR, policy=v0, k=8, first=first, best=best)``
    """

    against: Incumbent
    policy: PolicyVersion
    k: int
    first: ItemMean
    best: ItemMean

    @property
    def narrowed(self) -> bool:
        """True if pass@1 rose and best-of-k fell, both beyond doubt: it is surer of less."""
        return self.first.lower > 0.0 > self.best.upper


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Candidate against live on the first suite, with all that the verdict rests on. Differences are candidate minus live, in [-1, 1].

    `power` is the chance that an equally good candidate passes this look; `smallest_margin` is the smallest total margin that this suite
    can hold at the spread seen here. `better` says that a candidate that ships is proven better than the best release so far. `pass_rates`
    and `sharpening` say what it solves in one try and in several, and how that changed.
    """

    suite: str
    suite_hash: str
    candidate: PolicyVersion
    live: PolicyVersion
    candidate_mean: float
    live_mean: float
    difference: float
    lower: float
    upper: float
    items: int
    draws: int
    margin: float
    power: float
    verdict: Verdict
    reason: str
    comparisons: tuple[Comparison, ...] = ()
    bars: tuple[BarResult, ...] = ()
    better: bool = False
    smallest_margin: float = 1.0
    round: int = 0
    pass_rates: PassRates | None = None
    sharpening: tuple[Sharpening, ...] = ()


def headline(reason: str, most: int = 160) -> str:
    """What a reason says first, for lists: clauses are parted by "; ", and the first is what decided.

    Example: ``headline("not worse than the margins: +2.1 pp; low power") == "not worse than the margins: +2.1 pp; …"``
    """
    first, parted, _ = reason.partition("; ")
    if len(first) > most:
        return f"{first[: most - 1]}…"
    return f"{first}; …" if parted else first
