"""Turns of the log with what people made of them, taken out in slots of time once late reactions had their chance.

What a tenant says about another tenant's turn is not heard. A turn is taken once: memory holds those that may still get a reaction.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ostinato.core.records import Arm, Finish, Person, Signal, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.release.early import EarlySignals
from ostinato.release.metrics.facts import HEARD, facts_of
from ostinato.release.metrics.hearing import MOST_SIGNALS, Said
from ostinato.release.outcome_config import OutcomeConfig


@dataclass(slots=True)
class Reacted:
    """One turn: who was served what, its facts, and what was said about it. `policy` is "" where it ended before its first token."""

    turn: str
    arm: Arm
    person: Person
    policy: str
    ended_at: float
    facts: Mapping[str, float]
    said: Said = field(default_factory=Said)

    def known(self, until: float = math.inf) -> dict[str, float]:
        """Facts and signals by name, with what was received by then."""
        values = self.said.values(until)
        return {**values, **self.facts, HEARD: float(bool(values))}


def reacted(turn: Turn, wanted: Collection[str], nothing: str) -> Reacted | None:
    """A turn that nobody reacted to yet, with the facts that are wanted; None for one that compares no versions.

    Left out are evaluations, turns that mixed versions across a swap, and what Auto dealt: its shares follow the reward, so who got an
    arm from it was not dealt at random.
    """
    hashes = {span.policy.hash for span in turn.spans}
    cut = turn.finish in (Finish.ERROR, Finish.ABORT)
    if turn.arm == Arm.EVAL or turn.auto is not None or len(hashes) > 1 or not (hashes or cut):
        return None
    return Reacted(
        turn=turn.id,
        arm=turn.arm,
        person=turn.person,
        policy="".join(hashes),
        ended_at=turn.ended_at,
        facts=facts_of(turn, wanted, nothing),
    )


class Reactions:
    """Reads the log from a place on. `wanted` are the facts that metrics read."""

    def __init__(self, log: Log, config: OutcomeConfig, wanted: Collection[str], after: Cursor) -> None:
        self._log = log
        self._config = config
        self._wanted = wanted
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
            each = self._pop()
            if each.ended_at <= until:
                taken.append(each)
            else:
                later.append(each)
        self._waiting = later
        self._by_turn = {each.turn: each for each in later}
        return taken

    def people(self) -> set[Person]:
        """Who made the turns that were not taken yet."""
        return {each.person for each in self._waiting}

    def _pop(self) -> Reacted:
        each = self._waiting.popleft()
        self._by_turn.pop(each.turn, None)
        return each

    def _turn(self, turn: Turn) -> None:
        found = reacted(turn, self._wanted, self._config.nothing)
        if found is None:
            return
        self._waiting.append(found)
        self._by_turn[turn.id] = found
        for signal in self._early.claim(turn.tenant, turn.id):
            self._signal(signal)

    def _signal(self, signal: Signal) -> None:
        found = self._by_turn.get(signal.turn)
        if found is None:
            self._early.add(signal)
        elif signal.tenant == found.person[0]:
            found.said.hear(signal)
