"""A release's stages with users: tried on some of them beside live, then live beside some who stay on the version it replaced.

`trial.running` handles the slots and the evidence. Here its decisions become lines of the ledger and moves of refs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from secrets import token_hex

from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.seams import Clock, Log
from ostinato.release.approvals import Approvals
from ostinato.release.config import ReleaseConfig
from ostinato.release.ledger import ReleaseLedger, State
from ostinato.release.moves import Moves
from ostinato.release.trial.record import TrialRecord
from ostinato.release.trial.running import RunningTrial
from ostinato.release.trial.verdict import Decision, Next


class Trials:
    """Begins trials, follows them, and keeps the refs of their arms where they belong. Without `config.canary` it begins none.

    It keeps no state that is not in the ledger: each method is given the state, and may be killed anywhere. While `paused` returns true,
    no share grows and nothing ships.
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

    async def begin(self, candidate: PolicyVersion, live: PolicyVersion, reason: str) -> ReleaseEvent:
        """Start a candidate's trial with its first users. Call this only where trials are on."""
        assert self._running is not None
        # A salt that nobody can guess: user names chosen by it could fill one arm and void the trial.
        # The line comes first: a restart between the two points the ref again, while a ref without its line would be parked.
        share = await self._running.first_share(self._clock())
        trial = {"share": share, "salt": token_hex(16), "require": self._config.require}
        event = await self._ledger.append("canary", candidate, live, reason, trial)
        await self._moves.point("canary", candidate)
        return event

    async def go_on(self, trial: TrialRecord, live: PolicyVersion, state: State) -> ReleaseEvent | None:
        """Act on the slots of a trial that are over: serve more users, ship, or block."""
        candidate = trial.candidate
        if self._running is None:
            why = "its trial was switched off (release.canary) before there was enough evidence"
            return await self._ledger.append("blocked", candidate, live, why)
        await self._moves.point("canary", candidate)
        decision = await self._running.look(trial, self._ledger.trial_began, self._clock())
        if decision is None or decision.next is Next.WAIT:
            return None if decision is None else await self._tell(trial, decision)
        if decision.next in (Next.SHIP, Next.RAMP) and self._paused():
            return None
        reading = {"reading": asdict(decision.reading)}
        if decision.next is Next.SHIP:
            why = f"{state.reason}; canary {decision.reason}"
            return await self._approvals.passed(candidate, live, why, reading)
        if decision.next is Next.BLOCK:
            event = await self._ledger.append("blocked", candidate, live, f"canary: {decision.reason}", reading)
            await self._moves.point("canary", live)
            return event
        detail = {"share": decision.share} | reading
        return await self._ledger.append("ramped", candidate, live, decision.reason, detail)

    async def prove(self, trial: TrialRecord, live: PolicyVersion) -> ReleaseEvent | None:
        """Compare live with the version it replaced: roll back if worse, note once it is better and whether that lasts. Needs trials on."""
        assert self._running is not None
        decision = await self._running.look(trial, self._ledger.trial_began, self._clock())
        if decision is None:
            return None
        detail = {"reading": asdict(decision.reading)}
        if decision.next is Next.ROLL_BACK:
            why = f"beside {trial.against}: {decision.reason}"
            return await self._moves.take_back(trial.against, live, why, detail)
        if decision.next in (Next.BETTER, Next.CONFIRMED, Next.FADED):
            action = decision.next.value
            return await self._ledger.append(action, trial.candidate, trial.against, decision.reason, detail)
        return await self._tell(trial, decision)

    async def _tell(self, trial: TrialRecord, decision: Decision) -> ReleaseEvent | None:
        """Record how an undecided trial stands, from time to time, so that readers of the ledger are not shown days-old figures."""
        if not trial.owes_a_line(self._clock(), self._config.trial.slot_s):
            return None
        detail = {"reading": asdict(decision.reading)}
        return await self._ledger.append("looked", trial.candidate, trial.against, decision.reason, detail)

    async def park(self, live: PolicyVersion, state: State) -> None:
        """Outside a trial, point its arms at the live version, whose weights are loaded anyway."""
        if self._running is None:
            return
        if state.canary is None:
            await self._moves.point("canary", live)
        if state.trial is None or not state.trial.shipped:
            await self._moves.point("previous", live)
