"""The controller: candidate in, one of shipped, blocked or rolled back out, by moving refs and writing the ledger.

It keeps no truth of its own. Each step looks at the ledger and the refs, does the one thing that is due, and may be killed
anywhere: the next start sees the same two and goes on. A ref moved without its ledger line is reconciled first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ostinato.core.errors import BadRequest, Conflict, NotFound, OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.report import Incumbents, Report, Verdict
from ostinato.core.seams import Clock, Log
from ostinato.release.ancestry import Ancestry
from ostinato.release.config import ReleaseConfig
from ostinato.release.guard import Compare
from ostinato.release.ledger import ReleaseLedger, State
from ostinato.release.outcomes import Outcomes
from ostinato.release.protocols import Judge, Refs, Versions
from ostinato.release.trial.record import TrialRecord
from ostinato.release.trial.running import RunningTrial
from ostinato.release.trial.verdict import Next
from ostinato.release.watch import Watch

logger = logging.getLogger(__name__)

_WHY_S = 0.5

BEST_REF = "best"
"""Holds the best release so far in the store, so that no collection of garbage takes it."""


class ReleaseController:
    """Judges candidates, moves refs, keeps the ledger. Implements the `Releases` seam.

    `evals` and `compare` may be None for a controller that only moves releases by hand (the command line). `evaluation_ref` is the
    ref whose slot serves the version being evaluated; another name than 'candidate' pins it while newer ones arrive. `best_ref` is the
    ref whose slot serves the best release while a candidate is compared with it, if it is neither live nor the anchor; without one it is
    then left out. With `config.canary` a candidate is first tried on a growing share of users. While `paused` says so,
    nothing ships and no share grows.
    """

    def __init__(
        self,
        log: Log,
        store: Refs,
        versions: Versions,
        evals: Judge | None,
        config: ReleaseConfig,
        clock: Clock,
        compare: Compare | None = None,
        *,
        evaluation_ref: str = "candidate",
        best_ref: str | None = None,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ledger = ReleaseLedger(log, clock)
        self._ancestry = Ancestry(log)
        self._troubles: dict[str, str] = {}
        self._store = store
        self._versions = versions
        self._evals = evals
        self._config = config
        self._evaluation_ref = evaluation_ref
        self._best_ref = best_ref
        self._anchor: PolicyVersion | None = None
        self._parked = False
        self._clock = clock
        self._paused = paused
        self._watch = (
            None if compare is None else Watch(Outcomes(log, config.outcomes, config.metrics), config.guard, compare)
        )
        self._trials = RunningTrial(log, config.outcomes, config.trial, config.metrics) if config.canary else None
        self._lock = asyncio.Lock()
        self._restored = False

    @property
    def trouble(self) -> str | None:
        """Why the last step or the last watch of `run` failed; None if neither did."""
        return "; ".join(self._troubles.values()) or None

    @property
    def live(self) -> PolicyVersion:
        """The version before users, as of the last look. Raises Unavailable before `bootstrap`."""
        if self.ledger.state.live is None:
            raise Unavailable("nothing is live yet; publish the starting model and call bootstrap")
        return self.ledger.state.live

    @property
    def incumbents(self) -> Incumbents:
        """What a candidate is to be compared with, as of the last look. Raises Unavailable before `bootstrap`."""
        live, anchor, best = self.live, self._anchor, self.ledger.state.best
        if anchor is None:
            raise Unavailable("the ref 'control' does not exist; publish the starting model and call bootstrap")
        sampled = best if best in (live, anchor) or self._best_ref is not None else None
        return Incumbents(live=live, best=sampled, anchor=anchor, round=self.ledger.state.judged)

    async def bootstrap(self, base: PolicyVersion) -> None:
        """Put the starting model live and freeze it as control. Refs that exist already stay where they are."""
        manifest = await self._versions.manifest_of(base)
        async with self._lock:
            for ref in ("live", "control"):
                if await self._store.read_ref(ref) is None:  # a store that releases elsewhere may be for reading only
                    with suppress(Conflict):  # another process was quicker: the same outcome
                        await self._store.move_ref(ref, None, manifest)
            await self._reconcile()

    async def rollback(self, to: PolicyVersion | None, reason: str) -> ReleaseEvent:
        """Put an earlier version (default: the previous release) live. What it replaces never ships again by itself.

        Raises:
            NotFound: there is no earlier release, or `to` was never published.
            Conflict: live was moved by someone else at this moment; look again.
        """
        async with self._lock:
            state = await self._reconcile()
            target = state.previous if to is None else to
            if target is None:
                raise NotFound("there is no earlier release to roll back to; name a version", field="to")
            if target == self.live:
                raise BadRequest(f"{target} is live already; name another version", field="to")
            return await self._take_back(target, reason, {})

    async def ship(self, policy: PolicyVersion, reason: str) -> ReleaseEvent:
        """Put a published version live without judging it: a person answers for it. A trial on the canary arm ends unfinished.

        Raises:
            NotFound: it was never published.
            BadRequest: it is live already.
            Conflict: live was moved by someone else at this moment; look again.
        """
        async with self._lock:
            await self._reconcile()
            if policy == self.live:
                raise BadRequest(f"{policy} is live already; name another version", field="to")
            return await self._ship(policy, self.live, reason)

    async def decide(self, candidate: PolicyVersion, report: Report) -> ReleaseEvent:
        """Record a report and act on it: ship (or start a canary), block, or for EXTEND nothing more."""
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
            waits = report.verdict is Verdict.EXTEND or (report.verdict is Verdict.SHIP and self._paused())
            return event if waits else await self._settle(self.ledger.state)

    async def step(self) -> ReleaseEvent | None:
        """Do the one thing that is due; None when nothing is.

        A judgement once begun is ended before a newer candidate is looked at, so a busy trainer cannot starve releases;
        candidates that came and went meanwhile are skipped.
        """
        async with self._lock:
            state = await self._reconcile()
            if state.canary is not None:
                return await self._try_canary(state.canary, state)
            if state.verdict is not None and state.verdict[1] == state.live and state.verdict[2] in ("SHIP", "BLOCK"):
                return None if state.verdict[2] == "SHIP" and self._paused() else await self._settle(state)
        candidate = await self._due(state)
        if candidate is not None and await self._ancestry.carried_on(candidate, self.ledger.harmful):
            why = "it may descend from a version that was taken back: training has not gone back yet"
            return await self.ledger.append("blocked", candidate, self.live, why)
        if candidate is None or self._evals is None:
            await self._park()
            return None
        return await self._evaluate(candidate, self._evals)

    async def watch(self) -> ReleaseEvent | None:
        """Compare live with what it replaced and with control, each beside it in time; on significant harm, roll back by itself."""
        async with self._lock:
            state = await self._reconcile()
            if state.trial is not None and state.trial.shipped and self._trials is not None:
                return await self._prove(state.trial, self._trials)
            if self._watch is None or state.previous is None or self._anchor is None:
                return None
            harm = await self._watch.live(state, self._anchor, self._clock())
            if harm is None:
                return None
            return await self._take_back(state.previous, f"guard: {harm}", {"guard": asdict(harm)})

    async def run(self, stop: asyncio.Event) -> None:
        """Step and watch until `stop` is set. What fails is tried again; `trouble` says what."""
        actions = {"step": self.step, "watch": self.watch}
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
            if event is None:
                await asyncio.sleep(self._config.poll_s)

    async def _due(self, state: State) -> PolicyVersion | None:
        """The candidate to evaluate: the one whose judgement has begun, else the newest, unless settled."""
        newest = await self._versions.resolve("candidate")
        if newest is None:
            return None
        begun = state.verdict
        pinned = self._evaluation_ref != "candidate" or (begun is not None and begun[0] == newest[0])
        if begun is not None and begun[1] == state.live and begun[2] == "EXTEND" and pinned:
            return begun[0]
        return None if state.settled(newest[0]) else newest[0]

    async def _evaluate(self, candidate: PolicyVersion, evals: Judge) -> ReleaseEvent | None:
        if not self._restored:
            evals.restore(self.ledger.evidence)
            self._restored = True
        if self._evaluation_ref != "candidate":
            await self._point(self._evaluation_ref, candidate)
        incumbents = self.incumbents
        if self.ledger.state.best is not None:
            await self._point(BEST_REF, self.ledger.state.best)
        if self._best_ref is not None and incumbents.best not in (None, incumbents.live, incumbents.anchor):
            self._parked = False
            await self._point(self._best_ref, incumbents.best)
        try:
            report = await evals.run(candidate, against=incumbents)
        except Conflict:
            newest = await self._versions.resolve("candidate")
            if newest is None or newest[0] == candidate:
                raise
            return None  # superseded while being evaluated: the next step takes the newest
        return await self.decide(candidate, report)

    async def _park(self) -> None:
        """While nothing is compared, the best release's slot holds the anchor, whose weights are loaded anyway."""
        if self._parked or self._best_ref is None or self._anchor is None:
            return
        if await self._store.read_ref(self._best_ref) is not None:
            await self._point(self._best_ref, self._anchor)
        self._parked = True

    async def _reconcile(self) -> State:
        """Bring the ledger in line with the live ref, which is the truth about what users get."""
        found, state = await self._versions.resolve("live"), await self.ledger.refresh()
        if found is not None and state.live not in (None, found[0]):
            # who moves it by hand is about to write why; who was killed in between will not
            await asyncio.sleep(min(_WHY_S, self._config.poll_s))
            found, state = await self._versions.resolve("live"), await self.ledger.refresh()
        if found is None:
            raise Unavailable("the ref 'live' does not exist; publish the starting model and call bootstrap")
        policy, control = found[0], await self._versions.resolve("control")
        self._anchor = None if control is None else control[0]
        if state.live is None:
            await self.ledger.append("shipped", policy, None, "the starting model")
        elif state.live != policy and policy in state.releases:
            await self.ledger.append("rolled_back", policy, state.live, "found the live ref moved back")
        elif state.live != policy:
            judged = policy == state.canary or (state.verdict is not None and state.verdict[0] == policy)
            reason = state.reason if judged else "found the live ref moved by hand"
            await self.ledger.append("shipped", policy, state.live, reason, self._proving(policy, state))
        await self._park_arms(policy)
        return self.ledger.state

    async def _park_arms(self, live: PolicyVersion) -> None:
        """Outside a trial its arms hold what is live, whose weights are loaded anyway."""
        if self._trials is None:
            return
        if self.ledger.state.canary is None:
            await self._point("canary", live)
        if self.ledger.state.trial is None or not self.ledger.state.trial.shipped:
            await self._point("previous", live)

    async def _settle(self, state: State) -> ReleaseEvent:
        """Act on the last verdict, which is SHIP or BLOCK and was reached against what is live."""
        assert state.verdict is not None
        candidate, live, verdict = state.verdict
        if verdict == "BLOCK" or candidate.hash in state.refused:
            return await self.ledger.append("blocked", candidate, live, state.reason)
        if self._trials is not None:
            # The line first: a restart between the two points the ref again, while a ref without its line would be parked.
            share = await self._trials.first_share(self._clock())
            trial = {"share": share, "salt": candidate.hash[:16]}
            event = await self.ledger.append("canary", candidate, live, state.reason, trial)
            await self._point("canary", candidate)
            return event
        return await self._ship(candidate, live, f"{state.reason}; on the gate alone, without a canary")

    async def _try_canary(self, candidate: PolicyVersion, state: State) -> ReleaseEvent | None:
        live = self.live
        if self._trials is None or state.trial is None:
            why = "its trial was switched off (release.canary) before there was enough evidence"
            return await self.ledger.append("blocked", candidate, live, why)
        await self._point("canary", candidate)
        decision = await self._trials.look(state.trial, self.ledger.trial_began, self._clock())
        if decision is None or decision.next is Next.WAIT:
            return None
        if decision.next in (Next.SHIP, Next.RAMP) and self._paused():
            return None
        if decision.next is Next.SHIP:
            return await self._ship(
                candidate, live, f"{state.reason}; canary {decision.reason}", asdict(decision.reading)
            )
        if decision.next is Next.BLOCK:
            event = await self.ledger.append(
                "blocked", candidate, live, f"canary: {decision.reason}", {"reading": asdict(decision.reading)}
            )
            await self._point("canary", live)
            return event
        detail = {"share": decision.share, "reading": asdict(decision.reading)}
        return await self.ledger.append("ramped", candidate, live, decision.reason, detail)

    async def _prove(self, trial: TrialRecord, trials: RunningTrial) -> ReleaseEvent | None:
        """Live beside what it replaced: taken back if it is worse, and noted once it is better."""
        decision = await trials.look(trial, self.ledger.trial_began, self._clock())
        if decision is None:
            return None
        detail = {"reading": asdict(decision.reading)}
        if decision.next is Next.ROLL_BACK:
            return await self._take_back(trial.against, f"beside {trial.against}: {decision.reason}", detail)
        if decision.next is Next.BETTER and not trial.better:
            return await self.ledger.append("better", trial.candidate, trial.against, decision.reason, detail)
        return None

    def _proving(self, policy: PolicyVersion, state: State) -> dict[str, Any]:
        """What the line of a release that comes from a trial says about who stays on the one before it."""
        return {"share": 1.0 - self._config.trial.holdback} if policy == state.canary else {}

    async def _ship(
        self, candidate: PolicyVersion, live: PolicyVersion, reason: str, reading: Mapping[str, Any] | None = None
    ) -> ReleaseEvent:
        proving = self._proving(candidate, self.ledger.state)
        manifest = await self._swap_live(live, candidate)
        detail = {"manifest": manifest, **proving} | ({} if reading is None else {"reading": reading})
        return await self.ledger.append("shipped", candidate, live, reason, detail)

    async def _take_back(self, target: PolicyVersion, reason: str, detail: Mapping[str, Any]) -> ReleaseEvent:
        live = self.live
        manifest = await self._swap_live(live, target)
        return await self.ledger.append("rolled_back", target, live, reason, {**detail, "manifest": manifest})

    async def _swap_live(self, live: PolicyVersion, target: PolicyVersion) -> str:
        """Compare-and-swap on what the ref holds, which is read before the version behind it is checked."""
        manifest, held = await self._versions.manifest_of(target), await self._store.read_ref("live")
        found = await self._versions.resolve("live")
        if found is None or found[0] != live:
            raise Conflict(f"live is no longer {live}; look again")
        await self._store.move_ref("live", held, manifest)
        return manifest

    async def _point(self, ref: str, policy: PolicyVersion) -> None:
        """Move one of this controller's own refs, if it does not point there already."""
        manifest, old = await self._versions.manifest_of(policy), await self._store.read_ref(ref)
        if old != manifest:
            await self._store.move_ref(ref, old, manifest)
