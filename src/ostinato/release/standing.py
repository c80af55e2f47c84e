"""The standing watch, fed from the log: live, whichever version it is by then, beside the users who stay on the verified release."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ostinato.core.records import Arm, Person, PolicyVersion, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.release.config import ReleaseConfig
from ostinato.release.pace.brakes import DAY
from ostinato.release.trial.contrast import Slot
from ostinato.release.trial.reactions import Reacted, Reactions
from ostinato.release.trial.standing import Standing, StandingWatch

_EXPECTED = 0.5
"""Of everybody: nothing is known of who is new. It cancels out of the difference where both arms have it."""


class RunningStanding:
    """Adds up slots of time. A restarted one reads them again from the log, as far back as `release.outcomes.window` reaches."""

    def __init__(self, log: Log, config: ReleaseConfig) -> None:
        self._log = log
        self._config = config
        self._key: tuple[str, float] | None = None
        self._reactions: Reactions | None = None
        self._watch = StandingWatch(config.standing, most_turns_a_day=config.trial.most_turns_a_day)
        self._people: dict[Person, int] = {}
        self._upto = -math.inf

    async def look(self, verified: PolicyVersion, since: float, after: Cursor, now: float) -> Standing | None:
        """What is known by the slots that are over; None if none has ended since the last look.

        `since` is when the comparison with this version began, `after` the place in the log of the line that began it.
        """
        if self._key != (verified.hash, since):
            await self._begin(since, after, now)
            self._key = (verified.hash, since)
        assert self._reactions is not None
        # what overflows is too old to be waited for, and is left out
        await self._reactions.refresh()
        found: Standing | None = None
        while (end := self._upto + self._config.trial.slot_s) + self._config.outcomes.maturity_s <= now:
            found = self._watch.add(self._slot(self._reactions.take(end), verified, end), end)
            self._upto = end
        return found

    async def _begin(self, since: float, after: Cursor, now: float) -> None:
        """From the period that is under way: what came before it was decided on then."""
        standing, slot_s = self._config.standing, self._config.trial.slot_s
        periods = math.floor((now - self._config.outcomes.maturity_s - since) / standing.period_s)
        began = since + max(periods, 0) * standing.period_s
        # the slot that ends with a period belongs to the next one
        self._upto = since if began == since else began - slot_s
        window = await self._log.before_last(self._config.outcomes.window, Turn)
        self._reactions = Reactions(self._log, self._config.outcomes, max(after, window))
        await self._reactions.refresh()
        self._reactions.take(self._upto)
        self._watch = StandingWatch(standing, most_turns_a_day=self._config.trial.most_turns_a_day)
        self._watch.restart(began if began == since else began - standing.period_s)
        self._people = {}

    def _slot(self, taken: Sequence[Reacted], verified: PolicyVersion, end: float) -> Slot:
        rows: dict[tuple[int, bool], list[float]] = {}
        for reacted in taken:
            treated = reacted.arm is Arm.LIVE
            stays = reacted.arm is Arm.VERIFIED and reacted.policy == verified.hash
            if reacted.good is None or not (treated or stays):
                continue
            person = self._people.setdefault(reacted.person, len(self._people))
            row = rows.setdefault((person, treated), [0.0, 0.0])
            row[0] += 1.0
            row[1] += reacted.good
        numbers = np.array(list(rows.values()), dtype=np.float64).reshape(-1, 2)
        return Slot(
            day=int(end // DAY),
            people_R=np.array([person for person, _ in rows], dtype=np.int64),
            turns_R=numbers[:, 0],
            good_R=numbers[:, 1],
            expected_R=np.full(len(rows), _EXPECTED),
            treated_R=np.array([treated for _, treated in rows], dtype=np.bool_),
        )
