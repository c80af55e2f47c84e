"""A release's stages with users: first a canary beside live, then live beside some users who stay on the version it replaced.

`trial.trial` handles the slots and the evidence. This module turns its decisions into lines of the ledger and moves of refs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from secrets import token_hex
from typing import Any

from ostinato.core.arm_assignment import dealing_key, place_of
from ostinato.core.errors import Unavailable
from ostinato.core.records import Arm, Person, PolicyVersion, ReleaseEvent, Turn
from ostinato.core.seams import Clock, Cursor, Log
from ostinato.release.approvals import Approvals
from ostinato.release.config import ReleaseConfig
from ostinato.release.ledger import ReleaseLedger, State, TrialRecord
from ostinato.release.metrics.config import DEFAULT_METRICS, MetricConfig, OutcomeConfig
from ostinato.release.metrics.metric import ExpectedMetrics, Metric, Past, metrics_of, wanted
from ostinato.release.metrics.reactions import Reactions
from ostinato.release.metrics.retention import DAY, REMEMBERED_DAYS, Retention
from ostinato.release.moves import Moves
from ostinato.release.pace import Traffic, ship_plan
from ostinato.release.trial.config import HOUR, TrialConfig
from ostinato.release.trial.contrast import POOLED, SlotTally
from ostinato.release.trial.trial import Trial, first_share
from ostinato.release.trial.verdict import Decision, NextAction

# ---------------------------------------------------------------- a running trial


logger = logging.getLogger(__name__)

_REMEMBERED_S = REMEMBERED_DAYS * DAY


class RunningTrial:
    """Tallies the slots of the ledger's trial. After a restart it reads the log from the trial's start and gets the same numbers.

    A turn is read `maturity_s` after its slot ends, and later signals are ignored, so the result does not depend on the time of a look.
    Only people who were assigned to an arm at random count. Each metric is compared tenant by tenant; tenants that had fewer than
    `tenant_people` people in the week before the trial are pooled into one.
    """

    def __init__(
        self,
        log: Log,
        outcomes: OutcomeConfig,
        config: TrialConfig,
        metrics: Sequence[MetricConfig] = DEFAULT_METRICS,
    ) -> None:
        self._log = log
        self._outcomes = outcomes
        self._config = config
        self._metrics = metrics_of(metrics, config.margin)
        self._wanted = wanted(self._metrics)
        self._reactions: Reactions | None = None
        self._past = Past(self._metrics)
        self._record: TrialRecord | None = None
        self._trial: Trial | None = None
        self._added_until = self._forgot = -math.inf
        self._people: dict[Person, int] = {}
        self._expected = ExpectedMetrics(people={}, usual_M=())
        self._tenants: frozenset[str] = frozenset()
        self._serving = self._decision_due = False
        self._retention, self._day = Retention(0.0), 0
        self._thresholds: dict[str, float | None] = {}
        self.missed = 0
        """The number of trial turns that were dropped without being judged, because too many came at once."""

    async def first_share(self, now: float) -> float:
        """Return the share with which the next trial should begin, given the number of users of the last day."""
        self._record = None
        await self._read()
        return first_share(self._config, self._active(now))

    async def look(self, record: TrialRecord, after: Cursor, now: float) -> Decision | None:
        """Return the decision after the slots that are over; None if none has ended since the last decision that was `acted` on.

        `after`: position in the log of the trial's first line. Raises Unavailable while the trial's start lies in the future, because the
        clock was ahead when it began.
        """
        if record.began > now + self._config.slot_s:
            ahead = (record.began - now) / HOUR
            raise Unavailable(
                f"the trial of {record.candidate} began {ahead:.1f} hours from now: the clock was ahead; nothing is judged until then; "
                "end it with `ostinato ship` or `ostinato rollback`"
            )
        if self._added_until > now + self._config.slot_s:
            logger.warning("the clock was ahead: the trial of %s is read again from its start", record.candidate)
            self._record, self._reactions, self._past = None, None, Past(self._metrics)
        if self._record is None or (self._record.salt, self._record.began) != (record.salt, record.began):
            await self._begin(record, after, now)
        self._record = record
        assert self._trial is not None
        self._trial.better_s, self._trial.retested = record.better_s, record.retested
        while (end := self._next_end(record)) + self._outcomes.maturity_s <= now:
            # read no further than the slot needs, so that catching up on a whole trial needs no more memory than following it
            await self._read(end + self._outcomes.maturity_s, self._added_until, now)
            self._add(record, end)
            self._added_until, self._decision_due = end, True
        if not self._decision_due:
            return None
        self._trial.share, self._trial.shipped = record.shares[-1][1], record.shipped
        self._trial.require = record.require
        return self._trial.look(self._added_until - record.began)

    def acted(self) -> None:
        """Note that the last decision was carried out. Until then `look` repeats it, so that a failure does not delay it by a slot."""
        self._decision_due = False

    async def _begin(self, record: TrialRecord, after: Cursor, now: float) -> None:
        """Begin a trial. Users' expected outcomes are estimated from the turns before it."""
        since = 0
        async for _ in self._log.read(after, {Turn}):
            since += 1
        # always from the log, even right after another trial, so that a restarted worker knows the same past
        self._past = Past(self._metrics, record.began)
        self._reactions = self._from(await self._log.before_last(self._outcomes.past + since, Turn))
        await self._read(record.began, record.began, now)
        for each in self._reactions.take(record.began):
            self._past.remember(each.person, each.ended_at, each.known(record.began), each.tasks)
        self._past.forget(record.began - _REMEMBERED_S)
        self._expected = self._past.expected()
        self._tenants = frozenset(self._past.tenants(self._config.tenant_people))
        self._thresholds = {}
        self._people, self._added_until, self._serving, self._decision_due = {}, record.began, False, False
        self._retention, self._day = Retention(record.began), 0
        self._trial = Trial(self._config, active=self._active(record.began), metrics=self._metrics, plan=record.plan)

    async def _read(self, until: float = math.inf, past: float = math.inf, now: float = math.inf) -> None:
        """Read the log up to `until`. Turns dropped because too many wait are missed if they ended after `past`, else added to the past."""
        if self._reactions is None:
            self._reactions = self._from(await self._log.before_last(self._outcomes.window, Turn))
        for each in await self._reactions.refresh(until, now):
            if each.ended_at > past:
                self._count_missed()
                continue
            known = each.known(each.ended_at + self._outcomes.maturity_s)
            self._past.remember(each.person, each.ended_at, known, each.tasks)
            # without this, the number of people would grow without bound in weeks without a trial
            if each.ended_at - self._forgot >= DAY:
                self._past.forget(each.ended_at - _REMEMBERED_S)
                self._forgot = each.ended_at

    def _count_missed(self) -> None:
        """Count a turn of the trial that was dropped because too many came at once. Warns at powers of ten."""
        self.missed += 1
        if math.log10(self.missed).is_integer():
            logger.warning(
                "%d turns of the trial came too close together to be judged; raise release.outcomes.window", self.missed
            )

    def _from(self, after: Cursor) -> Reactions:
        return Reactions(self._log, self._outcomes, self._wanted, after)

    def _active(self, now: float) -> float:
        assert self._reactions is not None
        return float(len(self._past.active(now - DAY) | self._reactions.people()))

    def _next_end(self, record: TrialRecord) -> float:
        """Return the end of the next slot: on the grid, at a change of the share (constant within a slot), or at the end of a trial day."""
        slot_s, over = self._config.slot_s, (self._added_until - record.began) / self._config.slot_s
        grid = record.began + slot_s * (math.floor(over) + 1)
        if grid <= self._added_until:  # the quotient was rounded down to just below a whole number
            grid = record.began + slot_s * (math.floor(over) + 2)
        return min([grid, self._retention.end(self._day), *(at for at, _ in record.shares if at > self._added_until)])

    def _add(self, record: TrialRecord, end: float) -> None:
        assert self._trial is not None
        assert self._reactions is not None
        self._fix_thresholds()
        shipped = record.shipped and end > record.shares[-1][0]
        # the same two versions throughout: canary and live before the candidate ships, live and previous afterwards
        arms = (Arm.LIVE, Arm.PREVIOUS) if shipped else (Arm.CANARY, Arm.LIVE)
        sides = {(arms[0], record.candidate.hash): True, (arms[1], record.against.hash): False}
        # a turn that ended before its first token names no version
        sides |= {(arms[0], ""): True, (arms[1], ""): False}
        came, tallies = SlotTally(), [SlotTally() for _ in self._metrics]
        thresholds = [self._thresholds[metric.name] for metric in self._metrics]
        adding = list(zip(self._metrics, tallies, thresholds, strict=True))
        sampling = None in (self._thresholds[metric.name] for metric in self._metrics if metric.quantile is not None)
        for each in self._reactions.take(end):
            known = each.known(end + self._outcomes.maturity_s)
            # expected values are fixed at the trial's start; outcomes are sampled only for a threshold that is not set yet
            self._past.see(each.person, each.ended_at)
            if sampling:
                self._past.sample(known)
            side = sides.get((each.arm, each.policy))
            if side is None or not each.dealt:
                continue
            if not self._serving and not (side and each.policy):
                continue  # until the candidate's weights are loaded, everybody gets live and nobody is assigned
            self._serving = True
            person = self._people.setdefault(each.person, len(self._people))
            came.add(POOLED, person, side, (0.0, 1.0), 0.0)
            self._retention.see(each.person, each.ended_at)
            stratum = self._stratum(each.person)
            expected_M = self._expected.of(each.person, each.tasks)
            for (metric, tally, threshold), expected in zip(adding, expected_M, strict=True):
                measured = metric.measure(known, threshold)
                if measured is not None:
                    tally.add(stratum, person, side, measured, expected)
        # metrics of users' days use the share at the start of the day
        share, morning = record.share(end), record.share(self._retention.end(self._day - 1))
        if end == self._retention.end(self._day):
            self._close_day(record, adding)
        day = int(end // DAY)
        self._trial.share, self._trial.shipped = share, shipped
        outcomes = {
            metric.name: tally.slots(day, morning if metric.daily else share)
            for metric, tally in zip(self._metrics, tallies, strict=True)
        }
        self._trial.add(came.slot(day), outcomes, end - record.began)

    def _stratum(self, person: Person) -> str:
        return person[0] if person[0] in self._tenants else POOLED

    def _close_day(self, record: TrialRecord, adding: Sequence[tuple[Metric, SlotTally, float | None]]) -> None:
        """Add the rows of a finished day to the metrics of users' days.

        Each user counts for the arm to which the salt and the share assigned them at the start of the day: those who stay away have no turn
        that shows their arm, and those who come after a share grew are more often people who come often.
        """
        assert self._trial is not None
        share, key = record.share(self._retention.end(self._day - 1)), dealing_key(record.salt)
        daily = [(m, metric, tally) for m, (metric, tally, _) in enumerate(adding) if metric.daily]
        back = SlotTally()
        for who, known in self._retention.rows(self._day):
            person, treated, expected_M = self._people[who], place_of(key, *who) < share, self._expected.of(who)
            back.add(POOLED, person, treated, (known["user.returned"], 1.0), 0.0)
            for m, metric, tally in daily:
                measured = metric.measure(known)
                if measured is not None:
                    tally.add(self._stratum(who), person, treated, measured, expected_M[m])
        self._trial.come_back(back.slot(self._day), share)
        self._day += 1
        self._retention.forget(self._day)

    def _fix_thresholds(self) -> None:
        """Set each threshold before the first slot, or before a later one if too little was known. Once set, it stays."""
        assert self._trial is not None
        for metric in self._metrics:
            if self._thresholds.get(metric.name) is None:
                self._thresholds[metric.name] = self._past.threshold(metric)
        self._trial.thresholds = self._thresholds


# ---------------------------------------------------------------- trials


class Trials:
    """Begins trials, follows them, and keeps the refs of their arms where they belong. Without `config.canary` it begins none.

    All authoritative state is in the ledger: each method is given the state, and the process may be killed at any point. While `paused`
    returns true, no share grows and nothing ships.
    """

    def __init__(
        self,
        log: Log,
        ledger: ReleaseLedger,
        moves: Moves,
        approvals: Approvals,
        config: ReleaseConfig,
        clock: Clock,
        paused: Callable[[], bool],
    ) -> None:
        self._ledger = ledger
        self._moves = moves
        self._approvals = approvals
        self._config = config
        self._clock = clock
        self._paused = paused
        self._running = RunningTrial(log, config.outcomes, config.trial, config.metrics) if config.canary else None

    @property
    def on(self) -> bool:
        """True if candidates are tried before they go live."""
        return self._running is not None

    async def begin(
        self, candidate: PolicyVersion, live: PolicyVersion, reason: str, traffic: Traffic | None
    ) -> ReleaseEvent:
        """Start a candidate's trial with its first users, and fix the plan of its looks. Call this only if `on`."""
        assert self._running is not None
        # The salt must be secret: with it, somebody could choose user names that all fall into one arm, and void the trial.
        # Write the line before the ref: a restart in between moves the ref then, whereas a ref without a line would go back to live.
        share = await self._running.first_share(self._clock())
        trial: dict[str, Any] = {"share": share, "salt": token_hex(16), "require": self._config.require}
        goals = [each for each in metrics_of(self._config.metrics, self._config.trial.margin) if each.role == "goal"]
        plan = ship_plan(traffic, {goal.name: goal.allowed for goal in goals}, self._config.trial)
        if plan is not None:
            trial["plan"] = asdict(plan)
        event = await self._ledger.append("canary", candidate, live, reason, trial)
        await self._moves.point("canary", candidate)
        return event

    async def go_on(self, trial: TrialRecord, live: PolicyVersion, state: State) -> ReleaseEvent | None:
        """Act on the finished slots of a trial: serve more users, ship, or block."""
        candidate = trial.candidate
        if self._running is None:
            why = "its trial was switched off (release.canary) before there was enough evidence"
            return await self._ledger.append("blocked", candidate, live, why)
        await self._moves.point("canary", candidate)
        decision = await self._running.look(trial, self._ledger.trial_began, self._clock())
        if decision is not None and decision.next in (NextAction.SHIP, NextAction.RAMP) and self._paused():
            return None  # `look` repeats the decision until the pause is over
        event = None if decision is None else await self._advance(trial, live, state, decision)
        self._running.acted()
        return event

    async def _advance(
        self, trial: TrialRecord, live: PolicyVersion, state: State, decision: Decision
    ) -> ReleaseEvent | None:
        candidate = trial.candidate
        if decision.next is NextAction.WAIT:
            return await self._tell(trial, decision)
        reading = {"reading": asdict(decision.reading)}
        if decision.next is NextAction.SHIP:
            why = f"{state.reason}; canary {decision.reason}"
            return await self._approvals.passed(candidate, live, why, reading)
        if decision.next is NextAction.BLOCK:
            event = await self._ledger.append("blocked", candidate, live, f"canary: {decision.reason}", reading)
            await self._moves.point("canary", live)
            return event
        detail = {"share": decision.share} | reading
        return await self._ledger.append("ramped", candidate, live, decision.reason, detail)

    async def prove(self, trial: TrialRecord, live: PolicyVersion) -> ReleaseEvent | None:
        """Compare live with the version it replaced: roll back if it is worse; record that it is better, and whether that lasts."""
        if self._running is None:
            why = f"its comparison with {trial.against} was switched off (release.canary): its users are on live again"
            return await self._ledger.append("looked", trial.candidate, trial.against, why, {"over": True})
        decision = await self._running.look(trial, self._ledger.trial_began, self._clock())
        event = None if decision is None else await self._judge(trial, live, decision)
        self._running.acted()
        return event

    async def _judge(self, trial: TrialRecord, live: PolicyVersion, decision: Decision) -> ReleaseEvent | None:
        detail = {"reading": asdict(decision.reading)}
        if decision.next is NextAction.ROLL_BACK:
            why = f"beside {trial.against}: {decision.reason}"
            return await self._moves.take_back(trial.against, live, why, detail)
        if decision.next in (NextAction.BETTER, NextAction.CONFIRMED, NextAction.FADED):
            action = decision.next.value
            return await self._ledger.append(action, trial.candidate, trial.against, decision.reason, detail)
        return await self._tell(trial, decision)

    async def _tell(self, trial: TrialRecord, decision: Decision) -> ReleaseEvent | None:
        """Record an undecided trial's figures from time to time, so that readers of the ledger do not see figures that are days old."""
        if not trial.owes_a_line(self._clock(), self._config.trial.slot_s):
            return None
        detail = {"reading": asdict(decision.reading)}
        return await self._ledger.append("looked", trial.candidate, trial.against, decision.reason, detail)

    async def park(self, live: PolicyVersion, state: State) -> None:
        """Outside a trial, keep its arms on live, whose weights are loaded anyway."""
        if self._running is None:
            return
        if state.canary is None:
            await self._moves.point("canary", live)
        if state.trial is None or not state.trial.shipped:
            await self._moves.point("previous", live)
