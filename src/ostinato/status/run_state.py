"""A run's current state: worker board, log summary, reward accounts and refs, folded once for all viewers.

Also describes, in sentences, the release controller's state beyond its ledger: what waits for approval, and how many releases the traffic
can carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ostinato.core.arm_assignment import Dealing
from ostinato.core.durations import ago
from ostinato.core.errors import OstinatoError
from ostinato.core.records import Arm, PolicyVersion
from ostinato.core.seams import Clock, Cursor, Folds, Log
from ostinato.record.rowlog import RowLog
from ostinato.release.auto.estimating import StyleEffect
from ostinato.release.config import ReleaseConfig
from ostinato.release.ledger import Proposal, ReleaseLedger, State
from ostinato.release.pace import WEEKS, brake
from ostinato.reward.accounting import Accounting, of_ledger
from ostinato.reward.config import RewardConfig
from ostinato.reward.log_fold import LedgerFollower
from ostinato.run_directory import DEMO_MARKER, SERVED_REFS, Run
from ostinato.status.arms import ArmAcceptance, acceptance_by_arm, windows
from ostinato.status.compactions import CompactionsNow, compactions_now
from ostinato.status.config_warnings import config_warnings
from ostinato.status.dials import DialsNow, dials_now
from ostinato.status.gateway_address import read_address
from ostinato.status.index_queries import AlarmLine, IndexQueries, Threads
from ostinato.status.progress_lines import last_lines, newest_line
from ostinato.status.releases import LedgerEvent
from ostinato.status.run_report import Curve, Mark
from ostinato.status.summary import Summary, catch_up, summarise
from ostinato.status.worker_status import WorkerBoard, WorkerStatus, read_board

if TYPE_CHECKING:  # that module imports this one
    from ostinato.status.branches import BranchNow, BranchReader

_RESTART_SHOWN_S = 600.0  # how long after its end the page shows why a restarted worker had ended
REFS = (*SERVED_REFS, Arm.VERIFIED.value, Arm.LEARNER.value, "candidate")
_FRESH_S = 1.0
_AWAY_S = 60.0
"""After this long without a query, the stored folds may be further ahead in the log than those in memory."""
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """A run at one moment.

    `troubles`: sentences, the worst first. `refs`: versions that are served or evaluated. `shares`: shares of users on arms beside live.
    `pace`: turns per second over the last minute; `step`: the newest step. `batch`: how many turns a step takes, at least if it takes
    `every` turn that is ready. `last`: the newest release or rollback. `rated_since`: when the oldest turn behind `arms` was served.
    `releasing`: sentences on what waits for approval and on how many releases the traffic can carry. `warnings`: what the configuration
    leaves unguarded. `dials`: None if they are off; `compactions`: None before the first summary of a person's session. `branches`:
    tenants' trained branches. `styles`: effects of the styles that people were assigned.
    """

    at: float
    directory: str
    url: str | None
    simulated: bool
    troubles: tuple[str, ...]
    workers: tuple[WorkerStatus, ...]
    refs: Mapping[str, PolicyVersion]
    shares: Mapping[str, float]
    pace: float | None
    accounts: Accounting
    batch: int
    signals: int
    step: int
    last: LedgerEvent | None
    arms: tuple[ArmAcceptance, ...]
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]
    rated_since: float | None
    alarms: tuple[AlarmLine, ...]
    releasing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    every: bool = False
    dials: DialsNow | None = None
    compactions: CompactionsNow | None = None
    branches: tuple[BranchNow, ...] = ()
    styles: tuple[StyleEffect, ...] = ()


class RunFolds:
    """The folds of a run's log that describe its state: the summary, the accounts of its turns, the release ledger. Saves nothing."""

    def __init__(self, log: Log, stored: Folds, rewards: RewardConfig, ledger: ReleaseLedger) -> None:
        self._log, self._stored, self.ledger = log, stored, ledger
        self._turns = LedgerFollower(log, rewards, stored)
        self._begun = False
        self.summary = Summary()

    @property
    def accounts(self) -> Accounting:
        return of_ledger(self._turns.ledger)

    async def catch_up(self) -> int:
        """Read the log's new rows, starting after the stored folds; return how many the summary took."""
        if self._begun:
            rows = await catch_up(self.summary, self._log)
        else:
            self.summary, rows = await summarise(self._log, self._stored, await self._log.append())
            self._begun = True
        await self._turns.catch_up(saving=False)
        await self.ledger.refresh()
        return rows


