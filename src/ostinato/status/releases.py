"""A release and the evidence for and against it, for the page, `release show` and the report.

Times are Unix seconds, shares and differences are in [-1, 1], sizes are bytes. What was not measured is None or empty: no look at users
differs from a look that found nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ostinato.core.records import PolicyVersion
from ostinato.core.report import BarResult, Comparison
from ostinato.core.seams import Cursor

# ---------------------------------------------------------------- evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLook:
    """One measure at one look: candidate minus comparator, with the trial's bounds; None without feedback.

    The goal of a look is a share, and higher is better. Other measures have their own units, and `better` is the direction that is better.
    `finding` has the values of `TrialLook.finding`.
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
    """One look at users, as recorded in the ledger. `goal` is the deciding measure, `share` the candidate's share of users from then on.

    `finding` is better, "better, confirmed", "better at first", not worse, worse, undecided, or "too few people".
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
    """What the trial's bounds guarantee: a loss above `margin` ships with a probability of at most `alpha`."""

    margin: float
    alpha: float
    void_odds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """How many people came to each side of a trial; `expected`: on the candidate's side, given the shares in force when each came.

    `odds`: the odds against the configured shares (sample-ratio mismatch), valid under repeated looks (anytime-valid). `turns`: number of
    turns read; `whole` is False if there are more.
    """

    candidate: int
    others: int
    expected: float
    odds: float
    turns: int
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RateShift:
    """One rate over the newest turns of two versions. `lower`, `upper`: bounds of after minus before, clustered by person; None if a side
    has fewer than two people. `harmful`: a shift in this direction is watched as harm.
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
        """True if the bounds exclude zero change."""
        return self.lower is not None and self.upper is not None and (self.lower > 0 or self.upper < 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """One tensor of one layer. `share`: the size of its deltas relative to its own, an upper bound on how much of it changed."""

    kind: str
    layer: int | None
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """The publications between two releases: `versions` deltas of `bytes` in total. `layers` is empty if one was a full snapshot."""

    since: PolicyVersion
    versions: int
    bytes: int
    full_bytes: int
    layers: tuple[LayerChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamePrompt:
    """Two versions' answers to one prompt of the suite, from turns that the gate made. `prompt`: the bytes of its tokens."""

    prompt: tuple[bytes, ...]
    before: str
    after: str
    turn_before: str
    turn_after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEvidence:
    """All evidence beside the gate's looks. `against`: the version compared with. `steps`, `turns`: training since that version.

    `gate_alpha`: the probability that the gate passes a version that is worse than live by the margin.
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


# ---------------------------------------------------------------- ledger and versions


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent:
    """One event of the release ledger. `seq`: its sequence number in the log. `previous`: the other version that it is about.

    `void`: it changed nothing, because live had moved just before it was written (`release.ledger.is_void`).
    """

    seq: Cursor
    id: str
    action: str
    policy: PolicyVersion
    previous: PolicyVersion | None
    reason: str
    at: float
    void: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLook:
    """One look of the gate at a candidate: the mean difference to `against`, with the bounds that the verdict used."""

    at: float
    against: PolicyVersion
    suite: str
    items: int
    draws: int
    candidate: float
    live: float
    difference: float
    lower: float
    upper: float
    margin: float
    power: float
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLine:
    """One version in the ledger. `state`: its last action except looks and void events.

    `difference` and its bounds are of the gate's last look.
    """

    seq: Cursor
    policy: PolicyVersion
    state: str
    live: bool
    verdict: str
    difference: float | None
    lower: float | None
    upper: float | None
    margin: float | None
    looks: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseList:
    """A page of versions, newest in the ledger first. `older`: the cursor of the next page. `counts`: number of events by action.

    `unread`: how many rows of the log the list does not include yet.
    """

    rows: tuple[ReleaseLine, ...]
    older: Cursor | None
    counts: Mapping[str, int]
    live: PolicyVersion | None
    previous: PolicyVersion | None
    unread: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDetail:
    """One version with its evidence. `events`: newest first, each with further details of its ledger row.

    `live`: the version that serves users now. `previous`: the version that a rollback would restore. `kept`: its weights are in the store.
    `awaits`: it has passed and waits until somebody approves or refuses it.
    """

    line: ReleaseLine
    looks: tuple[GateLook, ...]
    events: tuple[tuple[LedgerEvent, Mapping[str, Any]], ...]
    live: PolicyVersion | None
    previous: PolicyVersion | None
    kept: bool
    awaits: bool = False
    evidence: ReleaseEvidence = field(default_factory=ReleaseEvidence)
