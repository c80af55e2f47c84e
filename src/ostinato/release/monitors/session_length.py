"""Session length: whether people's sessions on live have more or fewer turns than those on control or on the previous release.

A model that ends each answer with a bait for the next, or takes three turns for what took one, keeps every behaviour rate in range and may
please every rater (time spent as a proxy for value; Hohnhold et al., KDD 2015). Longer sessions may also be better ones, so the alarm also
reports how many positive rewards a session brings.

The comparison is between means of the logarithm of a session's turns, so that one endless session of a program does not dominate, and a
difference is relative. People are the clusters, as in trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from ostinato.core.notices import Alarm, Forgotten
from ostinato.core.records import Arm, Purpose, ReleaseEvent, Reward, Turn
from ostinato.release.monitors.active_alarms import GapAlarm
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.influence import Owner
from ostinato.release.monitors.proxy_gap import LEAST_PEOPLE, PersonCrowd, dealt_by_chance, person_difference
from ostinato.release.trial.contrast import lower_bound, upper_bound

SESSION_LENGTH = "session_length"
"""Name of the alarm that sessions on live have more or fewer turns than sessions on control."""

SESSION_LENGTH_PREVIOUS = "session_length:previous"
"""The same against the previous release."""

TOLERATED = 0.02
"""The tolerated difference of the mean logarithm of a session's turns: two per cent."""

_NAMES = {Arm.CONTROL: SESSION_LENGTH, Arm.PREVIOUS: SESSION_LENGTH_PREVIOUS}
_LEAST_EACH = 8.0  # least effective people on either side: fewer may be alike by chance, and their variance too small
_LONGEST = math.log(256.0)  # of a session's turns; logarithms are compared as shares of it
_ALONGSIDE_S = 6 * 3_600.0  # live's sessions count if they begin within this time after a turn of the other arm


@dataclass(slots=True)
class _Sessions:
    """A person's sessions, on live if `treated`, else on the other arm.

    `over`: the number of finished sessions; `logs`: the sum of their logarithms. `turns` and `last`: the turns and the end of the session
    that may go on. `good`: the number of positive rewards.
    """

    treated: bool
    over: float = 0.0
    logs: float = 0.0
    turns: float = 0.0
    last: float = -math.inf
    good: float = 0.0

    @property
    def count(self) -> float:
        return self.over + (self.turns > 0.0)

    @property
    def total(self) -> float:
        """The sum of the logarithms, as shares of `_LONGEST`, the open session included with its turns so far."""
        return self.logs + min(math.log(max(self.turns, 1.0)) / _LONGEST, 1.0)

    def visit(self, turn: Turn, pause_s: float, most: int) -> None:
        """Count a turn of the open session or of a new one, unless that is more than `most`."""
        if turn.started_at - self.last > pause_s:
            if self.count >= most:
                return
            self.over, self.logs, self.turns = self.count, self.total, 0.0
        self.turns += 1.0
        self.last = turn.ended_at


