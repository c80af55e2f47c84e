"""The learner arm: a few users follow training, so that their feedback is about weights close to those that learn from it.

The trainer's newest step serves these users once it passes a smoke test and the quality bars; the gate, trials and the guard have no part
in it. If a step fails, shipping is paused, or a step may carry on harm, the users get live's weights at the next call of `place`. The
controller calls it every `release.poll_s`, even while a step is tested. The ref says what is served, and a step is tested again after a
restart, so there is no other state.
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

STEP_ALARM = "release:learner"
"""Name of the alarm that is raised while the newest step has failed its test."""


class StepJudge(Protocol):
    """Tests a training step: `evaluate.evaluation.StepCheck`, or a fake."""

    async def run(self, step: PolicyVersion, live: PolicyVersion) -> str:
        """Return why the step must not serve anybody; "" if it may."""
        ...


class LearnerArm:
    """Moves the refs of the learner arm. The process may be killed at any point of any method.

    Args:
        judge: tests a step. Without it nothing is tested, so the arm follows no step.
        newest: the ref that the trainer moves to each step.
        test: the ref of the slot in which a step is tested.
        idle: refs of this arm or another that is switched off. Where they exist they are kept on live, so that they hold no old version in
            the store and in gateways.

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
        self._ancestry = Ancestry(log)  # not the controller's: that one reads the log at the same time
        self._passed = self._failed = self._failure = self._hold = ""
        self._testing: PolicyVersion | None = None
        self._raised: bool | None = None

    async def place(self, state: State, harmful: Harmful | None, hold: str) -> PolicyVersion | None:
        """Point the arm where it belongs. Return the step that must be tested before it may serve users, or None.

        While a step is tested, the result stays that step as long as its test is worth finishing, however many newer steps were stored.
        `hold`: why nobody may follow training now, "" if they may. Raises Conflict, Unavailable.
        """
        live, newest = state.live, None
        await self._park_idle(live)
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
        if self._failure:  # the last test failed, and the step before it differs little from the failed one
            await self._moves.point(Arm.LEARNER.value, live)
        elif tested is not None and tested.hash == self._passed and await self._follows(tested, state, harmful):
            await self._moves.point(Arm.LEARNER.value, tested)  # a newer step was stored during its test
        else:
            await self.leave(state, harmful)
        await self._moves.point(self._test, newest)
        return newest

    async def leave(self, state: State, harmful: Harmful | None) -> None:
        """Put the arm's users on live if their version was refused, may carry on harm, or is no newer than live."""
        served = await self._moves.version_at(Arm.LEARNER.value)
        if served is not None and state.live is not None and not await self._follows(served, state, harmful):
            await self._moves.point(Arm.LEARNER.value, state.live)

    async def test(self, step: PolicyVersion, live: PolicyVersion) -> None:
        """Test a step; the next `place` acts on the result. An error of the test is raised, and the step then stays untested."""
        assert self._judge is not None, "without one there is no step to be tested"
        self._testing = step
        try:
            self._failure = await self._judge.run(step, live)
        finally:
            self._testing = None
        if self._failure:
            self._failed = step.hash
            logger.warning("%s is not served to the learner arm: %s", step, self._failure)
        else:
            self._passed = step.hash

    async def tell(self) -> None:
        """Raise the alarm once a step has failed; clear it once one passes or nobody follows training any more.

        Raises StorageFull, Unavailable; call it again then.
        """
        raised = bool(self._failure)
        if self._raised is raised or not (self._passed or self._failed or self._judge is None):
            return
        if raised:
            why = f"the newest step may not answer users, and those who follow training have live: {self._failure}"
        elif self._judge is None:
            why = "nobody follows training any more"
        else:
            why = "the newest step passed its test, and answers those who follow training"
        await note(self._log, STEP_ALARM, raised=raised, why=why, at=self._clock())
        self._raised = raised

    async def _follows(self, policy: PolicyVersion, state: State, harmful: Harmful | None) -> bool:
        """Return true if the arm may follow this step: newer than live, not refused, no descendant of a version that was rolled back."""
        newer = state.live is not None and policy.number > state.live.number
        return newer and policy.hash not in state.refused and not await self._ancestry.carried_on(policy, harmful)

    async def _park_idle(self, live: PolicyVersion | None) -> None:
        if live is None or live.hash == self._idle_at:
            return
        for ref in self._idle:
            if await self._moves.version_at(ref) is not None:
                await self._moves.point(ref, live)
        self._idle_at = live.hash
