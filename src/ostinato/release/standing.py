"""The standing watch, fed from the log: compares live, whatever version that is, with the users who stay on the verified release."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ostinato.core.records import Arm, Person, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.release.config import ReleaseConfig
from ostinato.release.ledger import State
from ostinato.release.metrics.metric import metrics_of, wanted
from ostinato.release.metrics.reactions import Reacted, Reactions
from ostinato.release.pace.brakes import DAY
from ostinato.release.trial.contrast import Slot
from ostinato.release.trial.standing import Standing, StandingWatch
from ostinato.release.trial.tally import POOLED, SlotTally

_EXPECTED = 0.5
"""The value expected of every person, since nothing is known about new ones. It cancels in the difference, as both arms have it."""


class RunningStanding:
    """Adds up time slots. After a restart they are read again from the log, as far back as `release.outcomes.window` reaches.

    It compares by the first declared goal, if that has no quantile.
    """

    def __init__(self, log: Log, config: ReleaseConfig) -> None:
        self._log = log
        self._config = config
        self._goal = metrics_of(config.metrics, config.trial.margin)[0]
        self._key: tuple[str, float] | None = None
        self._shipped_at = -math.inf
        self._reactions: Reactions | None = None
        self._watch = StandingWatch(config.standing, most_turns_a_day=config.trial.most_turns_a_day)
        self._people: dict[Person, int] = {}
        self._upto = -math.inf

    async def look(self, state: State, after: Cursor, now: float) -> Standing | None:
        """The result after the slots that are over; None if none has ended since the last look.

        `state` names the verified release; `after` is the place in the log of the line that began the comparison with it.
        """
        key = state.verified[-1].hash, state.verified_at
        if self._key != key:
            await self._begin(state.verified_at, after, now)
            self._key = key
        assert self._reactions is not None
        found: Standing | None = None
        slot_s = self._config.trial.slot_s
        while (end := self._upto + slot_s) + self._config.outcomes.maturity_s <= now:
            if self._shipped_at != state.shipped_at and end - slot_s >= state.shipped_at:
                self._watch.shipped(end - slot_s)
                self._shipped_at = state.shipped_at
            if self._watch.over(end):
                self._people = {}
            # turns dropped because too many wait are left out
            await self._reactions.refresh(end + self._config.outcomes.maturity_s)
            taken = self._reactions.take(end)
            own = taken if self._shipped_at == state.shipped_at else ()
            found = self._watch.add(self._slot(taken, state, end), end, self._slot(own, state, end, newest=True))
            self._upto = end
        return found

    async def _begin(self, since: float, after: Cursor, now: float) -> None:
        """Start with the period that is under way: earlier periods were decided on in their time."""
        standing, slot_s = self._config.standing, self._config.trial.slot_s
        periods = math.floor((now - self._config.outcomes.maturity_s - since) / standing.period_s)
        began = since + max(periods, 0) * standing.period_s
        # the slot that ends with a period belongs to the next one
        self._upto = since if began == since else began - slot_s
        window = await self._log.before_last(self._config.outcomes.window, Turn)
        self._reactions = Reactions(self._log, self._config.outcomes, wanted((self._goal,)), max(after, window))
        await self._reactions.refresh(self._upto)
        self._reactions.take(self._upto)
        self._watch = StandingWatch(standing, most_turns_a_day=self._config.trial.most_turns_a_day)
        self._watch.restart(began if began == since else began - standing.period_s)
        self._shipped_at = -math.inf
        self._people = {}

    def _slot(self, taken: Sequence[Reacted], state: State, end: float, *, newest: bool = False) -> Slot:
        """One slot's tallies; with `newest`, the live arm has only the version that is live now."""
        assert state.live is not None
        tally, maturity_s = SlotTally(), self._config.outcomes.maturity_s
        for each in taken:
            if not each.dealt:
                continue
            treated = each.arm is Arm.LIVE and (not newest or each.policy in (state.live.hash, ""))
            stays = each.arm is Arm.VERIFIED and each.policy in (state.verified[-1].hash, "")
            measured = self._goal.measure(each.known(end + maturity_s)) if treated or stays else None
            if measured is None:
                continue
            if self._goal.sign < 0:
                measured = measured[1] - measured[0], measured[1]
            person = self._people.setdefault(each.person, len(self._people))
            tally.add(POOLED, person, treated, measured, _EXPECTED)
        return tally.slot(int(end // DAY))
