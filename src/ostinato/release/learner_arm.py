"""The learner arm: a few users follow training, so that what they say is about weights close to those that learn from it.

The trainer's newest step answers them once it passes a smoke test and the quality bars; the gate, trials and the guard have no part in
it. Where a step fails, shipping is paused, or a step may carry on harm, they are served live's weights at the next call of `place`, which
the controller makes every `release.poll_s`, also while a step is tested. What is served stands in the ref, and what was tested is tested
again after a restart, so there is no other state.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from ostinato.core.records import Arm, PolicyVersion
from ostinato.core.seams import Clock, Log
from ostinato.release.alarms import note
from ostinato.release.ledger import Ancestry, Harmful, State
from ostinato.release.moves import Moves

logger = logging.getLogger(__name__)

BROKEN = "release:learner"
"""The name of the alarm that stands while the newest step failed its test."""


class StepJudge(Protocol):
    """Tests a training step: `evaluate.evaluation.StepCheck`, or a fake."""

    async def run(self, step: PolicyVersion, live: PolicyVersion) -> str:
        """Why it must not answer anybody; "" if it may."""
        ...


class LearnerArm:
    """Moves the refs of the arm. Each call may be killed anywhere.

    `newest` is the ref that the trainer moves to each step, `test` that of the slot in which a step is tested. Without a `judge` nothing
    is tested, so nobody is led further. `idle`: refs that hold live wherever they are there, since this arm or another is off, so that they
    keep no version in the store and in gateways.

    Example: ``LearnerArm(log, moves, judge, clock, newest="world", test="learner-test")``
    """

    def __init__(
        self,
        log: Log,
        moves: Moves,
        judge: StepJudge | None,
        clock: Clock,
        *,
        newest: str,
        test: str,
        idle: Sequence[str] = (),
    ) -> None:
        self._log, self._moves, self._judge, self._clock = log, moves, judge, clock
        self._newest, self._test, self._idle, self._idle_at = newest, test, tuple(idle), ""
        self._ancestry = Ancestry(log)  # its own: the controller reads on in its at the same time
        self._passed = self._failed = self._why = self._hold = ""
        self._testing: PolicyVersion | None = None
        self._raised: bool | None = None

    async def place(self, state: State, harmful: Harmful | None, hold: str) -> PolicyVersion | None:
        """Point the arm where it belongs; returns the step that is to be tested before it may answer, or None.

        While a step is tested, it returns that step as long as its test is worth going on with, however many were stored since. `hold`:
        why nobody may follow training now, "" if they may. Raises Conflict, Unavailable.
        """
        live, newest = state.live, None
        await self._rest(live)
        if live is None or self._judge is None:
            return None
        if hold != self._hold:
            logger.info("the learner arm %s", f"is served live: {hold}" if hold else "follows training again")
            self._hold = hold
        if not hold:
            newest = self._testing or await self._moves.version_at(self._newest)
        if newest is None or newest.hash == self._failed or not await self._follows(newest, state, harmful):
            for ref in (Arm.LEARNER.value, self._test):
                await self._moves.point(ref, live)
            return None
        if newest.hash == self._passed:
            await self._moves.point(Arm.LEARNER.value, newest)
            return None
        tested = await self._moves.version_at(self._test)
        if self._why:  # the step before one that failed is as good as the same
            await self._moves.point(Arm.LEARNER.value, live)
        elif tested is not None and tested.hash == self._passed and await self._follows(tested, state, harmful):
            await self._moves.point(Arm.LEARNER.value, tested)  # a newer one was stored during its test
        else:
            await self.leave(state, harmful)
        await self._moves.point(self._test, newest)
        return newest

    async def leave(self, state: State, harmful: Harmful | None) -> None:
        """Give the arm's users live's weights if what they have was refused, may carry on harm, or is no newer than live."""
        served = await self._moves.version_at(Arm.LEARNER.value)
        if served is not None and state.live is not None and not await self._follows(served, state, harmful):
            await self._moves.point(Arm.LEARNER.value, state.live)

    async def test(self, step: PolicyVersion, live: PolicyVersion) -> None:
        """Test a step; the next `place` acts on it. Raises what the test raises: nothing is then known of the step."""
        assert self._judge is not None, "without one there is no step to be tested"
        self._testing = step
        try:
            self._why = await self._judge.run(step, live)
        finally:
            self._testing = None
        if self._why:
            self._failed = step.hash
            logger.warning("%s is not served to the learner arm: %s", step, self._why)
        else:
            self._passed = step.hash

    async def tell(self) -> None:
        """Raise the alarm once a step has failed, and clear it once one passes or nobody follows training any more.

        Raises StorageFull, Unavailable; call it again then.
        """
        raised = bool(self._why)
        if self._raised is raised or not (self._passed or self._failed or self._judge is None):
            return
        if raised:
            why = f"the newest step may not answer users, and those who follow training have live: {self._why}"
        elif self._judge is None:
            why = "nobody follows training any more"
        else:
            why = "the newest step passed its test, and answers those who follow training"
        await note(self._log, BROKEN, raised=raised, why=why, at=self._clock())
        self._raised = raised

    async def _follows(self, policy: PolicyVersion, state: State, harmful: Harmful | None) -> bool:
        """Whether a step may be followed at all: newer than live, refused by nobody, and no heir of a version that was taken back."""
        newer = state.live is not None and policy.number > state.live.number
        return newer and policy.hash not in state.refused and not await self._ancestry.carried_on(policy, harmful)

    async def _rest(self, live: PolicyVersion | None) -> None:
        if live is None or live.hash == self._idle_at:
            return
        for ref in self._idle:
            if await self._moves.version_at(ref) is not None:
                await self._moves.point(ref, live)
        self._idle_at = live.hash
