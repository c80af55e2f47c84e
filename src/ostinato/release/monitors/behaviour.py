"""The monitor of behaviour rates: turns in, alarms out.

    turn -> rates -> session of one person -> expected range -> detectors -> alarm

An alarm is about one rate on one arm. It stays raised until the rate is back in every group of people in which it had shifted.

Turns are grouped into sessions of one person, and people into deciles of activity, in bounded memory. A session is a limited number of
turns of one person on one arm without a long pause. A person's turns in it are correlated, so the bets are on sessions and not on turns.
Only a limited number of one person's turns count per day, so that nobody moves a rate alone.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ostinato.core.arm_assignment import ANONYMOUS
from ostinato.core.notices import Alarm, AlarmState, Forgotten
from ostinato.core.records import Arm, Person, ReleaseEvent, Turn
from ostinato.release.monitors.active_alarms import ACCEPTED, RaisedShifts, alarm_name, is_about_a_rate
from ostinato.release.monitors.config import DAY, MonitorsConfig
from ostinato.release.monitors.detector import Detector, ExpectedRange, Shifted, thresholds
from ostinato.release.monitors.rates import Rate, measured
from ostinato.release.monitors.reference import ArmReference, FixedReference, Level
from ostinato.release.monitors.turn_text import take_apart

# ---------------------------------------------------------------- sessions


DECILES = 10
_DECAY_S = 7 * DAY  # time constant of the exponential decay of activity, which halves in five days
_LEAST_PEOPLE = 50  # least number of people for deciles


@dataclass(slots=True, kw_only=True)
class TurnSession:
    """Some turns of one person on one arm, with each turn's values by rate.

    Example: ``TurnSession(tenant="t", user="ann", arm="live", decile=7, ended_at=60.0, turns={"a:0": {"edit": 1.0}})``
    """

    tenant: str
    user: str
    arm: str
    decile: int | None
    ended_at: float
    turns: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def values(self, rate: str) -> dict[str, float]:
        """Return a rate's values for the turns that have one."""
        return {turn: values[rate] for turn, values in self.turns.items() if rate in values}

    def to_json(self) -> list[Any]:
        """Return the session as JSON types."""
        return [self.tenant, self.user, self.arm, self.decile, self.ended_at, self.turns]