class RunStateReader:
    """Answers `RunFacts.now` for all viewers together, reading at most once a second."""

    def __init__(
        self,
        run: Run,
        log: RowLog,
        questions: IndexQueries,
        clock: Clock,
        threads: Threads,
        branches: BranchReader | None = None,
    ) -> None:
        self._branches = branches
        self._run, self._log, self._questions, self._clock, self._threads = run, log, questions, clock, threads
        self._lock = asyncio.Lock()
        self._ledger = ReleaseLedger(log, clock)
        self._folds = self._new_folds()
        self._seen: RunNow | None = None
        self._asked_at = 0.0
        self._paces: list[tuple[float, int]] = []

    async def now(self) -> RunNow:
        """Return the run's state, at most a second old. Raises the log's errors."""
        async with self._lock:
            now = self._clock()
            if self._seen is None or not 0.0 <= now - self._seen.at < _FRESH_S:
                if not 0.0 <= now - self._asked_at <= _AWAY_S:
                    self._folds = self._new_folds()
                    self._paces.clear()
                self._asked_at = now
                self._seen = await self._look(now)
            return self._seen

    async def refs(self) -> dict[str, PolicyVersion]:
        """Return the versions that are served or evaluated, without those whose manifest cannot be read."""
        found: dict[str, PolicyVersion] = {}
        for ref in REFS:
            try:
                policy = await self._run.follower.resolve(ref)
            except OstinatoError:
                continue
            if policy is not None:
                found[ref] = policy
        return found

    async def awaits(self, policy: PolicyVersion) -> bool:
        """Return True if a version has passed and waits for approval."""
        proposal = (await self._ledger.refresh()).proposal
        return proposal is not None and proposal.candidate == policy

    def _shares(self) -> dict[str, float]:
        """Return the shares of all users on the arms beside live. Control is assigned first, then learner, verified, and the trial."""
        control, release = self._run.config.serve.control_share, self._run.config.release
        learner = (1.0 - control) * self._run.config.serve.learner_share
        dealing = self._ledger.state.dealt(release.verified_share) or Dealing(salt="")
        verified = (1.0 - control - learner) * dealing.verified
        left = 1.0 - control - learner - verified
        trial = {"canary": left * dealing.canary, "previous": left * dealing.previous}
        return {"control": control, "learner": learner, **trial, "verified": verified}

    # ------------------------------------------------------------ reading the state

    def _new_folds(self) -> RunFolds:
        return RunFolds(self._log, self._run.folds, self._run.config.reward, self._ledger)

    async def _look(self, now: float) -> RunNow:
        await self._folds.catch_up()
        seen, accounts = self._folds.summary, self._folds.accounts
        home, config = self._run.home, self._run.config
        board = await self._threads.ask(lambda: read_board(home.workers))
        paces = await self._threads.ask(lambda: last_lines(home.progress("release")))
        marks: Sequence[LedgerEvent] = await self._threads.ask_index(lambda: self._questions.shipped(100), [])
        drawn, live = windows(seen.rated, marks), self._ledger.state.live
        # on a thread, because it takes up to a tenth of a second with many people
        dials = await self._threads.ask(
            lambda: dials_now(
                config.adapt, seen, None if live is None else live.hash, last_lines(home.progress("serve"))
            )
        )
        return RunNow(
            at=now,
            directory=str(config.run.directory),
            url=read_address(home.address),
            simulated=(home.root / DEMO_MARKER).exists(),
            troubles=troubles(board, now),
            workers=workers(board, now),
            refs=await self.refs(),
            shares=self._shares(),
            pace=self._pace(now, accounts.ingested),
            accounts=accounts,
            batch=config.learn.least_turns,
            every=config.learn.batch == "auto",
            signals=seen.signals,
            step=seen.step,
            last=marks[0] if marks else None,
            arms=tuple(sorted(acceptance_by_arm(seen.rated), key=_place)),
            curves=drawn.curves,
            marks=drawn.marks,
            rated_since=drawn.start,
            alarms=alarms(seen),
            warnings=tuple(config_warnings(config).values()),
            releasing=tuple(releasing(self._ledger.state, config.release, paces, now)),
            dials=dials,
            styles=await self._threads.ask(lambda: tuple(seen.styles.effects())),
            compactions=compactions_now(seen.compactions),
            branches=() if self._branches is None else await self._branches.now(board),
        )

    def _pace(self, now: float, served: Cursor) -> float | None:
        """Return turns per second since the oldest reading within the last minute; None while that is less than 2 s old."""
        self._paces = [each for each in self._paces if now - each[0] <= _MINUTE_S]
        self._paces.append((now, served))
        began, before = self._paces[0]
        return (served - before) / (now - began) if now - began >= 2 * _FRESH_S else None


def troubles(board: WorkerBoard | None, now: float) -> tuple[str, ...]:
    """Return the workers' faults as sentences, the worst first."""
    if board is None or board.ended is not None:
        return ("`ostinato up` is not running: a worker that exits is not restarted.",)
    if not board.alive(now):
        return (f"`ostinato up` (pid {board.pid}) was killed or hangs: a worker that exits is not restarted.",)
    down = [
        f"The {worker.name} worker is down and is not restarted: {worker.reason or 'no reason was given'}."
        for worker in board.workers
        if worker.condition == "failed"
    ]
    ended = [
        f"The {worker.name} worker was started again, {worker.restarts} times so far: {worker.reason}."
        for worker in board.workers
        if worker.condition != "failed" and worker.restarts and now - (worker.reason_at or 0.0) < _RESTART_SHOWN_S
    ]
    troubled = [f"The {worker.name} worker waits: {worker.trouble}." for worker in board.workers if worker.trouble]
    return (*down, *ended, *troubled)


