"""The release ledger: the `ReleaseEvent` rows of the log, folded into the live version, the earlier releases, and the blocked versions.

The fold is pure. `ReleaseLedger` keeps it up to date from the log and appends to the log. No line is ever changed or removed.

`Ancestry` says whether a candidate descends from a version that harmed people. A training step starts from the weights of the step before
it, so every version after a harmful one may carry the harm on, until the trainer restarts from the weights of a release that still stands.
The batch of that step records the restart (`core.records.Batch.base`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, Self

from ostinato.core.arm_assignment import Dealing
from ostinato.core.records import Batch, PolicyVersion, ReleaseEvent
from ostinato.core.seams import Clock, Cursor, Log
from ostinato.release.pace import PaceHistory, RolledBack
from ostinato.release.trial.config import Require
from ostinato.release.trial.group_sequential import ShipPlan

# ---------------------------------------------------------------- ancestry


@dataclass(frozen=True, slots=True, kw_only=True)
class Harmful:
    """A recorded harm: versions numbered above `above` may carry it on if they were trained before the trainer restarted.

    `known_at` is the position in the log at which the harm was recorded.

    Example: ``Harmful(above=5, known_at=8123)``: v9 was rolled back to v5.
    """

    above: int
    known_at: Cursor


class Ancestry:
    """Finds the first step after a harm that does not descend from it. Reads batches from the harm on; without harm it reads nothing."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._of: Harmful | None = None
        self._cursor: Cursor = 0
        self._clean_from: int | None = None

    async def carried_on(self, policy: PolicyVersion, harmful: Harmful | None) -> bool:
        """Return true if this version may descend from a harmful one."""
        if harmful is None or policy.number <= harmful.above:
            return False
        clean_from = await self.clean_from(harmful)
        return clean_from is None or policy.number < clean_from

    async def clean_from(self, harmful: Harmful) -> int | None:
        """Return the first step after the harm that started from the weights of a release that stands; None if there is none yet."""
        if harmful != self._of:
            self._of, self._cursor, self._clean_from = harmful, harmful.known_at, None
        if self._clean_from is None:
            async for cursor, row in self._log.read(self._cursor, {Batch}):
                self._cursor = cursor
                if isinstance(row, Batch) and row.base is not None:
                    self._clean_from = row.step
                    break
        return self._clean_from


# ---------------------------------------------------------------- trials


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial as recorded in the ledger. `shares`: pairs of the time from which a share holds and the candidate's share of the users.

    `better_at`: when the candidate was called better; `retested`: whether that held afterwards. Both are None before that. `require` and
    `plan` (the plan of its interim looks; None: the confidence sequence decides) are those in force when the trial began: a later change
    of the configuration applies to later trials. `told_at`: when the ledger last got a line about the trial.

    Example: ``TrialRecord(candidate=v9, against=v8, salt="9f2c", shares=((60.0, 0.05), (1860.0, 0.25)), shipped=False)``
    """

    candidate: PolicyVersion
    against: PolicyVersion
    salt: str
    shares: tuple[tuple[float, float], ...]
    shipped: bool = False
    better_at: float | None = None
    retested: bool | None = None
    require: Require = "no_loss"
    plan: ShipPlan | None = None
    told_at: float = 0.0

    @property
    def began(self) -> float:
        """When its first users were served the candidate."""
        return self.shares[0][0]

    @property
    def better_s(self) -> float | None:
        """When it was called better, in seconds after it began."""
        return None if self.better_at is None else self.better_at - self.began

    def share(self, at: float) -> float:
        """Return the share in force just before `at`."""
        return max((entry for entry in self.shares if entry[0] < at), default=self.shares[0])[1]

    def then(self, at: float, share: float) -> TrialRecord:
        """Return the same trial with another share from `at` on."""
        return replace(self, shares=(*self.shares, (at, share)))

    def owes_a_line(self, now: float, slot_s: float) -> bool:
        """Return true once the trial is a quarter older than at its last line, and by two slots: few lines, none long out of date."""
        told_at = max(self.told_at, self.began)
        return now - told_at >= max(2.0 * slot_s, (told_at - self.began) / 4.0)

    def dealing(self) -> Dealing:
        """Return the assignment of users to arms under its last share."""
        share = self.shares[-1][1]
        return Dealing(salt=self.salt, previous=1.0 - share) if self.shipped else Dealing(salt=self.salt, canary=share)


# ---------------------------------------------------------------- proposals


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A candidate that has passed and waits for a person's approval, as long as `against` is live.

    `actor`: the person who approved it (None before that); `why`: their reason. `salt`: its trial's salt, None if it passed without a
    trial. `better`: the gate proved it better than the best release so far.

    Example: ``Proposal(candidate=v9, against=v8, reason="not worse than the margins", at=60.0, salt="9f2c", better=False)``
    """

    candidate: PolicyVersion
    against: PolicyVersion
    reason: str
    at: float
    salt: str | None
    better: bool
    actor: str | None = None
    why: str = ""


