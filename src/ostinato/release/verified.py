"""The arm of users who stay on the best release that users ever proved: its ref, and the decisions that follow from it."""

from __future__ import annotations

from dataclasses import asdict

from ostinato.core.records import Arm, ReleaseEvent
from ostinato.core.seams import Clock, Log
from ostinato.release.config import ReleaseConfig
from ostinato.release.ledger import ReleaseLedger, State
from ostinato.release.moves import Moves
from ostinato.release.standing import RunningStanding


class VerifiedArm:
    """Without `config.best_arm` there is no such arm, and the methods do nothing."""

    def __init__(self, log: Log, ledger: ReleaseLedger, moves: Moves, config: ReleaseConfig, clock: Clock) -> None:
        self._ledger = ledger
        self._moves = moves
        self._clock = clock
        self._standing = RunningStanding(log, config) if config.best_arm else None

    async def park(self, state: State) -> None:
        """Keep the arm's ref where the ledger says."""
        if self._standing is not None and state.verified:
            await self._moves.point(Arm.VERIFIED.value, state.verified[-1])

    async def look(self, state: State) -> ReleaseEvent | None:
        """Roll back to the verified release if live is worse than it; record live in its place once live is better."""
        if self._standing is None or not state.verified or state.live is None:
            return None
        verified, live = state.verified[-1], state.live
        found = await self._standing.look(state, self._ledger.verified_from, self._clock())
        if found is None or live == verified:
            return None
        beside = f"beside {verified}, the best that users proved:"
        if found.worse:
            why = f"worse {beside} {100 * found.effect.difference:+.1f} pp"
            return await self._moves.take_back(verified, live, why, {"effect": asdict(found.effect)})
        if found.better:
            why = f"better {beside} {100 * found.gain.difference:+.1f} pp"
            return await self._ledger.append("verified", live, verified, why, {"effect": asdict(found.gain)})
        return None
