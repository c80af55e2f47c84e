"""The result of an evaluation: a candidate compared with its incumbents, and the gate's verdict."""

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
    """What a candidate is compared with: the live release, the best release so far, and the frozen first one."""

    LIVE = "live"
    BEST = "best"
    ANCHOR = "anchor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbents:
    """The incumbent versions when a candidate is judged. Several of them may be the same version.

    `best` is the last release that was proven better than the previous best; None if it cannot be sampled. `round` is the number of
    candidates judged before this one, and determines a candidate's items and seeds. `since_s` is the number of seconds since another
    candidate was looked at; None: none was.

    Example: ``Incumbents(live=v9, best=v6, anchor=v0, round=12, since_s=86_400.0)``
    """

    live: PolicyVersion
    best: PolicyVersion | None
    anchor: PolicyVersion
    round: int
    since_s: float | None = None

    def named(self) -> dict[Incumbent, PolicyVersion]:
        """Return the incumbents that can be sampled, by name."""
        found = {Incumbent.LIVE: self.live, Incumbent.ANCHOR: self.anchor}
        return found if self.best is None else found | {Incumbent.BEST: self.best}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemScore:
    """One graded sample of one suite item: `score` in [0, 1]. Items are paired across policies by (item, draw).

    `formed`: the answer is not empty and ended by itself. `seconds` is the duration of the request that it was part of; as a
    measurement, it is ignored when two samples are compared. `answer` is a short hash of the answer's text, "" if it is not a single text.

    Example: ``ItemScore(item="add-1", draw=0, score=1.0, formed=True, seconds=0.4, answer="9f3c21aa")``
    """

    item: str
    draw: int
    score: float
    formed: bool = True
    seconds: float = field(default=0.0, compare=False)
    answer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Candidate minus one incumbent on one suite, in [-1, 1]. `lower` and `upper` are the one-sided bounds that the gate used.

    `margin` is the tolerated loss; None if the test is only for harm. `error` is the standard error.

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

    `n` is the number of items behind the bound; with none the bar is not cleared.

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
    """A version's pass rates at the first try and at the best of `k`. Example: ``PassRates(k=8, first=first, best=best)``"""

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
        """True if pass@1 rose and best-of-k fell, both significantly: the candidate is surer of less."""
        return self.first.lower > 0.0 > self.best.upper


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDiversity:
    """The rate at which two answers to one prompt differ, for the candidate and for the anchor, on the items that both answered.

    `excess` is the candidate's rate minus two thirds of the anchor's.

    Example: ``AnswerDiversity(draws=8, candidate=0.31, anchor=0.62, excess=ItemMean(mean=-0.10, lower=-0.16, upper=-0.04, items=164))``
    """

    draws: int
    candidate: float
    anchor: float
    excess: ItemMean


@dataclass(frozen=True, slots=True, kw_only=True)
class OpinionShift:
    """Sycophancy: the rates at which a candidate and one incumbent agree with the opinion that a user states, on pairs of prompts that
    differ only in that opinion; 0.5 if it has no effect. `excess` is the difference minus the tolerance.

    Example: ``OpinionShift(against=Incumbent.ANCHOR, policy=v0, candidate=0.81, incumbent=0.62, excess=ItemMean(mean=0.16, lower=0.09,
    upper=0.23, items=80))``
    """

    against: Incumbent
    policy: PolicyVersion
    candidate: float
    incumbent: float
    excess: ItemMean


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Candidate against live on the first suite, with everything behind the verdict. Differences are candidate minus live, in [-1, 1].

    `power` is the probability that an equally good candidate passes this look. `smallest_margin` is the smallest total margin that this
    suite can hold at the observed spread, and `draw_spread` the standard deviation of one of the anchor's draws of an item. `better`: a
    candidate that ships is proven better than the best release so far. `pass_rates` and `sharpening` are its pass rates in one try and in
    several, and their changes; `diversity`: how its answers to one prompt differ; `opinions`: how a user's opinion affects them.
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
    draw_spread: float | None = None
    round: int = 0
    pass_rates: PassRates | None = None
    sharpening: tuple[Sharpening, ...] = ()
    diversity: AnswerDiversity | None = None
    opinions: tuple[OpinionShift, ...] = ()


def headline(reason: str, most: int = 160) -> str:
    """Return the first clause of a reason, for lists: clauses are separated by "; ", and the first is the deciding one.

    Example: ``headline("not worse than the margins: +2.1 pp; low power") == "not worse than the margins: +2.1 pp; …"``
    """
    first, parted, _ = reason.partition("; ")
    if len(first) > most:
        return f"{first[: most - 1]}…"
    return f"{first}; …" if parted else first