# ---------------------------------------------------------------- hashes


class Hashes(Set[str]):
    """An immutable set of hashes with cheap additions: the first `count` keys of a dictionary that it shares with newer sets.

    Adding to the newest set extends the dictionary; adding to an older set, or removing, copies it.

    Example: ``Hashes(["9f", "a1"]) | {"b2"} == {"9f", "a1", "b2"}``
    """

    __slots__ = ("_count", "_places")

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        self._places = {name: place for place, name in enumerate(dict.fromkeys(hashes))}
        self._count = len(self._places)

    def __contains__(self, name: object) -> bool:
        return self._places.get(name, self._count) < self._count  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __iter__(self) -> Iterator[str]:
        return islice(self._places, self._count)

    def __len__(self) -> int:
        return self._count

    def adding(self, name: str) -> Self:
        """Return this set with one more hash."""
        if name in self:
            return self
        made = type(self)()
        made._places = (
            self._places if len(self._places) == self._count else dict(islice(self._places.items(), self._count))
        )
        made._places[name] = self._count
        made._count = self._count + 1
        return made


# ---------------------------------------------------------------- the ledger


_MOST_ROLLBACKS = 99
"""The number of earlier rollbacks that the state keeps."""
_YIELD_EVERY = 128
"""The number of lines folded before yielding to the event loop."""