def workers(board: WorkerBoard | None, now: float) -> tuple[WorkerStatus, ...]:
    """Return the workers of a running supervisor; empty without one, because their state is then unknown."""
    return board.workers if board is not None and board.alive(now) else ()


def _place(row: ArmAcceptance) -> int:
    return ARMS.index(row.arm) if row.arm in ARMS else len(ARMS)


def alarms(seen: Summary) -> tuple[AlarmLine, ...]:
    """Return the alarms that are raised now, newest first."""
    found = [AlarmLine(name=name, reason=why, at=at, standing=True) for name, (why, at) in seen.alarms.items()]
    return tuple(sorted(found, key=lambda alarm: -alarm.at))


ARMS = ("live", "canary", "learner", "control", "eval")


# ---------------------------------------------------------------- what releases wait for


def releasing(state: State, rules: ReleaseConfig, lines: Sequence[Mapping[str, Any]], now: float) -> list[str]:
    """Return sentences about releases; a candidate that waits for approval comes first. `lines`: the release worker's progress lines."""
    sentences = [] if state.proposal is None else [_waits(state.proposal, now)]
    held = brake(state.rollbacks, cooldown_s=rules.cooldown_s, a_day=rules.rollbacks_a_day, now=now)
    if held is not None and held.until is not None:
        sentences.append(f"{held.reason}: {ago(held.until - now)} to go")
    return sentences + carries(newest_line(lines, "pace"), rules)


def carries(pace: Mapping[str, Any] | None, rules: ReleaseConfig) -> list[str]:
    """Describe how many releases a week the traffic can verify, and how many wrong decisions the last weeks are expected to contain.

    `pace`: a progress line with the fields of `release.pace.budget.Pace`.
    """
    if pace is None:
        return []
    sentences = [] if pace["cadence"] is None or not pace["traffic"]["turns"] else [_cadence(pace, rules)]
    spent = pace["spent"]
    if pace["tried"] and spent["trials"]:
        sentences.append(
            f"of {spent['trials']} trials in {WEEKS} weeks at most {spent['false_ships']:.2f} are expected to have shipped a loss of the "
            f"margin; of comparisons of harmless versions at most {spent['false_stops']:.2f} are expected to have ended as harmful "
            f"(release.trial.false_stops allows {spent['stops_allowed']:g} at release.trial.trials_a_week)"
        )
    elif not pace["tried"] and spent["verdicts"]:
        sentences.append(
            f"of {spent['verdicts']} verdicts of the gate in {WEEKS} weeks at most {spent['false_ships']:.2f} are expected to have passed "
            "a candidate that loses the margin against live"
        )
    if spent.get("false_rollbacks"):  # lines of earlier versions lack it
        sentences.append(
            f"of harmless releases at most {spent['false_rollbacks']:.2f} are expected to have been rolled back in {WEEKS} weeks "
            "by the guard or by the comparison with the best release"
        )
    return sentences


def releasing_json(state: State, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the same as JSON. `awaits_approval` is null if nothing waits; `approved_by` is set from the approval until the release."""
    proposal, pace = state.proposal, newest_line(lines, "pace")
    return {
        "awaits_approval": proposal
        and {
            "number": proposal.candidate.number,
            "hash": proposal.candidate.hash,
            "against": proposal.against.number,
            "reason": proposal.reason,
            "since": proposal.at,
            "approved_by": proposal.actor,
        },
        "pace": pace and {name: value for name, value in pace.items() if name != "kind"},
    }


def _waits(proposal: Proposal, now: float) -> str:
    sentence = f"v{proposal.candidate.number} has passed and waits for approval since {ago(now - proposal.at)}"
    if proposal.actor is not None:
        return f"{sentence}; {proposal.actor} approved it, and the release worker is about to ship it"
    return f"{sentence} (`ostinato approve` ships it, `ostinato refuse` blocks it): {proposal.reason}"


def _cadence(pace: Mapping[str, Any], rules: ReleaseConfig) -> str:
    found, traffic = pace["cadence"], pace["traffic"]
    use, margin = f"{traffic['people']:,} people with {traffic['turns']:,} rated turns a day", 100 * found["margin"]
    off = "" if pace["tried"] else "; trials are off (release.canary), so the suite alone decides"
    if found["trial_s"] is None:
        return (
            f"{use} are too few for trials: in {ago(rules.trial.limit_s)} they rule out no loss below {100 * found['sees']:.1f} pp, and "
            f"release.trial.margin is {margin:.1f}{off}"
        )
    if found["measured"]:
        why = f"the last {found['measured']} trials that passed took {ago(found['trial_s'])} each (median)"
    else:
        why = f"a trial takes about {ago(found['trial_s'])} to rule out a loss of {margin:.1f} pp"
    return f"{use} carry about {found['a_week']:.1f} verified releases a week: {why}; candidates beyond that are skipped{off}"