class SessionLengthWatch:
    """The monitor of session length: turns, rewards and releases in, alarms out.

    Live's people are compared with control's, who are counted anew after a week (`gold_s`), and with those who stayed on the previous
    release, who are also counted anew with each release. They are compared hourly, by bounds that hold at all looks. The probability of a
    false alarm within such a week is at most `gold_alpha`: each comparison has half of it, each direction half of that. A person counts on
    the side of their first turn in a period, with no more than `turns_a_day` sessions. Each comparison has an alarm of its own, and a
    difference that a person accepts is tolerated for that comparison and direction alone. The alarms pause nothing.
    """

    def __init__(self, config: MonitorsConfig) -> None:
        self._config = config
        self.gaps = {arm: GapAlarm(name, TOLERATED) for arm, name in _NAMES.items()}
        self._crowds = {arm: PersonCrowd[_Sessions](config.most_people) for arm in _NAMES}
        self._seen: dict[Arm, float] = {}  # by arm, its last turn in the current period
        self._alpha = config.gold_alpha / 4.0
        self._alphas = {Arm.CONTROL: self._alpha, Arm.PREVIOUS: self._alpha / 2.0}
        self._began = 0.0  # of the current period of the comparison with `previous`

    @property
    def standing(self) -> list[str]:
        """The names of the raised alarms."""
        return [name for gap in self.gaps.values() for name in gap.standing]

    def begin(self, alarms: Mapping[str, Alarm]) -> None:
        """Begin without a saved state: an alarm raised in the log is raised for the difference that it reported."""
        for gap in self.gaps.values():
            gap.begin(alarms)
            for name in gap.standing:
                gap.last = math.log1p(float(alarms[name].detail.get("difference", 0.0)))

    def turn(self, turn: Turn) -> Iterator[Alarm]:
        """Process a person's turn; yield alarms.

        People who were not assigned to their arm at random are left out, as are turns that Auto routed, whose shares follow the reward.
        """
        at = turn.ended_at
        if not self._config.enabled:
            for gap in self.gaps.values():
                yield from gap.end("nothing is watched any more (release.monitors.enabled)", at)
            return
        if turn.purpose is not Purpose.TASK or not dealt_by_chance(turn):
            return
        for arm, gap in self.gaps.items():
            if gap.lasted(at) >= self._config.gold_s:
                yield from gap.anew(at)
                self._anew(arm, at)
        self._visit(turn)
        for arm, gap in self.gaps.items():
            if gap.look_due(at):
                yield from self._look(arm, at)

    def reward(self, row: Reward, owner: Owner | None) -> None:
        """Count a reward, with the owner of its turn."""
        if owner is None or owner.auto or row.value <= 0.0:
            return
        for crowd in self._crowds.values():
            known = crowd.known(owner.person)
            if known is not None and known.treated is owner.live:
                known.good += 1.0

    def release(self, event: ReleaseEvent) -> None:
        """Process a line of the ledger: when live moves, the previous release changes as well."""
        if event.action in ("shipped", "rolled_back"):
            self._anew(Arm.PREVIOUS, event.at)

    def alarm(self, row: Alarm) -> None:
        """Apply a person's acceptance of the difference that was found last. Other rows are ignored."""
        for gap in self.gaps.values():
            gap.accepted(row)

    def forget(self, row: Forgotten) -> None:
        """Drop a person's sessions."""
        for crowd in self._crowds.values():
            crowd.forget(row)

    def _visit(self, turn: Turn) -> None:
        at = turn.ended_at
        if turn.arm in self._crowds:
            self._seen[turn.arm] = at
        for arm, crowd in self._crowds.items():
            beside = turn.arm is Arm.LIVE and at - self._seen.get(arm, -math.inf) <= _ALONGSIDE_S
            known = (
                crowd.get(turn.person, lambda: _Sessions(turn.arm is Arm.LIVE)) if beside or turn.arm is arm else None
            )
            if known is not None and known.treated is (turn.arm is Arm.LIVE):
                known.visit(turn, self._config.session_pause_s, self._config.turns_a_day)

    def _anew(self, arm: Arm, at: float) -> None:
        self._crowds[arm].clear()
        self._seen.pop(arm, None)
        if arm is Arm.PREVIOUS:
            # half of the level times the part of a week that the last period took: the periods that begin in one week share the level
            lasted = min(1.0, max((at - self._began) / self._config.gold_s, 1e-4))
            self._alphas[arm], self._began = self._alpha / 2.0 * lasted, at

    def _look(self, arm: Arm, at: float) -> Iterator[Alarm]:
        gap, crowd = self.gaps[arm], self._crowds[arm]
        live = {person for person, each in crowd if each.treated}
        sums = {person: (each.total, each.count) for person, each in crowd}
        effect, *people = person_difference(sums, live.__contains__)
        if effect.freedom < LEAST_PEOPLE or effect.people < _LEAST_EACH:
            return
        lower, upper = (
            bound(effect.difference, effect.variance, self._alphas[arm]) * _LONGEST
            for bound in (lower_bound, upper_bound)
        )
        difference = effect.difference * _LONGEST
        if (lower > gap.tolerated or upper < -gap.tolerated_below) and gap.find(difference):
            yield self._raised(arm, math.expm1(difference), people, at)

    def _raised(self, arm: Arm, more: float, people: list[int], at: float) -> Alarm:
        sides = [[each for _, each in self._crowds[arm] if each.treated is side] for side in (True, False)]
        good = [sum(each.good for each in side) / sum(each.count for each in side) for side in sides]
        reason = (
            f"sessions of {people[0]} people on live have {abs(more):.0%} {'more' if more > 0 else 'fewer'} turns than those of "
            f"{people[1]} on {arm}, with {good[0]:.2f} positive rewards a session against {good[1]:.2f}: they are drawn out, or cut "
            "short, or the model is used for something else"
        )
        detail = {"difference": more, "against": arm.value, "live": people[0], "others": people[1]}
        return self.gaps[arm].raised(reason, at, detail | {"positive_rewards": good, "pauses": False})

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "crowds": {
                arm: [[*person, *astuple(each)] for person, each in crowd] for arm, crowd in self._crowds.items()
            },
            "seen": self._seen,
            "alphas": self._alphas,
            "began": self._began,
            "gaps": {arm: gap.snapshot() for arm, gap in self.gaps.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        for arm, crowd in self._crowds.items():
            crowd.clear()
            for tenant, user, treated, *sums in state["crowds"][arm]:
                crowd.put((str(tenant), str(user)), _Sessions(bool(treated), *map(float, sums)))
        self._seen = {Arm(arm): float(at) for arm, at in state["seen"].items()}
        self._alphas = {Arm(arm): float(alpha) for arm, alpha in state["alphas"].items()}
        self._began = float(state["began"])
        for arm, gap in self.gaps.items():
            gap.restore(state["gaps"][arm])
