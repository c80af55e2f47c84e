"""The controller: ships, blocks and rolls back candidates by moving refs and writing the ledger.

It keeps no authoritative state of its own. Each step reads the ledger and the refs, then does the one thing that is due. The process may
be killed anywhere: the next start reads the same ledger and refs and continues. A ref moved without its ledger line is reconciled first.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from ostinato.core.errors import BadRequest, Conflict, NotFound, OstinatoError, StorageFull, Unavailable
from ostinato.core.records import Arm, Person, PolicyVersion, ReleaseEvent, Turn
from ostinato.core.report import Incumbents, Report, Verdict
from ostinato.core.seams import Clock, Cursor, Log
from ostinato.release.alarms import note
from ostinato.release.approvals import Approvals, approval_line
from ostinato.release.canary import Trials
from ostinato.release.config import ReleaseConfig
from ostinato.release.learner_arm import LearnerArm, StepJudge
from ostinato.release.ledger import Ancestry, ReleaseLedger, State
from ostinato.release.metrics.metric import metrics_of, wanted
from ostinato.release.metrics.reactions import Reacted, Reactions
from ostinato.release.moves import GateJudge, Moves, Refs, Versions
from ostinato.release.pace import DAY, Brake, Pace, brake, cadence, spent
from ostinato.release.trial.contrast import POOLED, SlotTally, TimeSlot
from ostinato.release.trial.incumbent_test import BestComparison, IncumbentTest
from ostinato.release.watch import Outcomes, ReleaseWatch

# ---------------------------------------------------------------- cooldown


FREEZE_ALARM = "release:rollbacks"
"""Name of the alarm that is raised while too many rollbacks keep candidates from shipping automatically."""


class Cooldown:
    """The pause of automatic releases after a rollback, and the alarm about too many rollbacks.

    All of its state is in the ledger, except the last state of the alarm that it wrote.
    """

    def __init__(self, log: Log, config: ReleaseConfig, clock: Clock) -> None:
        self._log = log
        self._config = config
        self._clock = clock
        self._noted: bool | None = None

    def look(self, state: State) -> Brake | None:
        """Return the brake that keeps candidates from shipping automatically; None if there is none."""
        pause, a_day = self._config.cooldown_s, self._config.rollbacks_a_day
        return brake(state.rollbacks, cooldown_s=pause, a_day=a_day, now=self._clock())

    def asks(self, state: State) -> bool:
        """Return true if a candidate that passes the gate must wait for a person's approval. It is still judged then, despite a brake.

        Where candidates are tried on users first, a frozen controller starts no trial: a person ends the freeze by shipping a version.
        """
        return not self._config.canary and (self._freeze(state) is not None or self._config.approval == "manual")

    def holds(self, state: State) -> bool:
        """Return true if no candidate may advance automatically."""
        return self.look(state) is not None and not self.asks(state)

    async def note(self, state: State) -> None:
        """Raise or clear the alarm. After a restart, the first call compares it with the log."""
        freeze = self._freeze(state)
        frozen = freeze is not None
        if frozen != self._noted:
            why = "a person shipped or approved a version since" if freeze is None else freeze.reason
            await note(self._log, FREEZE_ALARM, raised=frozen, why=why, at=self._clock())
            self._noted = frozen

    def _freeze(self, state: State) -> Brake | None:
        """Return the brake if only a person can end it, else None."""
        found = self.look(state)
        return None if found is None or found.until is not None else found


# ---------------------------------------------------------------- the verified release


class VerifiedArm:
    """The arm that stays on the release that users have shown to be the best. Without `config.best_arm` its methods do nothing."""

    def __init__(self, log: Log, ledger: ReleaseLedger, moves: Moves, config: ReleaseConfig, clock: Clock) -> None:
        self._ledger = ledger
        self._moves = moves
        self._clock = clock
        self._standing = RunningIncumbentTest(log, config) if config.best_arm else None

    async def park(self, state: State) -> None:
        """Keep the arm's ref on the verified release of the ledger."""
        if self._standing is not None and state.verified:
            await self._moves.point(Arm.VERIFIED.value, state.verified[-1])

    async def look(self, state: State) -> ReleaseEvent | None:
        """Roll back to the verified release if live is worse; record live as the verified release once live is better."""
        if self._standing is None or not state.verified or state.live is None:
            return None
        verified, live = state.verified[-1], state.live
        comparison = await self._standing.look(state, self._ledger.verified_from, self._clock())
        if comparison is None or live == verified:
            return None
        beside = f"beside {verified}, the best that users proved:"
        if comparison.worse:
            why = f"worse {beside} {100 * comparison.effect.difference:+.1f} pp"
            return await self._moves.take_back(verified, live, why, {"effect": asdict(comparison.effect)})
        if comparison.better:
            why = f"better {beside} {100 * comparison.gain.difference:+.1f} pp"
            return await self._ledger.append("verified", live, verified, why, {"effect": asdict(comparison.gain)})
        return None