class GateVerdict(NamedTuple):
    """The last evaluation: a candidate, the version that was live then, and "SHIP", "BLOCK" or "EXTEND"."""

    candidate: PolicyVersion
    against: PolicyVersion
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The folded ledger.

    Attributes:
        releases: the chain of live versions, oldest first. A release extends it, a rollback cuts it, and no version is in it twice.
        highest: the highest version number that was ever live.
        refused: hashes of blocked and rolled-back versions, which never ship automatically.
        trial: the current comparison on users, of a candidate with live or of live with the version it replaced.
        verdict: the last evaluation, until its candidate is blocked or waits for approval, or live moves.
        better: `verdict` proved its candidate better than the best so far.
        proven: the chain of versions that were best, oldest first. It begins with the starting model; a release that was proven better
            extends it, and a rolled-back version leaves it.
        judged: the number of verdicts.
        proposal: the candidate that waits for a person's approval. Every move of live ends it, and a newer one replaces it.
        rollbacks: the rollbacks since a person last shipped or approved a version, oldest first.
        verified: the chain of releases that users proved better, each than the one before it, oldest first.
        verified_at: when the comparison with the last of `verified` began.

    Example: ``State(releases=(v0, v3), events=5, refused=frozenset({"9f..."}))``
    """

    releases: tuple[PolicyVersion, ...] = ()
    highest: int = -1
    refused: Set[str] = field(default_factory=Hashes)
    trial: TrialRecord | None = None
    verdict: GateVerdict | None = None
    better: bool = False
    proven: tuple[PolicyVersion, ...] = ()
    judged: int = 0
    proposal: Proposal | None = None
    rollbacks: tuple[RolledBack, ...] = ()
    verified: tuple[PolicyVersion, ...] = ()
    verified_at: float = 0.0
    reason: str = ""
    shipped_at: float = 0.0
    events: int = 0

    @property
    def live(self) -> PolicyVersion | None:
        """The live version, or None before the first release."""
        return self.releases[-1] if self.releases else None

    @property
    def previous(self) -> PolicyVersion | None:
        """The version to roll back to, or None."""
        return self.releases[-2] if len(self.releases) > 1 else None

    @property
    def canary(self) -> PolicyVersion | None:
        """The candidate that a share of users is served, or None."""
        return None if self.trial is None or self.trial.shipped else self.trial.candidate

    @property
    def dealing(self) -> Dealing | None:
        """The assignment of users to the arms of the trial; None without a trial."""
        return None if self.trial is None else self.trial.dealing()

    def dealt(self, verified: float) -> Dealing | None:
        """Return the assignment to all arms if the share `verified` stays on the verified release; None if live is the only arm."""
        if not verified or not self.verified:
            return self.dealing
        salt = self.verified[-1].hash[:16]
        return replace(self.dealing or Dealing(salt=""), verified=verified, verified_salt=salt)

    @property
    def best(self) -> PolicyVersion | None:
        """The last release that was proven better than the best before it, or the starting model; None before the first release."""
        return self.proven[-1] if self.proven else None

    def settled(self, policy: PolicyVersion) -> bool:
        """Return true if this version needs no evaluation: it was released, blocked or rolled back, or waits for approval."""
        waits = self.proposal is not None and self.proposal.candidate == policy
        return waits or policy.hash in self.refused or any(policy.hash == release.hash for release in self.releases)

    def proven_better(self, policy: PolicyVersion) -> bool:
        """Return true if the gate proved this candidate, which is not live yet, better than the best so far."""
        if self.proposal is not None and self.proposal.candidate == policy:
            return self.proposal.better
        return self.better and self.verdict is not None and self.verdict.candidate == policy


def fold(state: State, event: ReleaseEvent) -> State:
    """Return the state after one more event. Events with unknown actions (of other packages or later versions) are only counted."""
    state = replace(state, events=state.events + 1)
    step = None if is_void(state, event) else _REDUCERS.get(event.action)
    return state if step is None else step(state, event)


def is_void(state: State, event: ReleaseEvent) -> bool:
    """Return true for a line that has no effect, because live was moved just before it was written.

    Such a line records a trial or a wait for approval against a version that is no longer live (the candidate is then evaluated against the
    new one), or the verification of a version that was rolled back.
    """
    if event.action == "verified":
        return event.policy != state.live and event.policy.hash in state.refused
    return event.action in ("canary", "awaits_approval") and event.previous not in (None, state.live)


def _evaluated(state: State, event: ReleaseEvent) -> State:
    if event.previous is None:
        return state
    report = event.detail.get("report", {})
    verdict, better = str(report.get("verdict", "")), bool(report.get("better", False))
    judged = state.judged + (verdict != "EXTEND")
    found = GateVerdict(event.policy, event.previous, verdict)
    return replace(state, verdict=found, reason=event.reason, better=better, judged=judged)


def _canary(state: State, event: ReleaseEvent) -> State:
    if event.previous is None or "share" not in event.detail:
        return replace(state, trial=None)
    trial = TrialRecord(
        candidate=event.policy,
        against=event.previous,
        salt=str(event.detail["salt"]),
        shares=((event.at, float(event.detail["share"])),),
        require="win" if event.detail.get("require") == "win" else "no_loss",
        plan=ShipPlan.read(event.detail.get("plan")),
    )
    return replace(state, trial=trial)


def _ramped(state: State, event: ReleaseEvent) -> State:
    if state.canary != event.policy or state.trial is None:
        return state
    return replace(state, trial=replace(state.trial.then(event.at, float(event.detail["share"])), told_at=event.at))


def _looked(state: State, event: ReleaseEvent) -> State:
    """Apply a line about the trial. With `over`, nobody takes part in the trial any more."""
    if state.trial is None or state.trial.candidate != event.policy:
        return state
    if event.detail.get("over"):
        return replace(state, trial=None)
    trial = replace(state.trial, told_at=event.at)
    if event.action == "better":
        trial = replace(trial, better_at=event.at)
    elif event.action in ("confirmed", "faded"):
        trial = replace(trial, retested=event.action == "confirmed")
    return replace(state, trial=trial)


def _awaits_approval(state: State, event: ReleaseEvent) -> State:
    """Let the candidate wait; the users of its trial go back to live until a person has decided."""
    if event.previous is None:
        return state
    tried = state.trial if state.canary == event.policy else None
    proposal = Proposal(
        candidate=event.policy,
        against=event.previous,
        reason=event.reason,
        at=event.at,
        salt=None if tried is None else tried.salt,
        better=state.proven_better(event.policy),
    )
    return replace(state, proposal=proposal, trial=state.trial if tried is None else None, verdict=None)


def _approved(state: State, event: ReleaseEvent) -> State:
    if state.proposal is None or state.proposal.candidate != event.policy:
        return state
    actor = str(event.detail.get("actor", ""))
    return replace(state, proposal=replace(state.proposal, actor=actor, why=event.reason), rollbacks=())


def _shipped(state: State, event: ReleaseEvent) -> State:
    # a branch that starts anew has no earlier version to roll back to or to compare with
    if event.detail.get("anew"):
        state = replace(state, releases=(), proven=(), verified=())
    # skip the search: a version with a higher number than all before it is not among them
    known = () if event.policy.number > state.highest else state.releases
    before = tuple(release for release in known if release != event.policy) if known else state.releases
    proven = state.proven_better(event.policy)
    return replace(
        state,
        releases=(*before, event.policy),
        highest=max(state.highest, event.policy.number),
        proven=(*state.proven, event.policy) if proven or not state.proven else state.proven,
        trial=_staying(state, event),
        shipped_at=event.at,
        refused=state.refused - {event.policy.hash} if event.policy.hash in state.refused else state.refused,
        verdict=None,
        proposal=None,
        rollbacks=() if event.detail.get("actor") else state.rollbacks,
        verified=state.verified or (event.policy,),
        verified_at=state.verified_at if state.verified else event.at,
    )


def _staying(state: State, event: ReleaseEvent) -> TrialRecord | None:
    """Return the comparison that goes on after a release if some users stay on the replaced version; after an approval it starts anew."""
    if "share" not in event.detail or event.previous is None:
        return None
    share = (event.at, float(event.detail["share"]))
    if state.trial is not None and state.canary == event.policy:
        return replace(state.trial.then(*share), shipped=True, told_at=event.at)
    if "salt" not in event.detail:
        return None
    salt = str(event.detail["salt"])
    return TrialRecord(candidate=event.policy, against=event.previous, salt=salt, shares=(share,), shipped=True)


def _blocked(state: State, event: ReleaseEvent) -> State:
    trial = None if state.canary == event.policy else state.trial
    proposal = None if state.proposal is None or state.proposal.candidate == event.policy else state.proposal
    verdict = None if state.verdict is None or state.verdict.candidate == event.policy else state.verdict
    refused = Hashes(state.refused) if not isinstance(state.refused, Hashes) else state.refused
    return replace(state, refused=refused.adding(event.policy.hash), trial=trial, verdict=verdict, proposal=proposal)


def taken_back(state: State, event: ReleaseEvent) -> Set[str]:
    """Return the hashes of the versions that a rollback withdraws: `previous` and those after `policy`; none for other events."""
    if event.action != "rolled_back":
        return frozenset()
    chain = state.releases
    cut = chain.index(event.policy) + 1 if event.policy in chain else len(chain)
    dropped = chain[cut:] if event.previous is None else (*chain[cut:], event.previous)
    return {release.hash for release in dropped} - {event.policy.hash}


def _rolled_back(state: State, event: ReleaseEvent) -> State:
    """Make `policy` live again; the versions after it in the chain are refused from now on."""
    chain, dropped = state.releases, taken_back(state, event)
    if event.policy in chain:
        earlier = chain[: chain.index(event.policy)]
    else:
        earlier = tuple(release for release in chain if release.hash not in dropped)
    refused = (state.refused | dropped) - {event.policy.hash}
    proven = tuple(release for release in state.proven if release.hash not in refused) or (event.policy,)
    rolled = RolledBack(at=event.at, by_itself=not event.detail.get("actor"))
    return replace(
        state,
        releases=(*earlier, event.policy),
        highest=max(state.highest, event.policy.number),
        refused=refused,
        proven=proven,
        trial=None,
        shipped_at=event.at,
        verdict=None,
        proposal=None,
        rollbacks=(*state.rollbacks[-_MOST_ROLLBACKS:], rolled),
        verified=tuple(release for release in state.verified if release.hash not in refused) or (event.policy,),
        verified_at=event.at,
    )


def _verified(state: State, event: ReleaseEvent) -> State:
    chain = (*(release for release in state.verified if release != event.policy), event.policy)
    return replace(state, verified=chain, verified_at=event.at)


_REDUCERS = {
    "evaluated": _evaluated,
    "canary": _canary,
    "ramped": _ramped,
    "looked": _looked,
    "better": _looked,
    "confirmed": _looked,
    "faded": _looked,
    "awaits_approval": _awaits_approval,
    "approved": _approved,
    "shipped": _shipped,
    "blocked": _blocked,
    "rolled_back": _rolled_back,
    "verified": _verified,
}


class ReleaseLedger:
    """The folded state, kept up to date with the log, to which other processes may append as well."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._reading = asyncio.Lock()
        self._cursor: Cursor = 0
        self.trial_began: Cursor = 0
        """Position in the log of the last trial's first line."""
        self.verified_from: Cursor = 0
        """Position in the log from which live is compared with the verified release."""
        self.moved: ReleaseEvent | None = None
        """The last line that changed the live version."""
        self.harmful: Harmful | None = None
        """The last harm: a rollback, or a trial that found a candidate worse. None once a newer version has shipped."""
        self.state = State()
        self.history = PaceHistory()
        self.evidence: dict[str, Any] = {}

    async def refresh(self) -> State:
        """Read the log's new lines. The lock admits one reader at a time, as two would fold a line twice."""
        async with self._reading:
            return await self._read_on()

    async def _read_on(self) -> State:
        newest = await self._log.append()  # events are rare: rows that hold none are not searched again
        async for cursor, row in self._log.read(self._cursor, {ReleaseEvent}):
            assert isinstance(row, ReleaseEvent)
            if self.state.events % _YIELD_EVERY == 0:
                await asyncio.sleep(0)  # before the fold: a line at which this is cancelled is read again
            self._cursor = cursor
            before, self.state = self.state, fold(self.state, row)
            if before.verified_at != self.state.verified_at or not before.verified:
                self.verified_from = cursor
            if not is_void(before, row):
                self.history.apply(row)
                if row.action == "canary" or "salt" in row.detail:
                    self.trial_began = cursor
            if row.action in ("shipped", "rolled_back"):
                self.moved = row
            self._note_harm(cursor, row)
            if "evidence" in row.detail:
                self.evidence = dict(row.detail["evidence"])
        self._cursor = max(self._cursor, newest)
        return self.state

    def _note_harm(self, cursor: Cursor, event: ReleaseEvent) -> None:
        if event.action == "rolled_back":
            self.harmful = Harmful(above=event.policy.number, known_at=cursor)
        elif event.action == "blocked" and event.detail.get("reading", {}).get("worse"):
            self.harmful = Harmful(above=event.policy.number - 1, known_at=cursor)
        elif event.action == "shipped" and self.harmful is not None and event.policy.number > self.harmful.above:
            self.harmful = None

    async def append(
        self,
        action: str,
        policy: PolicyVersion,
        previous: PolicyVersion | None,
        reason: str,
        detail: Mapping[str, Any] | None = None,
    ) -> ReleaseEvent:
        """Write one event durably and fold it in.

        Its id holds the number of events before it, so two processes that write the same conclusion write one event.
        """
        state = await self.refresh()
        event = ReleaseEvent(
            id=f"{state.events}:{action}:{policy.hash[:16]}",
            action=action,
            policy=policy,
            previous=previous,
            reason=reason,
            detail=dict(detail or {}),
            at=self._clock(),
        )
        await self._log.append(event)
        await self.refresh()
        return event
