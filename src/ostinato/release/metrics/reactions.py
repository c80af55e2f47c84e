"""The log's turns joined with people's reactions, taken by time slot once late reactions have had their chance.

A tenant's signals about another tenant's turn are ignored. A turn is taken once: memory holds only turns that may still get a reaction.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ostinato.core.pending_signals import PendingSignals
from ostinato.core.records import Arm, Finish, Person, Signal, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.core.verdicts import LATE
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.metrics.facts import HEARD, MOST_SIGNALS, Task, TurnSignals, facts_of, tasks_of

_OUT_OF_ORDER_S = 60.0
"""How far rows of the log may be out of order in time: several processes write them, and a turn is written when it has ended."""


@dataclass(slots=True)
class Reacted:
    """One turn: its person and version, its facts, and the signals about it.

    `policy` is "" if it ended before its first token. `dealt`: its user was assigned to the arm at random. `tasks`: what was asked. `over`
    is set once it was taken or dropped.
    """

    turn: str
    arm: Arm
    person: Person
    policy: str
    ended_at: float
    facts: Mapping[str, float]
    dealt: bool = True
    tasks: tuple[Task, ...] = ()
    said: TurnSignals = field(default_factory=TurnSignals)
    over: bool = False

    def known(self, until: float = math.inf) -> dict[str, float]:
        """Return facts and signals by name, with the signals received by `until`."""
        values = self.said.values(until)
        return {**values, **self.facts, HEARD: float(not values.keys() <= LATE)}


def reacted(turn: Turn, wanted: Collection[str], nothing: str) -> Reacted | None:
    """Return the turn with the wanted facts and no reactions yet; None for a turn that says nothing about one version.

    These turns are left out: evaluations; turns that mixed versions across a weight swap; turns that ended because the client's grammar was
    too complex, for which no version is to blame; turns routed by Auto, whose shares follow the reward, so that its arms were not assigned
    at fixed odds; and turns that may not count (`Consent.NEVER`).
    """
    if turn.finish is Finish.GRAMMAR or not turn.counts:
        return None
    hashes = {span.policy.hash for span in turn.spans}
    cut = turn.finish in (Finish.ERROR, Finish.LEFT, Finish.ABORT)
    if not turn.arm.people or turn.auto is not None or len(hashes) > 1 or not (hashes or cut):
        return None
    return Reacted(
        turn=turn.id,
        arm=turn.arm,
        person=turn.person,
        policy="".join(hashes),
        ended_at=turn.ended_at,
        facts=facts_of(turn, wanted, nothing),
        dealt=turn.propensity < 1.0,
    )


class Reactions:
    """Reads the log after the position `after`. `wanted`: the facts that metrics read.

    When more than `config.window` turns wait, the oldest turn of the tenant with the most waiting turns is dropped, so that a flood costs
    only its sender.
    """

    def __init__(self, log: Log, config: OutcomeConfig, wanted: Collection[str], after: Cursor) -> None:
        self._log = log
        self._config = config
        self._wanted = wanted
        self._cursor = after
        self._by_turn: dict[str, Reacted] = {}  # in the log's order
        self._by_tenant: dict[str, deque[Reacted]] = {}
        self._counts: Counter[str] = Counter()
        self._early = PendingSignals[Signal](most=config.window, most_each=MOST_SIGNALS, seconds=config.early_s)

    async def refresh(self, until: float = math.inf, now: float = math.inf) -> list[Reacted]:
        """Read the new rows, up to a row that is clearly younger than `until`. Return the turns dropped because too many were waiting.

        A row that lies beyond `now` does not end the reading: it was written by a clock that was ahead, and older rows follow it.
        """
        dropped: list[Reacted] = []
        async for cursor, row in self._log.read(self._cursor, {Turn, Signal}):
            self._cursor = cursor
            at = 0.0
            if isinstance(row, Turn):
                at = row.ended_at
                self._early.advance(at)
                self._turn(row)
            elif isinstance(row, Signal):
                at = row.received_at
                self._early.advance(at)
                self._signal(row)
            if len(self._by_turn) > self._config.window:
                dropped.append(self._drop_oldest())
            if until + _OUT_OF_ORDER_S < at <= now + _OUT_OF_ORDER_S:
                break
        return dropped

    def take(self, until: float) -> list[Reacted]:
        """Return the turns that ended by `until` and were not taken before, in the log's order."""
        taken = [each for each in self._by_turn.values() if each.ended_at <= until]
        for each in taken:
            self._remove(each)
        for turns in self._by_tenant.values():
            while turns and turns[0].over:
                turns.popleft()
        return taken

    def people(self) -> set[Person]:
        """Return the people whose turns were not taken yet."""
        return {each.person for each in self._by_turn.values()}

    def _drop_oldest(self) -> Reacted:
        tenant, _ = self._counts.most_common(1)[0]
        turns = self._by_tenant[tenant]
        while turns[0].over:
            turns.popleft()
        each = turns.popleft()
        self._remove(each)
        return each

    def _remove(self, each: Reacted) -> None:
        tenant = each.person[0]
        each.over = True
        del self._by_turn[each.turn]
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant], self._by_tenant[tenant]

    def _turn(self, turn: Turn) -> None:
        found = reacted(turn, self._wanted, self._config.nothing)
        if found is None or turn.id in self._by_turn:
            return
        found.tasks = tasks_of(turn)
        self._by_turn[turn.id] = found
        self._by_tenant.setdefault(turn.tenant, deque()).append(found)
        self._counts[turn.tenant] += 1
        for signal in self._early.claim(turn.tenant, turn.id):
            self._signal(signal)

    def _signal(self, signal: Signal) -> None:
        found = self._by_turn.get(signal.turn)
        if found is None:
            self._early.add(signal.tenant, signal.turn, replace(signal, comment=None, correction=None))
        elif signal.tenant == found.person[0]:
            found.said.hear(signal)