class OpenSessions:
    """The sessions that may still grow, at most `most`.

    Args:
        turns: number of turns at which a session is closed.
        pause_s: seconds without a turn after which a session is closed, by the turns' own times.
        most: largest number of open sessions; beyond it, the one that has been silent for longest is closed.
    """

    def __init__(self, *, turns: int, pause_s: float, most: int) -> None:
        self._turns, self._pause_s, self._most = turns, pause_s, most
        self._open: OrderedDict[tuple[str, str, str], TurnSession] = OrderedDict()  # longest silent first
        self._time = -math.inf

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self, person: Person, arm: str, decile: int | None, turn: str, values: Mapping[str, float], at: float
    ) -> Iterator[TurnSession]:
        """Add a turn; yield the sessions that it closes."""
        yield from self.advance(at)
        key = (*person, arm)
        session = self._open.get(key)
        if session is None:
            session = TurnSession(tenant=key[0], user=key[1], arm=arm, decile=decile, ended_at=at)
            self._open[key] = session
        session.turns[turn] = dict(values)
        session.ended_at = self._time
        self._open.move_to_end(key)
        if len(session.turns) >= self._turns:
            yield self._open.pop(key)
        if len(self._open) > self._most:
            yield self._open.popitem(last=False)[1]

    def advance(self, at: float) -> Iterator[TurnSession]:
        """Advance the time; yield the sessions that are over by then. A time before the latest counts as the latest."""
        self._time = max(self._time, at)
        while self._open and self._time - next(iter(self._open.values())).ended_at > self._pause_s:
            yield self._open.popitem(last=False)[1]

    def forget(self, row: Forgotten) -> None:
        """Drop a person's open sessions without judging them."""
        self._open = OrderedDict((key, each) for key, each in self._open.items() if not row.covers(key[:2]))

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        time = None if math.isinf(self._time) else self._time
        return {"time": time, "open": [session.to_json() for session in self._open.values()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._time = -math.inf if state["time"] is None else float(state["time"])
        self._open.clear()
        for tenant, user, arm, decile, ended_at, turns in state["open"]:
            self._open[tenant, user, arm] = TurnSession(
                tenant=tenant, user=user, arm=arm, decile=decile, ended_at=float(ended_at), turns=turns
            )


@dataclass(slots=True)
class _Known:
    # log of the sum of exp(time / 7 days) over turns: unlike a decaying sum, it needs no update while a person is idle
    score: float
    day: int
    today: int


class Activity:
    """The activity of the people seen last, and whether their turns still count today.

    Args:
        most: largest number of people kept; those unseen for longest are dropped first.
        a_day: number of turns of one person that count per day.
    """

    def __init__(self, *, most: int, a_day: int) -> None:
        self._most, self._a_day = most, a_day
        self._people: OrderedDict[Person, _Known] = OrderedDict()
        self._cuts: list[float] = []
        self._until_cuts = _LEAST_PEOPLE

    def __len__(self) -> int:
        return len(self._people)

    def see(self, person: Person, at: float) -> tuple[bool, int | None]:
        """Count a turn. Return whether it counts, and the person's decile of activity (0: least active), None while few are known."""
        day, now = int(at // DAY), at / _DECAY_S
        known = self._people.get(person)
        if known is None:
            known = self._people[person] = _Known(now, day, 0)
            if len(self._people) > self._most:
                self._people.popitem(last=False)
        else:
            known.score = float(max(known.score, now) + math.log1p(math.exp(-abs(known.score - now))))
            self._people.move_to_end(person)
        if day > known.day:
            known.day, known.today = day, 0
        known.today += 1
        self._recut()
        decile = bisect.bisect_right(self._cuts, known.score) if self._cuts else None
        return known.today <= self._a_day, decile

    def forget(self, row: Forgotten) -> None:
        """Drop a person."""
        self._people = OrderedDict((person, known) for person, known in self._people.items() if not row.covers(person))

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        people = [[*person, known.score, known.day, known.today] for person, known in self._people.items()]
        return {"people": people, "cuts": self._cuts, "until": self._until_cuts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._people = OrderedDict(
            ((tenant, user), _Known(float(score), int(day), int(today)))
            for tenant, user, score, day, today in state["people"]
        )
        self._cuts, self._until_cuts = [float(cut) for cut in state["cuts"]], int(state["until"])

    def _recut(self) -> None:
        """Recompute the deciles' boundaries after as many turns as there are people, so that it costs little per turn."""
        self._until_cuts -= 1
        if self._until_cuts > 0 or len(self._people) < _LEAST_PEOPLE:
            return
        self._until_cuts = len(self._people)
        scores = sorted(known.score for known in self._people.values())
        self._cuts = [scores[len(scores) * k // DECILES] for k in range(1, DECILES)]


# ---------------------------------------------------------------- expected ranges


JUDGED = frozenset({Arm.LIVE.value, Arm.CANARY.value})
"""The arms whose release ships or has just shipped. Others hold an earlier release or an external model, where a pause would not help."""

ACCEPTED_DOUBT = 0.1
"""The uncertainty of an accepted shift, as a fraction of it. The shifted rate's deviation is taken as at least half of the shift."""

BACK = 10
"""The number of its sessions, without a new silence, after which a reference arm that was silent counts as active again."""


class SessionRole(StrEnum):
    """The use of a session: it is judged, it is learned from as the reference, or neither."""

    WATCHED = "watched"
    REFERENCE = "reference"
    UNUSED = "unused"


class ExpectedRanges:
    """The expected range of each rate, by group of sessions: a decile of activity, or everybody (None).

    Each active arm of the setting `reference` gives a range of its own: the previous release shows a shift soonest, and control, which
    never changes, shows shifts that are each too small to see. `arm` is the first of them that is not silent; if it is None, the expected
    range is that of the live arm while it was learned. `stale`: all of them are silent, and nothing is expected.
    """

    def __init__(self, config: MonitorsConfig) -> None:
        self._config = config
        self.arm: str | None = None
        self.stale = False
        self._silent_for = self._back = 0
        self._heard_at: dict[str, float] = {}
        self._unheard: dict[str, int] = {}
        self._at = 0.0
        self._arms: dict[str, dict[str, ArmReference]] = {}
        self._fixed: dict[str, FixedReference] = {}
        self._accepted: dict[str, float] = {}

    @property
    def blind(self) -> bool:
        """True while no arm serves as reference though control once did.

        Other arms have people only while a release is being proven, so to wait for one of them before shipping would never end.
        """
        return self.stale and Arm.CONTROL.value in self._heard_at

    def silent(self, arm: object, *, blind: bool) -> None:
        """Begin without a saved state if the log says that this arm is silent. `blind`: control was active before."""
        if isinstance(arm, str) and arm in self._config.reference:
            heard = {arm, Arm.CONTROL.value} if blind else {arm}
            self.arm, self.stale, self._heard_at = arm, True, dict.fromkeys(heard & {*self._config.reference}, 0.0)

    def uses(self, arm: str) -> bool:
        """Return true if turns on this arm are judged or may serve as reference."""
        return arm in JUDGED or arm in self._config.reference

    def see(self, arm: str, at: float) -> SessionRole:
        """Return the role of a session on this arm that has ended."""
        ranks = self._config.reference
        if not self.uses(arm):
            return SessionRole.UNUSED
        self._at = max(self._at, at)
        if arm not in ranks:
            self._silent_for += 1
            for heard in self._heard_at:
                self._unheard[heard] = self._unheard.get(heard, 0) + 1
            self._notice_silence(at)
            return SessionRole.WATCHED
        if self._is_silent(arm):
            self._arms.pop(arm, None)  # it may hold another release now
        self._heard_at[arm], self._unheard[arm] = at, 0
        if self.arm is None or ranks.index(arm) < ranks.index(self.arm) or (self.stale and arm != self.arm):
            self._switch_to(arm)
        if arm == self.arm:
            self._silent_for, self._back = 0, min(self._back + 1, BACK)
            self.stale = self.stale and self._back < BACK
        return SessionRole.REFERENCE

    def _switch_to(self, arm: str) -> None:
        self.arm, self.stale, self._silent_for = arm, False, 0

    def _is_silent(self, arm: str) -> bool:
        # the number of sessions alone proves little, as anybody can send them
        late = self._at - self._heard_at.get(arm, -math.inf) > self._config.stale_s
        return late and self._unheard.get(arm, 0) > self._config.stale_sessions

    def _notice_silence(self, at: float) -> None:
        if self.arm is None or self._silent_for <= self._config.stale_sessions:
            return
        # the number of sessions alone proves little, as anybody can send them
        speaking = [
            arm for arm in self._config.reference if at - self._heard_at.get(arm, -math.inf) <= self._config.stale_s
        ]
        if not speaking:
            self.stale, self._back = True, 0
        elif self.arm not in speaking:
            self._switch_to(speaking[0])

    def learn(self, arm: str, rate: str, mean: float, decile: int | None) -> None:
        """Learn from a session of a reference arm."""
        rates = self._arms.setdefault(arm, {})
        if rate not in rates:
            rates[rate] = ArmReference(level=Level(memory=self._config.reference_sessions))
        rates[rate].observe(mean, decile)

    @property
    def references(self) -> int:
        """The number of references that sessions are compared with, at least one."""
        return max(1, len(self._heard_at))

    def ranges(self, rate: str, arm: str, decile: int | None) -> dict[str, ExpectedRange]:
        """Return the known expected ranges of a session of everybody (None) or of a decile, by reference ("" for the learned range)."""
        if self.arm is None:
            fixed = self._fixed.get(_key(rate, decile))
            found = {"": None if fixed is None else fixed.expected()}
        elif self.stale:
            return {}
        else:
            found = {
                each: self._arms[each][rate].expected(decile)
                for each in self._config.reference
                if rate in self._arms.get(each, {}) and not self._is_silent(each)
            }
        return {
            each: self._with_accepted(known, each, rate, arm, decile)
            for each, known in found.items()
            if known is not None
        }

    def _with_accepted(
        self, found: ExpectedRange, against: str, rate: str, arm: str, decile: int | None
    ) -> ExpectedRange:
        groups = {_key(rate, None), _key(rate, decile)}
        offset = sum(self._accepted.get(f"{against}:{arm}/{group}", 0.0) for group in groups)
        if not offset:
            return found
        doubt = abs(offset) * ACCEPTED_DOUBT
        return replace(
            found,
            low=_share(found.low + offset - doubt),
            high=_share(found.high + offset + doubt),
            deviation=max(found.deviation, abs(offset) / 2),
        )

    def learn_fixed(self, rate: str, mean: float, decile: int | None, at: float) -> None:
        """Learn from a session of the live arm, while there is no reference arm."""
        key = _key(rate, decile)
        fixed = self._fixed.get(key)
        if fixed is None:
            fixed = self._fixed[key] = FixedReference(short=Level(memory=self._config.reference_sessions))
        fixed.observe(mean, at, sessions=self._config.learn_sessions, seconds=self._config.learn_s)

    def accept(self, shifts: Collection[tuple[str, str, int | None, str, float]]) -> None:
        """Expect a gap between a rate and its reference from now on. A gap of everybody applies to each decile too.

        A shift (rate, arm, decile, reference, gap) that was found against one reference alone is expected against the others as well.
        """
        found = {(rate, arm, decile): dict[str, float]() for rate, arm, decile, _, _ in shifts}
        for rate, arm, decile, against, gap in shifts:
            found[rate, arm, decile][against] = gap
        for (rate, arm, decile), gaps in found.items():
            for each in ("", *self._config.reference):
                key = f"{each}:{arm}/{_key(rate, decile)}"
                self._accepted[key] = self._accepted.get(key, 0.0) + gaps.get(each, next(iter(gaps.values())))

    def shipped(self) -> None:
        """Note that a release went live: drop gaps accepted against reference arms that move with releases, since these show them now."""
        stays = ("", Arm.CONTROL.value)
        self._accepted = {key: gap for key, gap in self._accepted.items() if key.partition(":")[0] in stays}

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "arm": self.arm,
            "stale": self.stale,
            "silent_for": self._silent_for,
            "back": self._back,
            "heard_at": self._heard_at,
            "unheard": self._unheard,
            "at": self._at,
            "arms": {arm: {rate: each.to_json() for rate, each in rates.items()} for arm, rates in self._arms.items()},
            "fixed": {key: each.to_json() for key, each in self._fixed.items()},
            "accepted": self._accepted,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. An arm that is no longer a reference is left out.

        Raises LookupError, TypeError or ValueError for an invalid state.
        """
        self._fixed = {key: FixedReference.from_json(each) for key, each in state["fixed"].items()}
        self._accepted = {key: float(each) for key, each in state["accepted"].items()}
        kept, self._at = self._config.reference, float(state["at"])
        self._heard_at = {arm: float(at) for arm, at in state["heard_at"].items() if arm in kept}
        self._unheard = {arm: int(count) for arm, count in state["unheard"].items() if arm in kept}
        self._arms = {
            arm: {rate: ArmReference.from_json(each) for rate, each in rates.items()}
            for arm, rates in state["arms"].items()
            if arm in kept
        }
        if state["arm"] in kept:
            self.arm, self.stale = state["arm"], bool(state["stale"])
            self._silent_for, self._back = int(state["silent_for"]), int(state["back"])


def _key(rate: str, decile: int | None) -> str:
    return rate if decile is None else f"{rate}/{decile}"


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


# ---------------------------------------------------------------- the monitor


REFERENCE = "monitor:reference"
_CANARY = Arm.CANARY.value
_ENDS_A_CANARY = frozenset({"canary", "awaits_approval", "shipped", "blocked", "rolled_back"})


class Behaviour:
    """The state of the monitor of behaviour rates.

    `standing`: the raised alarms. `turns`: the number of turns looked at. `failures`: by rate, the number of turns on which its function
    raised or left [0, 1].

    Args:
        config: the settings.
        rates: the rates to watch (`watcher.rates_of`).
    """

    def __init__(self, config: MonitorsConfig, rates: tuple[Rate, ...]) -> None:
        self._rates = {rate.name: rate for rate in rates}
        # one test of each rate against each reference
        self._h = {
            (rate.name, everybody, count): thresholds(
                config.false_alarm_sessions, len(rates) * count, rate.harmful, everybody=everybody
            )
            for rate in rates
            for everybody in (True, False)
            for count in range(1, max(1, len(config.reference)) + 1)
        }
        self._back_threshold = math.log(config.false_comfort_sessions)
        self._least_people = config.least_people
        self._sessions = OpenSessions(
            turns=config.session_turns, pause_s=config.session_pause_s, most=config.most_sessions
        )
        self._activity = Activity(most=config.most_people, a_day=config.turns_a_day)
        self._expected = ExpectedRanges(config)
        self._detectors: dict[str, Detector] = {}
        self._told_silent = False
        self.standing = RaisedShifts()
        self.failures: dict[str, int] = {}
        self.turns = 0

    @property
    def paused(self) -> bool:
        """True while an alarm about a harmful shift is raised, or control is silent, so that no shift would be seen."""
        return bool(self.standing.harmful) or (bool(self._rates) and self._expected.blind)

    @property
    def names(self) -> list[str]:
        """The names of the raised alarms."""
        return [*self.standing.names, *([REFERENCE] if self._told_silent else [])]

    def begin(self, alarms: Mapping[str, Alarm]) -> None:
        """Begin without a saved state, from the newest row about each alarm in the log, by name. Alarms raised there stay raised."""
        for name, row in alarms.items():
            if row.state is AlarmState.RAISED and name == REFERENCE:
                self._told_silent = True
                self._expected.silent(row.detail.get("arm"), blind=row.detail.get("pauses") is True)
            elif row.state is AlarmState.RAISED and is_about_a_rate(name):
                self.standing.heard(row)

    def turn(self, turn: Turn) -> Iterator[Alarm]:
        """Process a turn; yield the alarms that it raises or clears, without ids."""
        if not turn.arm.people or turn.redacted or not turn.finish.complete:
            return
        if not self._expected.uses(turn.arm.value):
            return
        # all people without a name are served live, so a reference arm has none to compare them with, and anybody can send any number
        if turn.user == ANONYMOUS and self._expected.arm is not None:
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
        role = self._expected.see(session.arm, session.ended_at)
        silent = bool(self._rates) and self._expected.stale
        if self._told_silent != silent:
            self._told_silent = silent
            yield self._reference_alarm(session.ended_at)
        for name, rate in self._rates.items():
            values = session.values(name)
            if not values or role is SessionRole.UNUSED:
                continue
            mean = math.fsum(values.values()) / len(values)
            if role is SessionRole.REFERENCE:
                self._expected.learn(session.arm, name, mean, session.decile)
                continue
            for decile in _groups(session):
                yield from self._judge(rate, decile, session, mean, values)
                if self._expected.arm is None and session.arm == Arm.LIVE:
                    self._expected.learn_fixed(name, mean, decile, session.ended_at)

    def _judge(
        self, rate: Rate, decile: int | None, session: TurnSession, mean: float, values: Mapping[str, float]
    ) -> Iterator[Alarm]:
        """Compare one session's mean with each reference, as a session of everybody or of its decile."""
        ranges = self._expected.ranges(rate.name, session.arm, decile)
        if not ranges:
            return
        name, first = alarm_name(rate.name, session.arm), next(iter(ranges.values()))
        shifted_from = {against for against, _ in self.standing.return_tests(name, decile)}
        for against, returning in self.standing.return_tests(name, decile):
            # if its reference is gone, compare with another, so that the alarm can still be cleared
            expected = ranges.get(against, first)
            if returning.observe(mean, expected, session.ended_at, self._back_threshold) and self.standing.back(
                name, decile, against
            ):
                yield self.standing.clear(name, "the rate is back where it is expected", session.ended_at)
        for against, expected in ranges.items():
            # while everybody has shifted, a decile's shift adds nothing
            if against in shifted_from or (decile is not None and self.standing.has(name, None, against)):
                continue
            detector = self._detectors.setdefault(f"{session.arm}/{rate.name}/{decile}/{against}", Detector())
            person = f"{session.tenant}/{session.user}"
            h = self._h[rate.name, decile is None, self._expected.references]
            shifted = detector.observe(mean, values, expected, h=h, person=person, people=self._least_people)
            harmful = shifted is not None and shifted.shift in rate.harmful
            if shifted is not None and self.standing.add(name, decile, against, shifted, harmful=harmful):
                yield self._raise(name, rate, decile, against, session, shifted, h[shifted.shift])

    def _raise(
        self,
        name: str,
        rate: Rate,
        decile: int | None,
        against: str,
        session: TurnSession,
        shifted: Shifted,
        threshold: float,
    ) -> Alarm:
        pauses = shifted.shift in rate.harmful
        who = "everybody" if decile is None else f"people in activity decile {decile + 1} of 10"
        reason = (
            f"{rate.means}: {shifted.observed:.1%} in {shifted.sessions} sessions of {who} on arm {session.arm}, where "
            f"{shifted.expected:.1%} is expected"
            + (f" by arm {against}" if against else "")
            + ("" if pauses else "; a shift this way does not pause shipping")
        )
        detail = {
            "rate": rate.name,
            "arm": session.arm,
            "decile": decile,
            "against": against,
            "shift": shifted.shift.value,
            "pauses": pauses,
            "observed": shifted.observed,
            "reference": shifted.expected,
            "sessions": shifted.sessions,
            "events": shifted.events,
            "threshold": threshold,
            "turns": list(shifted.turns),
        }
        return Alarm(id="", name=name, state=AlarmState.RAISED, reason=reason, at=session.ended_at, detail=detail)

    def _reference_alarm(self, at: float) -> Alarm:
        if not self._told_silent:
            why = "the monitors no longer wait for a silent reference arm"
            return Alarm(id="", name=REFERENCE, state=AlarmState.CLEARED, reason=why, at=at)
        arm, blind = self._expected.arm, self._expected.blind
        why = f"reference arm {arm} is silent while other arms are served: no behaviour is judged" + (
            "; if it is gone for good, take it out of release.monitors.reference"
            if blind
            else "; it has users only while a release is proven, so that does not pause shipping"
        )
        detail = {"arm": arm, "pauses": blind}
        return Alarm(id="", name=REFERENCE, state=AlarmState.RAISED, reason=why, at=at, detail=detail)

    def alarm(self, row: Alarm) -> None:
        """Apply a person's acceptance of a shift. All other rows about alarms are the monitors' own."""
        if row.detail.get(ACCEPTED) is True:
            self._expected.accept(list(self.standing.gaps(row.name)))
            self.standing.forget(row.name)

    def release(self, event: ReleaseEvent) -> Iterator[Alarm]:
        """Process a release event. The end of a canary clears its alarms, since its arm can no longer show that a rate is back."""
        if event.action == "shipped":
            self._expected.shipped()
        if event.action not in _ENDS_A_CANARY:
            return
        self._detectors = {key: each for key, each in self._detectors.items() if not key.startswith(f"{_CANARY}/")}
        for name in self.standing.on_arm(_CANARY):
            yield self.standing.clear(name, f"the canary is over: {event.action} {event.policy}", event.at)

    def forget(self, row: Forgotten) -> None:
        """Drop what is kept under a person's name; their sessions stay in the sums."""
        self._sessions.forget(row)
        self._activity.forget(row)
        for detector in self._detectors.values():
            detector.forget(row)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "sessions": self._sessions.snapshot(),
            "activity": self._activity.snapshot(),
            "expecting": self._expected.snapshot(),
            "detectors": {key: detector.to_json() for key, detector in self._detectors.items()},
            "told_silent": self._told_silent,
            "standing": self.standing.snapshot(),
            "failures": self.failures,
            "turns": self.turns,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned, under the current settings.

        Raises AttributeError, LookupError, TypeError or ValueError for an invalid state; do not use this object then.
        """
        self._sessions.restore(state["sessions"])
        self._activity.restore(state["activity"])
        self._expected.restore(state["expecting"])
        self._detectors = {key: Detector.from_json(each) for key, each in state["detectors"].items()}
        self._told_silent = bool(state["told_silent"])
        self.standing.restore(state["standing"])
        self.failures, self.turns = dict(state["failures"]), int(state["turns"])


def _groups(session: TurnSession) -> tuple[int | None, ...]:
    """Return the groups of a session: everybody, and on the live arm, if there are enough people, its decile of activity."""
    return (None,) if session.decile is None or session.arm != Arm.LIVE else (None, session.decile)
