"""What the log says about every turn: a fold over its rows, in order, that a restart repeats exactly.

Two things are kept apart. A turn's *reward* is what people thought of it. Its *outcome* is what became of it: trained on, or
held back for a recorded reason. Rewards are made for every turn that a person was served and the policy ended, the control arm
included, because releases are judged by them; a turn that was cut short or drawn by an evaluation gets none. Every turn gets
exactly one outcome, and until then it is waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.core.errors import Corrupt
from ostinato.core.lineage import Lineage
from ostinato.core.records import Arm, Batch, Holdback, Reward, Row, Signal, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.reward.credit import Baseline

TRAINED = "trained"
LEARNING_ARMS = frozenset({Arm.LIVE, Arm.CANARY})


def needs_reward(turn: Turn) -> bool:
    """True if a person was served this turn and the policy itself ended it."""
    return turn.finish.trainable and turn.arm is not Arm.EVAL


def untrainable(turn: Turn) -> str | None:
    """Why a turn can never be trained on, known from the turn alone; None if it can. The first reason that applies is given.

    ``finish:<x>``: cut by something other than the policy. ``arm:<x>``: control and evaluation teach nothing. ``empty``: nothing
    was sampled. ``greedy``: temperature 0 explores nothing, and the log-probabilities are not those of the choice made.
    """
    if not turn.finish.trainable:
        return f"finish:{turn.finish}"
    if turn.arm not in LEARNING_ARMS:
        return f"arm:{turn.arm}"
    if not turn.sampled_ids:
        return "empty"
    return "greedy" if turn.sampling.temperature == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarded:
    """A turn whose reward is known and whose outcome is open, with its place in the log."""

    seq: Cursor
    turn: Turn
    reward: Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Where every turn stands: ``ingested == trained + sum(held.values()) + waiting``, each counted for itself.

    `held` maps a reason, up to its first ": ", to a number of turns. `rewarded` counts reward rows, whatever the outcome.

    Example: ``Accounting(ingested=5, trained=2, held={"arm:control": 1, "finish:abort": 1}, waiting=1, rewarded=4)``
    """

    ingested: int
    trained: int
    held: Mapping[str, int]
    waiting: int
    rewarded: int

    @property
    def balanced(self) -> bool:
        """Every turn is counted once."""
        return self.ingested == self.trained + sum(self.held.values()) + self.waiting


async def account(log: Log) -> Accounting:
    """Count the whole log afresh, by sets of ids that know nothing of how the desk decides."""
    served: set[str] = set()
    trained: list[str] = []
    held: dict[str, str] = {}
    rewarded = 0
    async for _, row in log.read(0, {Turn, Batch, Holdback, Reward}):
        if isinstance(row, Turn):
            served.add(row.id)
        elif isinstance(row, Batch):
            trained.extend(row.turns)
        elif isinstance(row, Holdback):
            held[row.turn] = row.reason.partition(": ")[0]
        else:
            rewarded += 1
    return Accounting(
        ingested=len(served),
        trained=len(trained),
        held=dict(sorted(Counter(held.values()).items())),
        waiting=len(served.difference(trained, held)),
        rewarded=rewarded,
    )


class TurnLedger:
    """The open turns and the baseline, as the rows seen so far leave them. `apply` rows in the order of the log."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.last_batch: Batch | None = None
        self.lineage = Lineage()
        self.to_hold: dict[str, str] = {}  # turn -> reason: outcome due, not yet in the log
        self.unrewarded: dict[str, Turn] = {}  # reward due, not yet in the log
        self.matured: dict[str, Rewarded] = {}  # reward known, outcome open
        self._signals: dict[str, list[Signal]] = defaultdict(list)
        self._seqs: dict[str, Cursor] = {}  # of unrewarded turns
        self._known: set[str] = set()
        self._outcomes: dict[str, str] = {}

    def apply(self, seq: Cursor, row: Row) -> None:
        """Take in one row. Raises Corrupt if the log contradicts itself: a turn trained on twice, or without a reward."""
        match row:
            case Turn():
                self._turn(seq, row)
            case Signal():
                # What comes after the reward stays in the log only; what comes before its turn waits for it.
                if row.turn in self.unrewarded or row.turn not in self._known:
                    self._signals[row.turn].append(row)
            case Reward():
                self._reward(row)
            case Holdback():
                self._settle(row.turn, row.reason)
                self.matured.pop(row.turn, None)
            case Batch():
                self._batch(row)
            case _:
                pass

    def signals(self, turn: str) -> list[Signal]:
        """What is known about an unrewarded turn, in order of arrival."""
        return self._signals.get(turn, [])

    def _turn(self, seq: Cursor, turn: Turn) -> None:
        self._known.add(turn.id)
        reason = untrainable(turn)
        if reason is not None and turn.id not in self._outcomes:
            self.to_hold[turn.id] = reason
        if needs_reward(turn):
            self.unrewarded[turn.id] = turn
            self._seqs[turn.id] = seq
        else:
            self._signals.pop(turn.id, None)

    def _reward(self, reward: Reward) -> None:
        turn = self.unrewarded.pop(reward.turn, None)
        self._signals.pop(reward.turn, None)
        if turn is None:
            return
        seq = self._seqs.pop(turn.id)
        if turn.id not in self._outcomes and turn.id not in self.to_hold:
            self.matured[turn.id] = Rewarded(seq=seq, turn=turn, reward=reward)

    def _batch(self, batch: Batch) -> None:
        for turn_id in batch.turns:
            entry = self.matured.pop(turn_id, None)
            if entry is None:
                state = self._outcomes.get(turn_id, "without a reward")
                raise Corrupt(f"the log's batch {batch.step} holds turn {turn_id}, which is {state}; restore the log")
            self._settle(turn_id, TRAINED)
            self.baseline.observe(entry.turn, entry.reward.value)
        if batch.base is not None:
            self.lineage = Lineage(first=batch.step, base=batch.base.number)
        self.last_batch = batch

    def _settle(self, turn_id: str, outcome: str) -> None:
        self._outcomes[turn_id] = outcome
        self.to_hold.pop(turn_id, None)