logger = logging.getLogger(__name__)

_LINE_WAIT_S = 0.5
_NO_RELEASE = "nothing was released in this run yet: start `ostinato up`, and wait until it serves"

BEST_REF = "best"
"""The ref that protects the best release so far from garbage collection in the store."""


class ReleaseController:
    """Judges candidates, moves refs and keeps the ledger. Implements the `Releases` seam.

    With `config.canary`, a candidate is first tried on a growing share of users.

    Args:
        evals: the gate; None, with `guarded` false, for a controller that only moves releases by hand (the command line).
        guarded: compare live with control, and roll back on harm.
        evaluation_ref: the ref whose slot serves the version under evaluation. Any name other than 'candidate' pins that version while
            newer ones arrive.
        best_ref: the ref whose slot serves the best release while a candidate is compared with it, if that is neither live nor the
            anchor. Without it, such a best release is left out of the comparison.
        paused: while it returns true, nothing ships and no canary share grows.
        control_moves: as for `ReleaseWatch`.
        steps: tests the training steps that the users of the learner arm follow.
        newest_ref, step_ref, idle_refs: the refs `newest`, `test` and `idle` of `LearnerArm`.
    """

    def __init__(
        self,
        log: Log,
        store: Refs,
        versions: Versions,
        evals: GateJudge | None,
        config: ReleaseConfig,
        clock: Clock,
        *,
        guarded: bool = False,
        evaluation_ref: str = "candidate",
        best_ref: str | None = None,
        paused: Callable[[], bool] = lambda: False,
        control_moves: bool = False,
        steps: StepJudge | None = None,
        newest_ref: str = "newest",
        step_ref: str = "learner-test",
        idle_refs: Sequence[str] = (),
    ) -> None:
        self.ledger = ReleaseLedger(log, clock)
        self._cooldown = Cooldown(log, config, clock)
        self._ancestry = Ancestry(log)
        self._troubles: dict[str, str] = {}
        self._store = store
        self._evals = evals
        self._config = config
        self._evaluation_ref = evaluation_ref
        self._best_ref = best_ref
        self._anchor: PolicyVersion | None = None
        self._parked = False
        self._clock = clock
        self._paused = paused
        self._watch = (
            ReleaseWatch(
                Outcomes(log, config.outcomes, config.metrics),
                config.guard,
                config.trial.slot_s,
                most_turns_a_day=config.trial.most_turns_a_day,
                control_moves=control_moves,
            )
            if guarded
            else None
        )
        self._moves = Moves(self.ledger, store, versions, holdback=config.trial.holdback)
        self._approvals = Approvals(self.ledger, self._moves, manual=config.approval == "manual")
        self._trials = Trials(log, self.ledger, self._moves, self._approvals, config, clock, paused)
        self._verified = VerifiedArm(log, self.ledger, self._moves, config, clock)
        self._learner = LearnerArm(log, self._moves, steps, clock, newest=newest_ref, test=step_ref, idle=idle_refs)
        self._lock = asyncio.Lock()
        self._restored = False

    @property
    def trouble(self) -> str | None:
        """Why the last attempts of `run` failed (step, watch or follow); None if none did."""
        return "; ".join(dict.fromkeys(self._troubles.values())) or None

    @property
    def live(self) -> PolicyVersion:
        """The live version, as of the last refresh of the ledger. Raises Unavailable before `bootstrap`."""
        if self.ledger.state.live is None:
            raise Unavailable(_NO_RELEASE)
        return self.ledger.state.live

    def incumbents(self, candidate: PolicyVersion) -> Incumbents:
        """Return the versions to compare this candidate with, as of the last refresh. Raises Unavailable before `bootstrap`."""
        live, anchor, best = self.live, self._anchor, self.ledger.state.best
        if anchor is None:
            raise Unavailable(_NO_RELEASE)
        sampled = best if best in (live, anchor) or self._best_ref is not None else None
        since_s = self.ledger.history.since_another(candidate, self._clock())
        return Incumbents(live=live, best=sampled, anchor=anchor, round=self.ledger.state.judged, since_s=since_s)

    async def bootstrap(self, base: PolicyVersion) -> None:
        """Put the starting model live and freeze it as control. Refs that already exist stay where they are."""
        manifest = await self._moves.manifest_of(base)
        async with self._lock:
            for ref in ("live", "control"):
                # read first: a store that releases elsewhere may be read-only
                if await self._store.read_ref(ref) is None:
                    with suppress(Conflict):  # another process was quicker: the same outcome
                        await self._store.move_ref(ref, None, manifest)
            await self._reconcile()

    async def rollback(
        self, to: PolicyVersion | None, reason: str, *, actor: str, expected: PolicyVersion | None = None
    ) -> ReleaseEvent:
        """Put an earlier version live on behalf of a person. The replaced version never ships automatically again.

        `to`: the version; None for the previous release. `expected`: the version that the caller believes to be live.

        Raises:
            NotFound: there is no earlier release, or `to` was never published.
            BadRequest: `to` is live already.
            Conflict: `expected` is not live, or another process moved live at the same time; read the state again, then decide.
        """
        async with self._lock:
            state = await self._reconcile()
            self._expect(expected)
            target = state.previous if to is None else to
            if target is None:
                raise NotFound("there is no earlier release to roll back to; name a version", field="to")
            if target == self.live:
                raise BadRequest(f"{target} is live already; name another version", field="to")
            event = await self._moves.take_back(target, self.live, reason, {"actor": actor})
            try:
                await self._learner.leave(self.ledger.state, self.ledger.harmful)
            except (Conflict, StorageFull, Unavailable) as error:
                # live has gone back; the release worker will move this ref, too
                logger.warning("the release worker puts users who follow training on live at its next look: %s", error)
            return event

    async def ship(
        self,
        policy: PolicyVersion,
        reason: str,
        *,
        actor: str,
        expected: PolicyVersion | None = None,
        anew: bool = False,
    ) -> ReleaseEvent:
        """Put a published version live without judging it: a person answers for it. A trial on the canary arm ends without a result.

        With `anew`, a branch starts again at this version, whether or not it is live; its earlier releases no longer count.

        Raises:
            NotFound: it was never published.
            BadRequest: it is live already.
            Conflict: as `rollback`.
        """
        async with self._lock:
            await self._reconcile()
            self._expect(expected)
            detail = {"actor": actor, **({"anew": True} if anew else {})}
            if policy == self.live and anew:
                return await self.ledger.append("shipped", policy, policy, reason, detail)
            if policy == self.live:
                raise BadRequest(f"{policy} is live already; name another version", field="to")
            return await self._moves.ship(policy, self.live, reason, detail)

    async def approve(self, policy: PolicyVersion | None, reason: str, *, actor: str) -> ReleaseEvent:
        """Ship the candidate that waits for a person's approval. If `policy` is given, the candidate must be that version.

        Raises:
            NotFound: nothing waits, another version waits, or the waiting version is no longer in the store.
            Conflict: live was moved, or a newer candidate passed, at the same time; read the state again, then decide.
        """
        async with self._lock:
            await self._reconcile()
            return await self._approvals.approve(policy, reason, actor)

    async def refuse(self, policy: PolicyVersion | None, reason: str, *, actor: str) -> ReleaseEvent:
        """Block the candidate that waits for a person's approval. Raises NotFound as `approve` does."""
        async with self._lock:
            await self._reconcile()
            return await self._approvals.refuse(policy, reason, actor)

    async def decide(self, candidate: PolicyVersion, report: Report) -> ReleaseEvent:
        """Record a report and act on it: SHIP ships the candidate or starts its canary, BLOCK blocks it, EXTEND does nothing more."""
        async with self._lock:
            state = await self._reconcile()
            if report.live != state.live:
                raise Conflict(
                    f"{candidate} was compared with {report.live}, but {state.live} is live now; evaluate again"
                )
            detail: dict[str, Any] = {"report": asdict(report) | {"verdict": str(report.verdict)}}
            if self._evals is not None and report.verdict is Verdict.EXTEND:
                detail["evidence"] = dict(self._evals.evidence())
            event = await self.ledger.append("evaluated", candidate, report.live, report.reason, detail)
            return event if report.verdict is Verdict.EXTEND else (await self._settle(self.ledger.state) or event)

    async def step(self) -> ReleaseEvent | None:
        """Do the one thing that is due; return None if nothing is.

        Once the evaluation of a candidate has begun, it is finished before a newer one is evaluated, so that a busy trainer cannot starve
        releases. Candidates that were superseded meanwhile are skipped.
        """
        async with self._lock:
            state = await self._reconcile()
            await self._cooldown.note(state)
            if state.proposal is not None and state.proposal.actor is not None:
                return await self._approvals.ship_approved(state.proposal)
            if state.trial is not None and not state.trial.shipped:
                return await self._trials.go_on(state.trial, self.live, state)
            last = state.verdict
            if last is not None and last.against == state.live and last.verdict in ("SHIP", "BLOCK"):
                return await self._settle(state)
        if self._cooldown.holds(state):
            await self._park()  # candidates are skipped meanwhile; the newest is evaluated once the brake ends
            return None
        candidate = await self._due(state)
        if candidate is not None and await self._ancestry.carried_on(candidate, self.ledger.harmful):
            why = "it may descend from a version that was taken back: training has not gone back yet"
            return await self.ledger.append("blocked", candidate, self.live, why)
        if candidate is None or self._evals is None:
            await self._park()
            return None
        return await self._evaluate(candidate, self._evals)

    async def watch(self) -> ReleaseEvent | None:
        """Compare live with the version it replaced and with control over the same hours; roll back automatically on significant harm."""
        async with self._lock:
            state = await self._reconcile()
            if event := await self._verified.look(state):
                return event
            if state.trial is not None and state.trial.shipped:
                return await self._trials.prove(state.trial, self.live)
            if self._watch is None or state.previous is None or self._anchor is None:
                return None
            harm = await self._watch.live(state, self._anchor, self._clock())
            if harm is None:
                return None
            return await self._moves.take_back(state.previous, self.live, f"guard: {harm}", {"guard": asdict(harm)})

    async def follow(self) -> None:
        """Move the learner arm to the newest training step once that has passed its test, or back to live."""
        step = await self._place_learner()
        if step is not None:
            await self._test_step(step)
            await self._place_learner()
        await self._learner.tell()

    async def _test_step(self, step: PolicyVersion) -> None:
        """Test a step, which may take an hour. A rollback or an alarm meanwhile still puts the users back on live, and ends the test."""
        test = asyncio.create_task(self._learner.test(step, self.live))
        try:
            while not (await asyncio.wait({test}, timeout=self._config.poll_s))[0]:
                if await self._place_learner() != step and not test.done():
                    return
            await test
        finally:
            test.cancel()
            await asyncio.gather(test, return_exceptions=True)

    async def _place_learner(self) -> PolicyVersion | None:
        async with self._lock:
            state = await self._reconcile()
            held = self._cooldown.look(state)
            why = "a monitor's alarm pauses releases" if self._paused() else "" if held is None else held.reason
            return await self._learner.place(state, self.ledger.harmful, why)

    async def pace(self, *, gate_alpha: float) -> Pace:
        """Return the release pace that this traffic supports, and the recent risk. `gate_alpha`: the gate's level for one candidate."""
        async with self._lock:
            state, now, trial = await self._reconcile(), self._clock(), self._config.trial
            traffic = None if self._watch is None else await self._watch.traffic(state, now)
        history, tried, rules = self.ledger.history, self._trials.on, self._config
        guard = rules.guard if self._watch is not None and rules.guard.enabled else None
        standing = rules.standing if rules.best_arm else None
        return Pace(
            traffic=traffic,
            cadence=None if traffic is None else cadence(traffic, tuple(history.trials), trial),
            spent=spent(history, trial, tried=tried, gate_alpha=gate_alpha, now=now, guard=guard, standing=standing),
            tried=tried,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Run step, watch and follow until `stop` is set. Failures are retried; `trouble` describes them."""
        actions: dict[str, Callable[[], Awaitable[ReleaseEvent | None]]]
        actions = {"step": self.step, "watch": self.watch, "follow": self.follow}
        tasks = [asyncio.create_task(self._repeat(name, action)) for name, action in actions.items()]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, *tasks):
                task.cancel()
            ends = await asyncio.gather(stopping, *tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _repeat(self, name: str, action: Callable[[], Awaitable[ReleaseEvent | None]]) -> None:
        while True:
            event = None
            try:
                event = await action()
                self._troubles.pop(name, None)
            except OstinatoError as error:
                self._troubles[name] = f"{type(error).__name__}: {error}"
                logger.warning("release: %s; trying again in %g s", self._troubles[name], self._config.poll_s)
            except Exception as error:  # bad data must not stop the worker: people still need `ship` and `rollback`
                self._troubles[name] = f"{type(error).__name__}: {error}"
                logger.exception("release: %s failed; trying again in %g s", name, self._config.poll_s)
            if event is None:
                await asyncio.sleep(self._config.poll_s)

    def _expect(self, expected: PolicyVersion | None) -> None:
        """Raise Conflict unless `expected`, if given, is still live. Call it after reading the refs for the move."""
        if expected not in (None, self.live):
            raise Conflict(f"{self.live} is live now, not {expected}: nothing was done; look again, and decide again")

    async def _due(self, state: State) -> PolicyVersion | None:
        """Return the candidate to evaluate: the one whose evaluation has begun, else the newest; None if it is settled or there is none."""
        newest = await self._moves.version_at("candidate")
        if newest is None:
            return None
        begun = state.verdict
        pinned = self._evaluation_ref != "candidate" or (begun is not None and begun.candidate == newest)
        if begun is not None and begun.against == state.live and begun.verdict == "EXTEND" and pinned:
            return begun.candidate
        return None if state.settled(newest) else newest

    async def _evaluate(self, candidate: PolicyVersion, evals: GateJudge) -> ReleaseEvent | None:
        if not self._restored:
            evals.restore(self.ledger.evidence)
            self._restored = True
        if self._evaluation_ref != "candidate":
            await self._moves.point(self._evaluation_ref, candidate)
        incumbents = self.incumbents(candidate)
        if self.ledger.state.best is not None:
            await self._moves.point(BEST_REF, self.ledger.state.best)
        if self._best_ref is not None and incumbents.best not in (None, incumbents.live, incumbents.anchor):
            self._parked = False
            await self._moves.point(self._best_ref, incumbents.best)
        try:
            report = await evals.run(candidate, against=incumbents)
        except Conflict:
            if await self._moves.version_at("candidate") in (None, candidate):
                raise
            return None  # superseded during its evaluation: the next step takes the newest
        return await self.decide(candidate, report)

    async def _park(self) -> None:
        """While nothing is compared, keep the best release's slot on the anchor, whose weights are loaded anyway."""
        if self._parked or self._best_ref is None or self._anchor is None:
            return
        if await self._store.read_ref(self._best_ref) is not None:
            await self._moves.point(self._best_ref, self._anchor)
        self._parked = True

    async def _reconcile(self) -> State:
        """Bring the ledger in line with the live ref, which is authoritative for what users are served."""
        policy, state = await self._moves.version_at("live"), await self.ledger.refresh()
        if policy is not None and state.live not in (None, policy):
            # if a process is moving it by hand, its line with the reason follows at once; if it was killed in between, none does
            await asyncio.sleep(min(_LINE_WAIT_S, self._config.poll_s))
            policy, state = await self._moves.version_at("live"), await self.ledger.refresh()
        if policy is None:
            raise Unavailable(_NO_RELEASE)
        self._anchor = await self._moves.version_at("control")
        if state.live is None:
            await self.ledger.append("shipped", policy, None, "the starting model")
        elif state.live != policy and policy in state.releases:
            await self.ledger.append("rolled_back", policy, state.live, "found the live ref moved back")
        elif state.live != policy:
            reason, detail = self._moved_unwritten(policy, state)
            await self.ledger.append("shipped", policy, state.live, reason, detail | self._moves.staying(policy))
        await self._trials.park(policy, self.ledger.state)
        await self._verified.park(self.ledger.state)
        return self.ledger.state

    def _moved_unwritten(self, policy: PolicyVersion, state: State) -> tuple[str, dict[str, Any]]:
        """Return reason and detail for a live version without a ledger line: the process that moved the ref died before writing it."""
        if state.proposal is not None and state.proposal.candidate == policy and state.proposal.actor is not None:
            return approval_line(state.proposal)
        judged = policy == state.canary or (state.verdict is not None and state.verdict.candidate == policy)
        return (state.reason, {}) if judged else ("found the live ref moved by hand", {"actor": "unknown"})

    async def _settle(self, state: State) -> ReleaseEvent | None:
        """Act on the last verdict, a SHIP or BLOCK reached against the version that is live; return None while nothing may ship."""
        assert state.verdict is not None
        candidate, live, verdict = state.verdict
        if state.proposal is not None and state.proposal.actor is not None:
            return None  # a candidate that was approved meanwhile goes live first, which voids this verdict
        if verdict == "BLOCK" or candidate.hash in state.refused:
            return await self.ledger.append("blocked", candidate, live, state.reason)
        if self._paused() or self._cooldown.holds(state):
            return None
        if self._trials.on:
            traffic = None if self._watch is None else await self._watch.traffic(state, self._clock())
            return await self._trials.begin(candidate, live, state.reason, traffic)
        if self._config.require == "win" and not state.proven_better(candidate):
            why = f"not proven better than the best so far (release.require): {state.reason}"
            return await self.ledger.append("blocked", candidate, live, why)
        why = f"{state.reason}; on the gate alone, without a canary"
        return await self._approvals.passed(candidate, live, why, {}, ask=self._cooldown.asks(state))


# ---------------------------------------------------------------- the incumbent


_EXPECTED = 0.5
"""The outcome expected of every person, as nothing is known about new ones. Both arms have it, so it cancels in the difference."""


class RunningIncumbentTest:
    """The comparison of live with the verified release by the first declared goal, slot by slot.

    After a restart, the slots are read again from the log, as far back as `release.outcomes.window` reaches.
    """

    def __init__(self, log: Log, config: ReleaseConfig) -> None:
        self._log = log
        self._config = config
        self._goal = metrics_of(config.metrics, config.trial.margin)[0]
        self._key: tuple[str, float] | None = None
        self._shipped_at = -math.inf
        self._reactions: Reactions | None = None
        self._watch = IncumbentTest(config.standing, most_turns_a_day=config.trial.most_turns_a_day)
        self._people: dict[Person, int] = {}
        self._upto = -math.inf
        self._found: tuple[float, BestComparison] | None = None  # when live was released, and the comparison with it

    async def look(self, state: State, after: Cursor, now: float) -> BestComparison | None:
        """Return the result after the slots that are over; None if none has ended since live was released.

        `state` names the verified release. `after`: position in the log of the line that began the comparison with it.
        """
        key = state.verified[-1].hash, state.verified_at
        # true if the clock was ahead and has been set back
        ahead = self._upto > max(now, state.verified_at) + self._config.trial.slot_s
        if self._key != key or ahead:
            await self._begin(state.verified_at, after, now)
            self._key = key
        assert self._reactions is not None
        slot_s = self._config.trial.slot_s
        while (end := self._upto + slot_s) + self._config.outcomes.maturity_s <= now:
            if self._shipped_at != state.shipped_at and end - slot_s >= state.shipped_at:
                self._watch.shipped(end - slot_s)
                self._shipped_at = state.shipped_at
            if self._watch.over(end):
                self._people = {}
            # turns that were dropped because too many were pending are left out
            await self._reactions.refresh(end + self._config.outcomes.maturity_s, now)
            taken = self._reactions.take(end)
            own = taken if self._shipped_at == state.shipped_at else ()
            compared = self._watch.add(self._slot(taken, state, end), end, self._slot(own, state, end, newest=True))
            if self._shipped_at != state.shipped_at:  # the gain is still that of the previous live version
                compared = replace(compared, better=False)
            self._found, self._upto = (state.shipped_at, compared), end
        # repeat the result until it is acted on, so that a failure delays nothing; it says nothing about another live version
        return self._found[1] if self._found is not None and self._found[0] == state.shipped_at else None

    async def _begin(self, since: float, after: Cursor, now: float) -> None:
        """Start with the current period: earlier periods were decided in their time."""
        standing, slot_s = self._config.standing, self._config.trial.slot_s
        periods = math.floor((now - self._config.outcomes.maturity_s - since) / standing.period_s)
        began = since + max(periods, 0) * standing.period_s
        # the slot that ends with a period belongs to the next one
        self._upto = since if began == since else began - slot_s
        window = await self._log.before_last(self._config.outcomes.window, Turn)
        self._reactions = Reactions(self._log, self._config.outcomes, wanted((self._goal,)), max(after, window))
        await self._reactions.refresh(self._upto, now)
        self._reactions.take(self._upto)
        self._watch = IncumbentTest(standing, most_turns_a_day=self._config.trial.most_turns_a_day)
        self._watch.restart(began if began == since else began - standing.period_s)
        self._shipped_at = -math.inf
        self._people, self._found = {}, None

    def _slot(self, taken: Sequence[Reacted], state: State, end: float, *, newest: bool = False) -> TimeSlot:
        """Return the tallies of one slot. With `newest`, the live arm counts only the version that is live now."""
        assert state.live is not None
        tally, maturity_s = SlotTally(), self._config.outcomes.maturity_s
        for each in taken:
            if not each.dealt:
                continue
            treated = each.arm is Arm.LIVE and (not newest or each.policy in (state.live.hash, ""))
            stays = each.arm is Arm.VERIFIED and each.policy in (state.verified[-1].hash, "")
            measured = self._goal.measure(each.known(end + maturity_s)) if treated or stays else None
            if measured is None:
                continue
            if self._goal.sign < 0:
                measured = measured[1] - measured[0], measured[1]
            person = self._people.setdefault(each.person, len(self._people))
            tally.add(POOLED, person, treated, measured, _EXPECTED)
        return tally.slot(int(end // DAY))
