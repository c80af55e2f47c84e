"""A betting e-detector (sequential change detection) for the mean of a bounded behaviour rate.

For each direction a gambler bets, session by session, that the mean has left its expected range. With x the mean of a session's events,
bets l and the range's upper end p0,

    M_l <- (1 + M_l) (1 + l (x - p0)),        alarm when log mean_l M_l > h.

While E[x | past] <= p0, each factor has mean at most 1, whatever the distribution and however events within a session depend on each
other. So M_l, the Shiryaev-Roberts sum of the products over all starts, grows by at most 1 per session on average. A mixture of such sums
is an e-detector: the mean number of sessions between two false alarms is at least exp(h) (Shin, Ramdas and Rinaldo 2023, "E-detectors",
doi 10.51387/23-NEJSDS51, sections 2 and 3). The largest of the products instead of their sum is a CUSUM. It has the same guarantee and
detects a shift later, so it is used only to tell when the evidence began to grow. Downwards, the same holds with p0 - x and the range's
lower end.

A shift of c standard deviations of x is detected soonest with a bet of about l = c / (sd (1 + c^2)), the first step towards the bet that
maximises E log(1 + l (x - p0)). Several c are played at once, which costs at most log(len(EFFECTS)) of evidence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ostinato.core.notices import Forgotten
from ostinato.release.monitors.rates import Shift

EFFECTS = (0.25, 0.5, 1.0)  # standard deviations of a session's mean
EXAMPLES = 20
MOST_PEOPLE = 20
LEAST_SESSIONS = 10  # sessions after an alarm that suffice for estimating how far the rate has shifted
# share of the false alarms that may be about everybody; the rest may be about deciles of activity
EVERYBODY_SHARE = 0.9
HARM_SHARE = 0.8  # share of either that may be about the harmful direction, if only one is harmful
_MOST_BET = 0.9  # largest bet, as a share of the bet that could lose everything
_SMALLEST = 1e-6
_ROUNDED_ABOVE = 40.0  # above this x, 1 + exp(x) rounds to exp(x)


def thresholds(
    false_alarm_sessions: float, rates: int, harmful: Collection[Shift], *, everybody: bool
) -> dict[Shift, float]:
    """Return h for both shifts of a rate, for the sessions of everybody or of a decile of activity.

    With these thresholds all monitors together raise at most one false alarm in `false_alarm_sessions` sessions on average, if the expected
    ranges are right. A session feeds a test of each rate in both groups and directions, and each test is wrong at most once in exp(h)
    sessions (module's docstring). Each test gets a share of the false alarms, and the shares add up to 1: h = log(sessions x rates /
    share). The tests that would find harm first get the largest shares.

    Example: ``thresholds(125_000, 16, {Shift.UP}, everybody=True)`` is 14.8 upwards and 16.2 downwards; for a decile 17.0 and 18.4.
    """
    group = EVERYBODY_SHARE if everybody else 1.0 - EVERYBODY_SHARE
    uneven = len(harmful) == 1
    parts = {shift: (HARM_SHARE if shift in harmful else 1.0 - HARM_SHARE) if uneven else 0.5 for shift in Shift}
    return {shift: math.log(false_alarm_sessions * max(1, rates) / (group * part)) for shift, part in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRange:
    """The range in which a rate's mean is expected, and the standard deviation of a session's mean.

    Example: ``ExpectedRange(low=0.58, high=0.62, deviation=0.2)``
    """

    low: float
    high: float
    deviation: float

    @property
    def middle(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifted:
    """A detected shift: the observed mean of the `sessions` (with `events` events) since the evidence began to grow, and its direction.

    `turns` are up to 20 of the newest turns that show it.

    Example: ``Shifted(shift=Shift.UP, observed=0.09, expected=0.03, sessions=61, events=488, turns=("a:0", "c:0"))``
    """

    shift: Shift
    observed: float
    expected: float
    sessions: int
    events: int
    turns: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Gambler:
    """One direction's bets, and the sessions since no bet was winning.

    `sums` are the log(1 + M_l), `wins` the logs of the largest products. `turns` are the newest turns that showed the shift, `people` some
    of the people whose turns did.
    """

    sums: list[float] = field(default_factory=lambda: [0.0] * len(EFFECTS))
    wins: list[float] = field(default_factory=lambda: [0.0] * len(EFFECTS))
    sessions: int = 0
    events: int = 0
    total: float = 0.0
    turns: deque[str] = field(default_factory=lambda: deque[str](maxlen=EXAMPLES))
    people: list[str] = field(default_factory=list[str])

    @property
    def wins_any(self) -> bool:
        """True if some bet has won more than it lost over all sessions since some start."""
        return max(self.wins) > 0.0

    def passes(self, h: float) -> bool:
        """Return true if the statistic, log mean_l M_l, is above h (and some bet wins)."""
        most = max(self.sums)
        if most <= h or not self.wins_any:
            return False
        return most + math.log(math.fsum(math.exp(each - most) for each in self.sums) / len(self.sums)) > h

    def bet(self, gain: float, most_lost: float, deviation: float) -> None:
        """Bet on a session that lies `gain` beyond the range's end. No session can lie further inside it than `most_lost`."""
        if not self.wins_any:
            self._forget()
        deviation = max(deviation, _SMALLEST)
        boldest = _MOST_BET / max(most_lost, _SMALLEST)
        for index, effect in enumerate(EFFECTS):
            bet = min(effect / (deviation * (1.0 + effect * effect)), boldest)
            won = math.log1p(bet * gain)
            self.sums[index] = _log_1_plus_exp(self.sums[index] + won)
            self.wins[index] = max(0.0, self.wins[index]) + won

    def note(self, mean: float, turns: Mapping[str, float], beyond: float, sign: float, person: str) -> None:
        """Record the session's mean, its turns beyond the expected range, and its person if there are any."""
        self.sessions, self.events, self.total = self.sessions + 1, self.events + len(turns), self.total + mean
        shown = [turn for turn, value in turns.items() if sign * (value - beyond) > 0.0]
        self.turns.extend(shown)
        if shown and len(self.people) < MOST_PEOPLE and person not in self.people:
            self.people.append(person)

    def clear(self) -> None:
        """Restart."""
        self.sums = [0.0] * len(EFFECTS)
        self._forget()

    def _forget(self) -> None:
        self.wins = [0.0] * len(EFFECTS)
        self.sessions, self.events, self.total = 0, 0, 0.0
        self.turns.clear()
        self.people.clear()

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {**asdict(self), "turns": list(self.turns)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `to_json` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        sums, wins = ([float(each) for each in state[key]] for key in ("sums", "wins"))
        if not len(sums) == len(wins) == len(EFFECTS):
            raise ValueError(f"{len(sums)} and {len(wins)} bets where {len(EFFECTS)} are played")
        turns = deque(map(str, state["turns"]), maxlen=EXAMPLES)
        sessions, events, total = int(state["sessions"]), int(state["events"]), float(state["total"])
        people = list(map(str, state["people"]))
        return cls(sums=sums, wins=wins, sessions=sessions, events=events, total=total, turns=turns, people=people)


class Detector:
    """Both directions of one rate in one group of sessions.

    Example::

        detector, h = Detector(), thresholds(125_000, 16, {Shift.UP}, everybody=True)
        for mean, turns in sessions:
            shifted = detector.observe(mean, turns, ExpectedRange(low=0.09, high=0.11, deviation=0.12), h=h)
    """

    def __init__(self) -> None:
        self._gamblers = {shift: Gambler() for shift in Shift}

    def observe(
        self,
        mean: float,
        turns: Mapping[str, float],
        expected: ExpectedRange,
        *,
        h: Mapping[Shift, float],
        person: str = "",
        people: int = 1,
    ) -> Shifted | None:
        """Add one session's mean in [0, 1] with its turns' values. If the evidence passes h, return the shift and restart.

        `expected` must not depend on this session. At least `people` people must have shown the shift: sessions of one person are not
        independent, and each occurrence of a behaviour that nobody showed before is strong evidence.
        """
        found: Shifted | None = None
        for shift, gambler in self._gamblers.items():
            up = shift is Shift.UP
            gain = mean - expected.high if up else expected.low - mean
            gambler.bet(gain, expected.high if up else 1.0 - expected.low, expected.deviation)
            # the usual case: there is no evidence of a shift, and the session need not be recorded
            if not gambler.wins_any:
                continue
            gambler.note(mean, turns, expected.high if up else expected.low, 1.0 if up else -1.0, person)
            if found is None and len(gambler.people) >= people and gambler.passes(h[shift]):
                found = Shifted(
                    shift=shift,
                    observed=gambler.total / gambler.sessions,
                    expected=expected.middle,
                    sessions=gambler.sessions,
                    events=gambler.events,
                    turns=tuple(gambler.turns),
                )
        if found is not None:
            self.clear()
        return found

    def forget(self, row: Forgotten) -> None:
        """Drop a person from those who showed a shift; the evidence stays."""
        name = f"{row.tenant}/{row.user or ''}"
        for gambler in self._gamblers.values():
            gambler.people = [
                each for each in gambler.people if not (each.startswith(name) if row.user is None else each == name)
            ]

    def clear(self) -> None:
        """Restart in both directions."""
        for gambler in self._gamblers.values():
            gambler.clear()

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {shift.value: gambler.to_json() for shift, gambler in self._gamblers.items()}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `to_json` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        detector = cls()
        detector._gamblers = {shift: Gambler.from_json(state[shift.value]) for shift in Shift}
        return detector


class ReturnTest:
    """A test after an alarm for whether the rate is back: the same bets in the other direction, that it has returned to a third of the gap.

    `gap` is the observed rate minus the expected one, with its sign. It is overstated, because the rate looked extreme at the moment of the
    alarm: hence a third and not a half. Sessions up to `since` (Unix seconds) are older than the alarm.
    """

    def __init__(self, gap: float, since: float = -math.inf) -> None:
        self._gap, self._since = gap, since
        self._gambler = Gambler()
        self._sessions, self._away = 0, 0.0

    @property
    def gap(self) -> float:
        """How far the rate is from the expected one, by the newest sessions since the alarm once there are enough of them."""
        return self._gap if self._sessions < LEAST_SESSIONS else self._away

    def observe(self, mean: float, expected: ExpectedRange, at: float, h: float) -> bool:
        """Add one session that ended at `at`. Return true if the rate is back; that is wrong at most once in exp(h) sessions on average."""
        if at <= self._since:
            return False
        self._sessions += 1
        self._away += (mean - expected.middle - self._away) / min(self._sessions, LEAST_SESSIONS)
        near = min(1.0, max(0.0, expected.middle + self._gap / 3))
        up = self._gap > 0
        self._gambler.bet(near - mean if up else mean - near, 1.0 - near if up else near, expected.deviation)
        return self._gambler.passes(h)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        since = None if math.isinf(self._since) else self._since
        counts = {"sessions": self._sessions, "away": self._away}
        return {"gap": self._gap, "since": since, **counts, "gambler": self._gambler.to_json()}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `to_json` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        found = cls(float(state["gap"]), -math.inf if state["since"] is None else float(state["since"]))
        found._gambler = Gambler.from_json(state["gambler"])
        found._sessions, found._away = int(state["sessions"]), float(state["away"])
        return found


def _log_1_plus_exp(value: float) -> float:
    return value if value > _ROUNDED_ABOVE else math.log1p(math.exp(value))
