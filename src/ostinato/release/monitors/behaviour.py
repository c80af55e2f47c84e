"""The monitor of behaviour: turns in, alarms out. Pure.

    turn -> rates -> session of one person -> expected range -> detectors -> alarm

An alarm is about one rate on one arm. It stands until every group of people in which the rate had shifted is back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm, ReleaseEvent, Turn
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.detection.detector import Detector, Shifted, thresholds
from ostinato.release.monitors.detection.expecting import JUDGED, Expecting, Role
from ostinato.release.monitors.detection.sessions import Activity, OpenSessions, TurnSession
from ostinato.release.monitors.detection.standing import ACCEPTED, StandingShifts, alarm_name, is_about_a_rate
from ostinato.release.monitors.rates import Rate, measured
from ostinato.release.monitors.turn_text import take_apart

REFERENCE = "monitor:reference"
ANONYMOUS = "anonymous"
"""The user of turns that the gateway serves without a name: many people; each of their conversations counts as one."""
_CANARY = Arm.CANARY.value
_ENDS_A_CANARY = frozenset({"canary", "awaits_approval", "shipped", "blocked", "rolled_back"})


class Behaviour:
    """The state of the behaviour monitor.

    `standing` are the alarms that stand. `failures` counts, by rate, turns on which a function raised or left [0, 1]; `turns` counts
    those that were looked at.

    Args:
        config: the settings.
        rates: the rates to watch (`loading.rates_of`).
    """

    def __init__(self, config: MonitorsConfig, rates: tuple[Rate, ...]) -> None:
        self._rates = {rate.name: rate for rate in rates}
        self._h = {
            (rate.name, everybody): thresholds(
                config.false_alarm_sessions, len(rates), rate.harmful, everybody=everybody
            )
            for rate in rates
            for everybody in (True, False)
        }
        self._comfort = math.log(config.false_comfort_sessions)
        self._least_people = config.least_people
        self._sessions = OpenSessions(
            turns=config.session_turns, pause_s=config.session_pause_s, most=config.most_sessions
        )
        self._activity = Activity(most=config.most_people, a_day=config.turns_a_day)
        self._expecting = Expecting(config)
        self._detectors: dict[str, Detector] = {}
        self._told_silent = False
        self.standing = StandingShifts()
        self.failures: dict[str, int] = {}
        self.turns = 0

    @property
    def paused(self) -> bool:
        """True while an alarm stands about a harmful shift, or control is silent, so that no shift would be seen."""
        return bool(self.standing.harmful) or (bool(self._rates) and self._expecting.blind)

    @property
    def names(self) -> list[str]:
        """The names of the alarms that stand."""
        return [*self.standing.names, *([REFERENCE] if self._told_silent else [])]

    def begin(self, alarms: Mapping[str, Alarm]) -> None:
        """Begin without a state, from the newest row about each alarm in the log, by name. Alarms that stand there stay."""
        for name, row in alarms.items():
            if row.state is AlarmState.RAISED and name == REFERENCE:
                self._told_silent = True
                self._expecting.silent(row.detail.get("arm"), blind=row.detail.get("pauses") is True)
            elif row.state is AlarmState.RAISED and is_about_a_rate(name):
                self.standing.heard(row)

    def turn(self, turn: Turn) -> Iterator[Alarm]:
        """Take in a turn; yields the alarms that it raises or clears, without ids."""
        if not turn.arm.people or turn.redacted or not turn.finish.trainable:
            return
        if not self._expecting.uses(turn.arm.value):
            return
        # people without a name are all served by live, so beside a reference arm they compare nothing, and anybody can send any number
        if turn.user == ANONYMOUS and self._expecting.arm is not None:
            return
        self.turns += 1
        for name, why in self.standing.unwatched(self._rates, JUDGED):
            yield self.standing.clear(name, why, turn.ended_at)
        person = turn.person if turn.user != ANONYMOUS else (turn.tenant, f"{ANONYMOUS} {turn.episode}")
        counts, decile = self._activity.see(person, turn.ended_at)
        if not counts:
            return
        values, failed = measured(self._rates.values(), take_apart(turn))
        for name in failed:
            self.failures[name] = self.failures.get(name, 0) + 1
        for session in self._sessions.add(person, turn.arm.value, decile, turn.id, values, turn.ended_at):
            yield from self._close(session)

    def _close(self, session: TurnSession) -> Iterator[Alarm]:
        """Learn from a finished session, or judge it."""
        role = self._expecting.see(session.arm, session.ended_at)
        silent = bool(self._rates) and self._expecting.stale
        if self._told_silent != silent:
            self._told_silent = silent
            yield self._about_the_reference(session.ended_at)
        for name, rate in self._rates.items():
            values = session.values(name)
            if not values or role is Role.UNUSED:
                continue
            mean = math.fsum(values.values()) / len(values)
            if role is Role.REFERENCE:
                self._expecting.learn(name, mean, session.decile)
                continue
            for decile in _groups(session):
                yield from self._judge(rate, decile, session, mean, values)
                if self._expecting.arm is None and session.arm == Arm.LIVE:
                    self._expecting.learn_fixed(name, mean, decile, session.ended_at)

    def _judge(
        self, rate: Rate, decile: int | None, session: TurnSession, mean: float, values: Mapping[str, float]
    ) -> Iterator[Alarm]:
        """Judge one session's mean, as one of everybody's or of its decile's."""
        expected = self._expecting.expected(rate.name, session.arm, decile)
        if expected is None:
            return
        name = alarm_name(rate.name, session.arm)
        way_back = self.standing.way_back(name, decile)
        if way_back is not None:
            if way_back.observe(mean, expected, session.ended_at, self._comfort) and self.standing.back(name, decile):
                yield self.standing.clear(name, "the rate is back where it is expected", session.ended_at)
            return
        # while everybody has shifted, a decile's shift is no news
        if decile is not None and self.standing.way_back(name, None) is not None:
            return
        detector = self._detectors.setdefault(f"{session.arm}/{rate.name}/{decile}", Detector())
        person = f"{session.tenant}/{session.user}"
        h = self._h[rate.name, decile is None]
        shifted = detector.observe(mean, values, expected, h=h, person=person, people=self._least_people)
        if shifted is not None and self.standing.add(name, decile, shifted, harmful=shifted.shift in rate.harmful):
            yield self._raise(name, rate, decile, session, shifted)

    def _raise(self, name: str, rate: Rate, decile: int | None, session: TurnSession, shifted: Shifted) -> Alarm:
        pauses = shifted.shift in rate.harmful
        who = "everybody" if decile is None else f"people in activity decile {decile + 1} of 10"
        reason = (
            f"{rate.means}: {shifted.observed:.1%} in {shifted.sessions} sessions of {who} on arm {session.arm}, where "
            f"{shifted.expected:.1%} is expected" + ("" if pauses else "; a shift this way does not pause shipping")
        )
        detail = {
            "rate": rate.name,
            "arm": session.arm,
            "decile": decile,
            "shift": shifted.shift.value,
            "pauses": pauses,
            "observed": shifted.observed,
            "reference": shifted.expected,
            "sessions": shifted.sessions,
            "events": shifted.events,
            "threshold": self._h[rate.name, decile is None][shifted.shift],
            "turns": list(shifted.turns),
        }
        return Alarm(id="", name=name, state=AlarmState.RAISED, reason=reason, at=session.ended_at, detail=detail)

    def _about_the_reference(self, at: float) -> Alarm:
        if not self._told_silent:
            why = "no silent arm is waited for any more"
            return Alarm(id="", name=REFERENCE, state=AlarmState.CLEARED, reason=why, at=at)
        arm, blind = self._expecting.arm, self._expecting.blind
        why = f"arm {arm}, which says what is usual, is silent while others are served: no behaviour is judged" + (
            "; if it is gone for good, take it out of release.monitors.reference"
            if blind
            else "; it has users only while a release is proven, so that does not pause shipping"
        )
        detail = {"arm": arm, "pauses": blind}
        return Alarm(id="", name=REFERENCE, state=AlarmState.RAISED, reason=why, at=at, detail=detail)

    def alarm(self, row: Alarm) -> None:
        """Take in a person's acceptance of a shift. All other rows about the monitors' alarms are their own."""
        if row.detail.get(ACCEPTED) is True:
            for rate, arm, decile, gap in self.standing.gaps(row.name):
                self._expecting.accept(rate, arm, decile, gap)
            self.standing.forget(row.name)

    def release(self, event: ReleaseEvent) -> Iterator[Alarm]:
        """Take in a release event. The end of a canary clears its alarms, since its arm cannot show any more that a rate is back."""
        if event.action == "shipped":
            self._expecting.shipped()
        if event.action not in _ENDS_A_CANARY:
            return
        self._detectors = {key: each for key, each in self._detectors.items() if not key.startswith(f"{_CANARY}/")}
        for name in self.standing.on_arm(_CANARY):
            yield self.standing.clear(name, f"the canary is over: {event.action} {event.policy}", event.at)

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        return {
            "sessions": self._sessions.snapshot(),
            "activity": self._activity.snapshot(),
            "expecting": self._expecting.snapshot(),
            "detectors": {key: detector.to_json() for key, detector in self._detectors.items()},
            "told_silent": self._told_silent,
            "standing": self.standing.snapshot(),
            "failures": self.failures,
            "turns": self.turns,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`, under the current settings.

        Raises AttributeError, LookupError, TypeError or ValueError for an invalid state; do not use this object then.
        """
        self._sessions.restore(state["sessions"])
        self._activity.restore(state["activity"])
        self._expecting.restore(state["expecting"])
        self._detectors = {key: Detector.from_json(each) for key, each in state["detectors"].items()}
        self._told_silent = bool(state["told_silent"])
        self.standing.restore(state["standing"])
        self.failures, self.turns = dict(state["failures"]), int(state["turns"])


def _groups(session: TurnSession) -> tuple[int | None, ...]:
    """The groups of a session: everybody, and on the live arm, if there are enough people, its decile of activity."""
    return (None,) if session.decile is None or session.arm != Arm.LIVE else (None, session.decile)
