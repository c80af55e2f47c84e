"""The trial that the ledger names, fed from the log: who is compared with whom, in which slots, under which shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ostinato.core.records import Arm, Person, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.release.outcome_config import OutcomeConfig
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.contrast import Slot
from ostinato.release.trial.reactions import Reacted, Reactions
from ostinato.release.trial.record import TrialRecord
from ostinato.release.trial.trial import Trial
from ostinato.release.trial.verdict import Decision

SUCCESS = "success rate"
_DAY = 86_400.0
_REMEMBERED_S = 7 * _DAY
_SHRINK = 6.0  # turns of an average user that a user's own past is mixed with


class RunningTrial:
    """Adds up the slots of the ledger's trial. A restarted one reads the log from the trial's start and comes to the same numbers."""

    def __init__(self, log: Log, outcomes: OutcomeConfig, config: TrialConfig) -> None:
        self._log = log
        self._outcomes = outcomes
        self._config = config
        self._reactions: Reactions | None = None
        self._past: dict[Person, tuple[float, float, float]] = {}  # when last seen, turns with an outcome, good ones
        self._record: TrialRecord | None = None
        self._trial: Trial | None = None
        self._upto = -math.inf
        self._people: dict[Person, int] = {}
        self._expected: dict[Person, float] = {}
        self._usual = 0.5

    async def first_share(self, now: float) -> float:
        """What the next trial should begin with, by how many users came in the last day."""
        await self._read()
        return Trial(self._config, active=self._active(now)).share

    async def look(self, record: TrialRecord, after: Cursor, now: float) -> Decision | None:
        """What follows from the slots that are over, or None if none has ended since the last look.

        `after` is the place in the log of the trial's first line.
        """
        if self._record is None or (self._record.salt, self._record.began) != (record.salt, record.began):
            await self._begin(record, after)
        self._record = record
        assert self._trial is not None
        await self._read()
        ended = 0
        while (end := self._next_end(record)) + self._outcomes.maturity_s <= now:
            self._add(record, self._take(end), end)
            self._upto = end
            ended += 1
        self._trial.share, self._trial.shipped, self._trial.better = record.shares[-1][1], record.shipped, record.better
        self._trial.require = record.require
        return self._trial.look(self._upto - record.began) if ended else None

    async def _begin(self, record: TrialRecord, after: Cursor) -> None:
        """What happened before it began is the past that users are judged by."""
        if self._reactions is None:
            window = await self._log.before_last(self._outcomes.window, Turn)
            self._reactions = Reactions(self._log, self._outcomes, min(after, window))
        await self._read()
        self._take(record.began)
        self._past = {who: past for who, past in self._past.items() if past[0] > record.began - _REMEMBERED_S}
        turns = sum(past[1] for past in self._past.values())
        self._usual = sum(past[2] for past in self._past.values()) / turns if turns else 0.5
        self._expected = {
            who: (good + _SHRINK * self._usual) / (count + _SHRINK) for who, (_, count, good) in self._past.items()
        }
        self._people, self._upto = {}, record.began
        self._trial = Trial(
            self._config, active=self._active(record.began), guardrails={SUCCESS: self._config.failures}
        )

    async def _read(self) -> None:
        if self._reactions is None:
            window = await self._log.before_last(self._outcomes.window, Turn)
            self._reactions = Reactions(self._log, self._outcomes, window)
        for reacted in await self._reactions.refresh():
            self._remember(reacted)

    def _take(self, until: float) -> list[Reacted]:
        assert self._reactions is not None
        taken = self._reactions.take(until)
        for reacted in taken:
            self._remember(reacted)
        return taken

    def _remember(self, reacted: Reacted) -> None:
        seen, turns, good = self._past.get(reacted.person, (0.0, 0.0, 0.0))
        known = reacted.good is not None
        self._past[reacted.person] = (max(seen, reacted.ended_at), turns + known, good + bool(reacted.good))

    def _active(self, now: float) -> float:
        assert self._reactions is not None
        lately = {who for who, past in self._past.items() if past[0] > now - _DAY}
        return float(len(lately | self._reactions.people()))

    def _next_end(self, record: TrialRecord) -> float:
        """A slot ends on the grid, or where a new share came into force: within a slot the shares are one."""
        grid = record.began + self._config.slot_s * (math.floor((self._upto - record.began) / self._config.slot_s) + 1)
        return min([grid, *(at for at, _ in record.shares if at > self._upto)])

    def _add(self, record: TrialRecord, taken: Sequence[Reacted], end: float) -> None:
        assert self._trial is not None
        shipped = record.shipped and end > record.shares[-1][0]
        # the same two versions all the way: before it ships the candidate is the canary, afterwards what it replaced is `previous`
        arms = (Arm.LIVE, Arm.PREVIOUS) if shipped else (Arm.CANARY, Arm.LIVE)
        sides = {(arms[0], record.candidate.hash): True, (arms[1], record.against.hash): False}
        failed = {(arms[0], ""): True, (arms[1], ""): False}
        goal, success = _Tally(), _Tally()
        for reacted in taken:
            side = sides.get((reacted.arm, reacted.policy), failed.get((reacted.arm, reacted.policy)))
            if side is None:
                continue
            person = self._people.setdefault(reacted.person, len(self._people))
            success.add(person, side, not reacted.failed, 1.0)
            if reacted.good is not None:
                goal.add(person, side, reacted.good, self._expected.get(reacted.person, self._usual))
        day = int(end // _DAY)
        self._trial.share = record.share(end)
        self._trial.add(goal.slot(day), {SUCCESS: success.slot(day)})


class _Tally:
    """One slot's turns and outcomes, by person and side."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, bool], list[float]] = {}

    def add(self, person: int, treated: bool, good: bool, expected: float) -> None:
        row = self._rows.setdefault((person, treated), [0.0, 0.0, expected])
        row[0] += 1.0
        row[1] += good

    def slot(self, day: int) -> Slot:
        numbers = np.array(list(self._rows.values()), dtype=np.float64).reshape(-1, 3)
        return Slot(
            day=day,
            people_R=np.array([person for person, _ in self._rows], dtype=np.int64),
            turns_R=numbers[:, 0],
            good_R=numbers[:, 1],
            expected_R=numbers[:, 2],
            treated_R=np.array([treated for _, treated in self._rows], dtype=np.bool_),
        )
