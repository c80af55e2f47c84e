"""Turns of the log with what people made of them, taken out in slots of time once late reactions had their chance.

What a tenant says about another tenant's turn is not heard. A turn is taken once: memory holds those that may still get a reaction.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ostinato.core.records import Arm, Finish, Person, Signal, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.release.early import EarlySignals
from ostinato.release.hearing import MOST_SIGNALS, Said
from ostinato.release.outcome_config import OutcomeConfig


@dataclass(slots=True)
class Reacted:
    """One turn. `good` is None where nobody said whether it was; a turn that somebody stopped was not."""

    turn: str
    arm: Arm
    person: Person
    policy: str
    ended_at: float
    failed: bool
    stopped: bool
    said: Said = field(default_factory=Said)

    @property
    def good(self) -> bool | None:
        """What the signals say together: a bad one wins."""
        return False if self.stopped else self.said.good


class Reactions:
    """Reads the log from a place on. Turns that mixed versions across a swap count for neither."""

    def __init__(self, log: Log, config: OutcomeConfig, after: Cursor) -> None:
        self._log = log
        self._config = config
        self._cursor = after
        self._waiting: deque[Reacted] = deque()
        self._by_turn: dict[str, Reacted] = {}
        self._early = EarlySignals(most=config.window, most_each=MOST_SIGNALS, seconds=config.early_s)

    async def refresh(self) -> list[Reacted]:
        """Read what is new. Returns turns that had to be taken early because too many wait: not one is forgotten."""
        overflown: list[Reacted] = []
        async for cursor, row in self._log.read(self._cursor, {Turn, Signal}):
            self._cursor = cursor
            if isinstance(row, Turn):
                self._early.advance(row.ended_at)
                self._turn(row)
            elif isinstance(row, Signal):
                self._early.advance(row.received_at)
                self._signal(row)
            if len(self._waiting) > self._config.window:
                overflown.append(self._pop())
        return overflown

    def take(self, until: float) -> list[Reacted]:
        """The turns that ended by then and were not taken before, in the log's order."""
        taken: list[Reacted] = []
        later: deque[Reacted] = deque()
        while self._waiting:
            reacted = self._pop()
            if reacted.ended_at <= until:
                taken.append(reacted)
            else:
                later.append(reacted)
        self._waiting = later
        self._by_turn = {reacted.turn: reacted for reacted in later}
        return taken

    def people(self) -> set[Person]:
        """Who made the turns that were not taken yet."""
        return {reacted.person for reacted in self._waiting}

    def _pop(self) -> Reacted:
        reacted = self._waiting.popleft()
        self._by_turn.pop(reacted.turn, None)
        return reacted

    def _turn(self, turn: Turn) -> None:
        hashes = {span.policy.hash for span in turn.spans}
        failed = turn.finish == Finish.ERROR
        # Auto's shares follow the reward: who got an arm from it was not dealt at random
        if turn.arm == Arm.EVAL or turn.auto is not None or len(hashes) > 1 or not (hashes or failed):
            return
        reacted = Reacted(
            turn=turn.id,
            arm=turn.arm,
            person=turn.person,
            policy="".join(hashes),
            ended_at=turn.ended_at,
            failed=failed,
            stopped=turn.finish == Finish.ABORT,
        )
        self._waiting.append(reacted)
        self._by_turn[turn.id] = reacted
        for signal in self._early.claim(turn.tenant, turn.id):
            self._signal(signal)

    def _signal(self, signal: Signal) -> None:
        reacted = self._by_turn.get(signal.turn)
        if reacted is None:
            self._early.add(signal)
        elif signal.tenant == reacted.person[0]:
            reacted.said.hear(signal, self._config)
