"""Reward scheduler: decides when the reward function is called for a turn, and which row its answer becomes.

The reward of a simulated world's turn is its rollout's verdict, as soon as that is in the log. There is no window, since the verdict comes
from a program, not from a person, and is final. No other source is trusted: only signals of the turn's own tenant, sent by code, count.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from ostinato.core.records import NoReward, Pending, Quarantine, Reward, Row, Signal, Source, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.core.verdicts import GRADED, LATE_REWARD, LATE_REWARD_FAILED, NO_LATE_REWARD, TORN, VERDICTS, late_id
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger import GONE, UNDELIVERED, TurnLedger
from ostinato.reward.ledger_entries import OpenTurn, SignalRef, TurnFacts
from ostinato.reward.protocol import Answer, Asker, Failure, RewardRequest, checked
from ostinato.reward.surrogate import early_values

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- verdicts of worlds


FUNCTION = "world@1"


def verdict(turn: Turn, signals: Sequence[Signal]) -> Reward | NoReward | Pending:
    """Return the first verdict among the signals, in log order; Pending forever if there is none.

    Example: graded 1.0 -> ``Reward(turn="a:0", value=1.0, function="world@1", signals=("graded:a:0",), at=12.5)``
    """
    for signal in signals:
        if signal.source is not Source.CODE or signal.name not in VERDICTS:
            continue
        if signal.name != GRADED:
            return NoReward(reason=signal.name)
        return Reward(turn=turn.id, value=signal.value, function=FUNCTION, signals=(signal.id,), at=signal.received_at)
    return Pending(until=math.inf)


# ---------------------------------------------------------------- rounds


ROUND_TURNS = 100  # turns per round; results of a round, such as an alarm, take effect in the next
ROUND_SIGNALS = 200  # signals fetched per round
LATE_AGAIN_S = 600.0  # seconds after which a late reward that is still not in the log is computed again
UNASKED = "unasked: reward.longest_wait_s is over"


class RewardScheduler:
    """Asks about a turn when it is new, when a new row is about it, and when its `ask_at` has come; never in between.

    Times are compared with the clock minus `settle_s`, so that signals received in time have reached the disk. `late` computes late
    rewards; None: none are computed.
    """

    def __init__(self, log: Log, config: RewardConfig, late: Asker | None = None) -> None:
        self._log = log
        self._config = config
        self._late = late
        self._late_at: dict[str, float] = {}  # by turn: when to ask for its late reward again
        self._later: list[tuple[float, Cursor, str]] = []  # a heap of (time to ask again, place in the log, turn)
        self._planned: TurnLedger | None = None  # the ledger whose turns are in the heap

    def due(self, ledger: TurnLedger, now: float) -> list[OpenTurn]:
        """Return the next open turns to ask about, in log order; [] if none is due."""
        if self._planned is not ledger:
            self._later = [
                (entry.ask_at, entry.facts.seq, turn) for turn, entry in ledger.open.items() if entry.ask_at is not None
            ]
            heapq.heapify(self._later)
            self._planned = ledger
        settled = now - self._config.settle_s
        while self._later and self._later[0][0] <= settled:
            at, _, turn = heapq.heappop(self._later)
            if turn in ledger.open and ledger.open[turn].ask_at == at:
                ledger.touched[turn] = None
        chosen: list[OpenTurn] = []
        signals = 0
        for turn in ledger.touched:
            entry = ledger.open[turn]
            signals += len(entry.said)
            if len(chosen) == ROUND_TURNS or (chosen and signals > ROUND_SIGNALS):
                break
            chosen.append(entry)
        return sorted(chosen, key=lambda entry: entry.facts.seq)

    async def rows(
        self, asker: Asker, ledger: TurnLedger, due: Sequence[OpenTurn], now: float, upto: Cursor
    ) -> tuple[list[Row], bool]:
        """Return the rows to write about these turns, and whether all of them could be asked about.

        A turn stays due until a row about it has been read, unless the function returned `Pending`.

        The turns of a world are decided by their rollouts' verdicts (`verdict`); the function is not called for them.

        Raises BadConfig, Unloadable.
        """
        questions = await self._requests([(entry.facts.id, entry.facts.tenant, entry.said) for entry in due], now)
        asked = [
            question
            for entry, question in zip(due, questions, strict=True)
            if question is not None and not entry.facts.world
        ]
        answers = iter(await asker.ask(asked) if asked else [])
        rows: list[Row] = []
        complete = True
        for entry, question in zip(due, questions, strict=True):
            if question is None:
                rows.append(Quarantine(turn=entry.facts.id, reason=GONE, at=now, upto=upto))
                continue
            answer = self._world_answer(ledger, entry, question) if entry.facts.world else next(answers)
            if answer is None:
                complete = False
                continue
            decided = self._decide(ledger, entry, question, answer)
            if isinstance(decided, Reward):
                rows.append(replace(self._predicted(ledger, entry, question, decided), upto=upto))
            elif isinstance(decided, str):
                rows.append(Quarantine(turn=entry.facts.id, reason=decided, at=now, upto=upto))
            else:
                ledger.touched.pop(entry.facts.id)
                entry.ask_at = decided.until
                heapq.heappush(self._later, (decided.until, entry.facts.seq, entry.facts.id))
        return rows, complete

    def given_up(self, ledger: TurnLedger, now: float, upto: Cursor) -> list[Row]:
        """Return quarantines of the turns whose time is up, for when the function cannot be called for every due turn."""
        late = (entry.facts for entry in ledger.open.values() if self._last_time(entry.facts) <= now)
        return [Quarantine(turn=facts.id, reason=UNASKED, at=now, upto=upto) for facts in late]

    def _predicted(self, ledger: TurnLedger, entry: OpenTurn, question: RewardRequest, reward: Reward) -> Reward:
        """Replace a reward's value by its predicted late reward, if that is still to come."""
        facts, late = entry.facts, self._config.surrogate
        if self._late is None or facts.world or reward.at >= facts.ended_at + late.truth_after_s:
            return reward
        early = early_values(reward, facts.ended_at, question.signals, late.signals)
        return ledger.surrogate.predicted(facts.tenant, reward, early, self._config.max_abs)

    async def late_rewards(self, ledger: TurnLedger, now: float) -> tuple[list[Signal], bool]:
        """Return the next known late rewards, as signals to write, and whether there may be more to ask for now.

        Raises BadConfig, Unloadable.
        """
        if self._late is None:
            return [], False
        settled, awaited = now - self._config.settle_s, ledger.surrogate.awaited
        self._late_at = {turn: at for turn, at in self._late_at.items() if turn in awaited}
        due: list[tuple[str, str, Sequence[SignalRef]]] = []
        for entry in awaited.values():
            at = entry.ended_at + self._config.surrogate.truth_after_s
            if len(due) == ROUND_TURNS or sum(len(said) for _, _, said in due) > ROUND_SIGNALS:
                break
            if max(at, self._late_at.get(entry.turn, at)) <= settled:
                due.append((entry.turn, entry.person[0], entry.said))
        asked = [each for each in await self._requests(due, now) if each is not None]
        answers = dict(zip((each.turn.id for each in asked), await self._late.ask(asked) if asked else [], strict=True))
        found: list[Signal] = []
        for turn, tenant, _ in due:
            self._late_at[turn] = settled + LATE_AGAIN_S
            answer = answers.get(turn, NoReward(reason=GONE))
            if isinstance(answer, Pending):
                last = awaited[turn].ended_at + self._config.longest_wait_s
                if settled < last:
                    self._late_at[turn] = min(answer.until, last)
                    continue
                answer = NoReward(reason="pending")
            if answer is None:
                del self._late_at[turn]
            else:
                found.append(_late_signal(turn, tenant, answer, now))
        return found, bool(due) and None not in answers.values()

    def _world_answer(self, ledger: TurnLedger, entry: OpenTurn, question: RewardRequest) -> Answer:
        """Return the answer about a rollout's turn: its verdict, or NoReward if its group ended without one."""
        found = verdict(question.turn, question.signals)
        if isinstance(found, Pending):
            return NoReward(reason=TORN) if entry.facts.unit in ledger.closed else found
        return checked(found, question, self._config.max_abs)

    def _last_time(self, facts: TurnFacts) -> float:
        """Return the time by which a turn's reward must be known."""
        return facts.ended_at + self._config.longest_wait_s

    def _decide(
        self, ledger: TurnLedger, entry: OpenTurn, question: RewardRequest, answer: Answer
    ) -> Reward | Pending | str:
        """Return a reward, when to ask again, or the reason why there is no reward."""
        facts, now = entry.facts, question.now
        if isinstance(answer, Failure):
            return answer.reason
        if isinstance(answer, Pending):
            last = self._last_time(facts)
            return Pending(until=min(answer.until, last)) if now < last else "pending: reward.longest_wait_s is over"
        if not (entry.proven or facts.world):
            known_by = facts.ended_at + self._config.delivery_s
            return Pending(until=known_by) if now < known_by else UNDELIVERED
        if not entry.said and ledger.alarms.silenced(facts.tenant):
            return "coverage"
        if isinstance(answer, NoReward):
            return f"world:{answer.reason}" if facts.world else f"no_reward:{answer.reason}"
        return answer

    async def _requests(
        self, due: Sequence[tuple[str, str, Sequence[SignalRef]]], now: float
    ) -> list[RewardRequest | None]:
        """Return the request for each turn, given with its tenant and signals; None for a turn that is no longer in the log."""
        turns = {turn.id: turn for turn in await self._log.find(Turn, [(id,) for id, _, _ in due])}
        wanted = [(tenant, signal) for _, tenant, each in due for _, signal, _, _ in each]
        said = {(signal.tenant, signal.id): signal for signal in await self._log.find(Signal, wanted)}
        found: list[RewardRequest | None] = []
        for id, tenant, each in due:
            turn = turns.get(id)
            theirs = tuple(said[tenant, signal] for _, signal, _, _ in each if (tenant, signal) in said)
            found.append(
                None if turn is None else RewardRequest(turn=turn, signals=theirs, now=now - self._config.settle_s)
            )
        return found


def _late_signal(turn: str, tenant: str, answer: Reward | NoReward | Failure, now: float) -> Signal:
    """Convert the late function's answer about a turn to a signal."""
    name, value = NO_LATE_REWARD, 0.0
    if isinstance(answer, Reward):
        name, value = LATE_REWARD, answer.value
    elif isinstance(answer, Failure):
        logger.warning("the late reward of turn %s: %s", turn, answer.reason)
        name = LATE_REWARD_FAILED
    return Signal(
        id=late_id(turn),
        turn=turn,
        name=name,
        value=value,
        source=Source.CODE,
        occurred_at=now,
        received_at=now,
        tenant=tenant,
    )
