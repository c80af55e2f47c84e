"""Turns grouped into sessions of one person, and people into deciles of activity, in bounded memory. Pure.

A session is a limited number of turns of one person on one arm without a long pause. A person's turns in it are correlated, so the bets
are on sessions and not on turns. Of one person a limited number of turns count a day, so that nobody moves a rate alone.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ostinato.core.records import Person

DECILES = 10
DAY = 86_400.0
_REMEMBERED = 7 * DAY  # activity halves in five days
_FEW_PEOPLE = 50  # below this many there are no deciles


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
        """A rate's values, of the turns that have one."""
        return {turn: values[rate] for turn, values in self.turns.items() if rate in values}

    def to_json(self) -> list[Any]:
        """As JSON's types."""
        return [self.tenant, self.user, self.arm, self.decile, self.ended_at, self.turns]


class OpenSessions:
    """The sessions that may still grow, at most `most`.

    Args:
        turns: the number of turns that closes a session.
        pause_s: the seconds without a turn after which one is closed, by the turns' own times.
        most: open sessions at most; beyond that the one that is silent for longest is closed.
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
        """Take in a turn; yields the sessions that it closes."""
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
        """Advance the time; yields the sessions that are over by then. A time before the latest is taken for the latest."""
        self._time = max(self._time, at)
        while self._open and self._time - next(iter(self._open.values())).ended_at > self._pause_s:
            yield self._open.popitem(last=False)[1]

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        time = None if math.isinf(self._time) else self._time
        return {"time": time, "open": [session.to_json() for session in self._open.values()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._time = -math.inf if state["time"] is None else float(state["time"])
        self._open.clear()
        for tenant, user, arm, decile, ended_at, turns in state["open"]:
            self._open[tenant, user, arm] = TurnSession(
                tenant=tenant, user=user, arm=arm, decile=decile, ended_at=float(ended_at), turns=turns
            )


@dataclass(slots=True)
class _Known:
    score: (
        float  # log of the sum of exp(time / 7 days) over turns: its order does not change while nobody does anything
    )
    day: int
    today: int


class Activity:
    """How active each person is among those seen last, and whether their turns still count today.

    Args:
        most: people remembered at most; those unseen for longest are dropped first.
        a_day: turns of one person that count in a day.
    """

    def __init__(self, *, most: int, a_day: int) -> None:
        self._most, self._a_day = most, a_day
        self._people: OrderedDict[Person, _Known] = OrderedDict()
        self._cuts: list[float] = []
        self._until_cuts = _FEW_PEOPLE

    def __len__(self) -> int:
        return len(self._people)

    def see(self, person: Person, at: float) -> tuple[bool, int | None]:
        """Take in a person's turn: whether it counts, and the person's decile among those known (0: least active), None while few are."""
        day, now = int(at // DAY), at / _REMEMBERED
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

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        people = [[*person, known.score, known.day, known.today] for person, known in self._people.items()]
        return {"people": people, "cuts": self._cuts, "until": self._until_cuts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._people = OrderedDict(
            ((tenant, user), _Known(float(score), int(day), int(today)))
            for tenant, user, score, day, today in state["people"]
        )
        self._cuts, self._until_cuts = [float(cut) for cut in state["cuts"]], int(state["until"])

    def _recut(self) -> None:
        """Recompute the deciles' boundaries, after as many turns as there are people, so that it costs little per turn."""
        self._until_cuts -= 1
        if self._until_cuts > 0 or len(self._people) < _FEW_PEOPLE:
            return
        self._until_cuts = len(self._people)
        scores = sorted(known.score for known in self._people.values())
        self._cuts = [scores[len(scores) * k // DECILES] for k in range(1, DECILES)]
