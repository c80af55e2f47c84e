"""The data that the pages show, and the protocols that provide it. Times are Unix seconds, shares and differences lie in [-1, 1], sizes
are bytes.

An unknown figure is None and is drawn as a dash; 0 is a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ostinato.core.errors import OstinatoError
from ostinato.core.records import PolicyVersion, Signal, Turn
from ostinato.core.seams import Cursor
from ostinato.web.page.release_evidence import ReleaseEvidence
from ostinato.web.run_report import Curve, Mark

# ---------------------------------------------------------------- stored


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLine:
    """One publication: the bytes sent, the size of the full weights, and the time that it took."""

    number: int
    hash: str
    form: str
    bytes: int
    full_bytes: int
    changed: float | None
    seconds: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapLine:
    """One hot swap of a slot: the time in which no token could be made, and the streams that went on."""

    slot: str
    number: int
    pause_s: float
    streams: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerNow:
    """A gateway slot's loaded version, and the version that its ref names. `lag_s`: from when a version was wanted to its load, or to now.

    Example: ``FollowerNow(slot="live", number=17, loaded_at=60.0, wanted=v17, lag_s=2.4, behind=False)``
    """

    slot: str
    number: int
    loaded_at: float
    wanted: PolicyVersion | None
    lag_s: float | None
    behind: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsNow:
    """The weight store: refs, the newest publications, swaps, followers, sizes on disk."""

    refs: Mapping[str, PolicyVersion]
    published: tuple[PublishedLine, ...]
    swaps: tuple[SwapLine, ...]
    disk: Mapping[str, int]
    free: int
    followers: tuple[FollowerNow, ...] = ()


# ---------------------------------------------------------------- what the pages show


PAGE_ROWS = 50
MOST_COUNTED = 10_000


class TooWide(OstinatoError):
    """A search that took too long was given up."""

    status = 503
    code = "too_wide"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNow:
    """One worker. `trouble` is the fault whose repair it waits for, `last_end` the reason of its last end."""

    name: str
    condition: str
    doing: str
    since: float
    trouble: str | None = None
    restarts: int = 0
    last_end: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmNow:
    """One arm's newest rated turns: the share of them that was accepted, with its 95% interval, users as clusters."""

    arm: str
    version: int | None
    turns: int
    share: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmLine:
    """One change of an alarm. `standing`: it is raised now."""

    name: str
    reason: str
    at: float
    standing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent:
    """One line of the release ledger. `seq` is its place in the log, `previous` the other version that it is about."""

    seq: Cursor
    id: str
    action: str
    policy: PolicyVersion
    previous: PolicyVersion | None
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """A run at one moment.

    `troubles` are sentences, the worst first. `refs` are the versions that are served or judged, `shares` the shares of users on
    the arms beside live. `pace` is turns a second over the last minute. `batch` is how many turns a step takes, `step` the newest
    step, and `step_line` its progress line. `held` counts turns by the reason why nothing was learned from them. `rated_since` is when
    the oldest turn behind `arms` was served, `rated_end` the end of the last window of `curves`. `releasing` are sentences on what waits
    for approval, and on how many releases the traffic can carry. `unproven` is the warning that users are only declared, "" if none is due.
    """

    at: float
    directory: str
    url: str | None
    simulated: bool
    troubles: tuple[str, ...]
    workers: tuple[WorkerNow, ...]
    refs: Mapping[str, PolicyVersion]
    shares: Mapping[str, float]
    pace: float | None
    served: int
    waiting: int
    oldest_wait: float | None
    batch: int
    trained: int
    held: Mapping[str, int]
    balanced: bool
    signals: int
    step: int
    step_line: Mapping[str, Any]
    last: LedgerEvent | None
    arms: tuple[ArmNow, ...]
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]
    rated_since: float | None
    rated_end: float | None
    alarms: tuple[AlarmLine, ...]
    releasing: tuple[str, ...] = ()
    unproven: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLook:
    """One look of the gate at a candidate: the mean difference to `against`, with the bounds that the verdict used.

    Example: ``GateLook(at=60.0, against=v7, suite="held-out", items=100, draws=2, candidate=0.52, live=0.5, difference=0.02,
    lower=-0.01, upper=0.05, margin=0.1, power=0.9, verdict="SHIP")``
    """

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
    """One version in the ledger. `state`: its last action except looks. `difference` and its bounds are of the gate's last look."""

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
    """A page of versions, the newest in the ledger first. `older`: where the next page begins. `counts` are by action.

    `unread`: rows of the log that the list does not hold yet.
    """

    rows: tuple[ReleaseLine, ...]
    older: Cursor | None
    counts: Mapping[str, int]
    live: PolicyVersion | None
    previous: PolicyVersion | None
    unread: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDetail:
    """One version with its evidence. `events` are newest first, each with the further details of its ledger line.

    `live` is the version that serves users now, `previous` the one that a rollback would restore. `kept`: its weights are in the store.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnQuery:
    """Which turns to list. "" and None stand for any. `outcome` is trained, rewarded, waiting, or a reason of a holdback.

    `before` and `after` are places in the log: turns older than `before`, or newer than `after`. A tenant cannot choose `tenant`.
    """

    tenant: str | None = None
    user: str = ""
    arm: str = ""
    version: int | None = None
    outcome: str = ""
    text: str = ""
    before: Cursor | None = None
    after: Cursor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLine:
    """One turn in a list, with its signals and outcome."""

    seq: Cursor
    turn: Turn
    signals: tuple[str, ...]
    reward: float | None
    reason: str | None
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnList:
    """A page of turns. `count` stops at `MOST_COUNTED` + 1. `unread`: turns of the log that cannot be found yet.

    `searchable` says whether answers can be searched by words, which they cannot if they are encrypted.
    """

    rows: tuple[TurnLine, ...]
    older: Cursor | None
    newer: Cursor | None
    count: int
    unread: int
    searchable: bool
    outcomes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDetail:
    """One turn, whole. `prompt` and `sampled` are the bytes of each token, b"" for a control token. `advantage` is its first token's.

    `released`: the first release whose training had the turn in it. `parts`: the parts of the reward, if they are known.
    """

    line: TurnLine
    prompt: tuple[bytes, ...]
    sampled: tuple[bytes, ...]
    signals: tuple[Signal, ...]
    retracted: frozenset[str]
    function: str | None
    decided_at: float | None
    advantage: float | None
    released: LedgerEvent | None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """One figure over optimizer steps.

    Example: ``StepSeries(name="ess", title="Effective sample size", unit="share", points=((3, 0.9),))``
    """

    name: str
    title: str
    unit: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningNow:
    """The state of training: figures per step, refused batches, and why turns were held back."""

    series: tuple[StepSeries, ...]
    steps: int
    marks: tuple[tuple[float, str], ...]
    refused: tuple[tuple[int, str, float], ...]
    held: Mapping[str, int]
    batch: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmList:
    """The standing alarms, and a page of the alarms raised and cleared before, newest first."""

    standing: tuple[AlarmLine, ...]
    rows: tuple[AlarmLine, ...]
    older: Cursor | None
    coverage: Mapping[str, tuple[float, int, bool]] = field(default_factory=dict[str, tuple[float, int, bool]])


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmDetail:
    """The last line of one alarm, with example turns. `acceptable`: a person may end it.

    `id` names the raised line, so that nobody accepts an alarm that they have not seen.
    """

    line: AlarmLine
    id: str
    acceptable: bool
    detail: Mapping[str, Any]
    turns: tuple[TurnLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaygroundAnswer:
    """One arm's answer in the playground. `turn` names it for feedback; `version` made its first token."""

    arm: str
    turn: str
    version: int | None
    text: str
    error: str | None = None


