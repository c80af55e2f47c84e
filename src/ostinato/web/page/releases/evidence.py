"""What speaks for and against a release, and what it changed. Shares and differences lie in [-1, 1], sizes are bytes.

What nobody measured is None or empty: no look at users is no look that found nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.records import PolicyVersion
from ostinato.core.report import BarResult, Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLook:
    """One measure at one look: candidate minus comparator, with the bounds that the trial used; None where nobody said anything.

    The goal of a look is a share, and more of it is better; other measures are in units of their own, and `better` says which way is.
    `finding` is worded as a look's.

    Example: ``MeasureLook(name="latency", role="guardrail", difference=0.12, lower=-0.1, upper=0.4, people=640.0, better="lower")``
    """

    name: str
    role: str
    difference: float | None
    lower: float | None
    upper: float | None
    people: float | None
    better: str = "higher"
    finding: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLook:
    """What the ledger kept of one look at users: `goal` is what decides. `share` is the candidate's share of users from then on.

    `finding` is better, "better, confirmed", "better at first", not worse, worse, undecided, or none before there were enough people.

    Example: ``TrialLook(at=60.0, action="ramped", share=0.25, goal=MeasureLook(...), turns=4210.0, sees=0.031, finding="undecided",
    reason="a loss of more than 4.1 pp is ruled out", measures=())``
    """

    at: float
    action: str
    share: float | None
    goal: MeasureLook
    turns: float
    sees: float | None
    finding: str
    reason: str
    measures: tuple[MeasureLook, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRules:
    """What the trial's bounds mean: a loss above `margin` ships with a chance of at most `alpha`, better needs odds of `better_odds`.

    Example: ``TrialRules(margin=0.02, alpha=0.05, better_odds=50.0, void_odds=1000.0)``
    """

    margin: float
    alpha: float
    better_odds: float
    void_odds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """How many people came to each side of a trial; `expected` on the candidate's, under the shares in force when each came.

    `odds` speak against the set shares, and may be looked at as often as one likes. `turns` were read; not `whole`: there are more.

    Example: ``Dealt(candidate=2031, others=18012, expected=2004.3, odds=0.02, turns=48000, whole=True)``
    """

    candidate: int
    others: int
    expected: float
    odds: float
    turns: int
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RateShift:
    """One rate over the newest turns of two versions. `lower` and `upper` bound the difference, after minus before, clustered by person.

    They are None where one side has not two people. `harmful` says that a move in this direction is watched as harm.

    Example: ``RateShift(name="question", means="answers that ask instead", before=0.11, after=0.19, lower=0.01, upper=0.15,
    turns_before=200, turns_after=180, people=41, harmful=True)``
    """

    name: str
    means: str
    before: float | None
    after: float | None
    lower: float | None
    upper: float | None
    turns_before: int
    turns_after: int
    people: int
    harmful: bool

    @property
    def moved(self) -> bool:
        """True if the bounds leave no change out."""
        return self.lower is not None and self.upper is not None and (self.lower > 0 or self.upper < 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """One tensor of one layer: `share` is what its deltas take of its size, an upper bound of how much of it is new.

    Example: ``LayerChange(kind="self_attn.q_proj", layer=3, share=0.0041)``
    """

    kind: str
    layer: int | None
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """What was published between two releases: `versions` deltas of `bytes` together. `layers` is empty where one was a full snapshot.

    Example: ``WeightChange(since=v16, versions=1, bytes=1_240_000, full_bytes=269_000_000, layers=(...))``
    """

    since: PolicyVersion
    versions: int
    bytes: int
    full_bytes: int
    layers: tuple[LayerChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamePrompt:
    """Two versions' answers to one prompt of the suite, from the turns that the gate made. `prompt` is the bytes of its tokens."""

    prompt: tuple[bytes, ...]
    before: str
    after: str
    turn_before: str
    turn_after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEvidence:
    """Everything beside the gate's looks. `against`: what the version was compared with; `steps`, `turns`: what it learned since.

    `gate_alpha`: the chance that the gate lets a version pass that is worse than live by the margin.
    """

    against: PolicyVersion | None = None
    comparisons: tuple[Comparison, ...] = ()
    bars: tuple[BarResult, ...] = ()
    trial: tuple[TrialLook, ...] = ()
    rules: TrialRules | None = None
    dealt: Dealt | None = None
    rates: tuple[RateShift, ...] = ()
    steps: int | None = None
    turns: int | None = None
    weights: WeightChange | None = None
    examples: tuple[SamePrompt, ...] = ()
    gate_alpha: float | None = None
