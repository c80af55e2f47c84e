"""Compares people's outcomes when the guard says that a look is due: live against the control arm, over the same hours."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ostinato.core.records import Arm, Person, PolicyVersion
from ostinato.core.seams import Cursor
from ostinato.release.guard import Compare, GuardConfig, Harm, judge, look_due, total
from ostinato.release.ledger import State
from ostinato.release.outcomes import Outcomes
from ostinato.release.pace.brakes import DAY
from ostinato.release.pace.cadence import Traffic
from ostinato.release.side_by_side import SlotTallies, side_by_side
from ostinato.release.trial.config import HOUR

_RELEASES = 8
"""The number of newest releases whose users are counted."""

Pair = tuple[SlotTallies, Callable[[], SlotTallies]]
"""The watched tallies, and a function that counts those to compare with, called only when a look is due, which is seldom."""


class Watch:
    """Makes each look once per release; a restarted process may repeat its last one.

    Both arms are compared within time slots: an outage or a night that both arms share says nothing about a version, whatever the
    arms' shares were before and after it.

    Args:
        slot_s: how long a slot is, in seconds.
    """

    def __init__(self, outcomes: Outcomes, config: GuardConfig, compare: Compare, slot_s: float) -> None:
        self._outcomes = outcomes
        self._config = config
        self._compare = compare
        self._slot_s = slot_s
        self._looked: dict[tuple[str, float, str], int] = {}

    async def live(self, state: State, control: PolicyVersion, after: Cursor, now: float) -> Harm | None:
        """Live against control since live shipped: acceptance and engine errors, half of alpha each.

        `after` is the place in the log of the line that put it live: looks are counted from there, so a restart goes on with them.
        """
        live = state.live
        if not self._config.enabled or live is None or control.hash == live.hash:
            return None
        await self._outcomes.refresh()
        since, slot_s, outcomes = state.shipped_at, self._slot_s, self._outcomes
        pairs: dict[str, Pair] = {
            "acceptance against the control arm": (
                outcomes.acceptance_by_slot(Arm.LIVE, live, since, now, slot_s),
                lambda: outcomes.acceptance_by_slot(Arm.CONTROL, control, since, now, slot_s),
            ),
            "success rate against the control arm": (
                outcomes.success_by_slot(Arm.LIVE, live, since, now, slot_s),
                lambda: outcomes.success_by_slot(Arm.CONTROL, control, since, now, slot_s),
            ),
        }
        return self._look(live, since, self._outcomes.upto - after, pairs)

    async def traffic(self, state: State, now: float) -> Traffic | None:
        """The last day's traffic of people who may take part in trials; None before there is an hour of it.

        If the window is shorter than a day, turns are extrapolated to a day. People are not: a person who came twice would count twice.
        """
        await self._outcomes.refresh()
        since = max(now - DAY, self._outcomes.since or now)
        if now - since < HOUR:
            return None
        served: list[tuple[Arm, PolicyVersion]] = [(Arm.LIVE, release) for release in state.releases[-_RELEASES:]]
        if state.trial is not None:
            served += [(Arm.CANARY, state.trial.candidate), (Arm.PREVIOUS, state.trial.against)]
        people: set[Person] = set()
        turns, good = 0, 0.0
        for arm, policy in served:
            tally = self._outcomes.acceptance(arm, policy, since, now)
            people |= tally.keys()
            turns += total(tally)
            good += sum(value for value, _ in tally.values())
        a_day = round(turns * DAY / (now - since))
        return Traffic(people=len(people), turns=a_day, good=good / turns if turns else 0.0)

    def _look(self, policy: PolicyVersion, since: float, rows: int, pairs: Mapping[str, Pair]) -> Harm | None:
        """The harm found by the looks that are due, if any. The measures share alpha equally."""
        config = self._config.model_copy(update={"alpha": self._config.alpha / len(pairs)})
        for measure, (watched, baseline) in pairs.items():
            look = look_due(total(watched), rows, self._outcomes.window, config)
            key = policy.hash, since, measure
            if look is None or look <= self._looked.get(key, -1):
                continue
            self._looked[key] = look
            if harm := judge(measure, *side_by_side(watched, baseline()), look, config, self._compare):
                return harm
        return None