class Facts(Protocol):
    """Answers the pages' questions, each in bounded time. Raises TooWide, Unavailable, StorageFull, Corrupt."""

    async def now(self) -> RunNow:
        """The run at this moment; at most a second old."""
        ...

    async def releases(self, before: Cursor | None) -> ReleaseList:
        """Versions of the ledger, newest first."""
        ...

    async def release(self, root: str) -> ReleaseDetail | None:
        """The version named by live, v12 or a hash prefix; None if the ledger has no such version, or several with that prefix."""
        ...

    async def turns(self, query: TurnQuery) -> TurnList:
        """Turns, newest first."""
        ...

    async def turn(self, id: str, tenant: str | None) -> TurnDetail | None:
        """One turn; None if there is none, or if it is another tenant's."""
        ...

    async def learning(self) -> LearningNow:
        """The state of training."""
        ...

    async def alarms(self, before: Cursor | None) -> AlarmList:
        """The standing alarms and the past ones."""
        ...

    async def alarm(self, name: str) -> AlarmDetail | None:
        """One alarm; None if it was never raised."""
        ...

    async def weights(self) -> WeightsNow:
        """The weight store."""
        ...


class Acts(Protocol):
    """An operator's actions from the page, by the same functions as the command line."""

    async def ship(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """Ship a version; returns a sentence on what is live now. Raises Conflict if `expected_live` is not live, NotFound, BadRequest."""
        ...

    async def approve(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """Ship a version that has passed and waits for approval. Raises as `ship`; NotFound too if it does not wait."""
        ...

    async def refuse(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """Block a version that waits for approval. Raises as `approve`."""
        ...

    async def roll_back(self, expected_live: str, reason: str, actor: str) -> str:
        """Roll the live version back; returns a sentence on what is live now. Raises as `ship`."""
        ...

    async def accept(self, alarm: str, id: str, reason: str, actor: str) -> str:
        """End the alarm that was raised with this id. Raises NotFound, Conflict, BadRequest."""
        ...

    async def ask(self, messages: Sequence[Mapping[str, str]], arms: Sequence[str]) -> tuple[PlaygroundAnswer, ...]:
        """One answer per arm. A failure is reported in the answer."""
        ...

    async def rate(self, turn: str, name: str, correction: str) -> str:
        """Send feedback about an answer; returns its status."""
        ...
