"""The alarms that stand, and how each would end: about rates, and about a gap between two groups that are counted for a while."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm
from ostinato.release.monitors.detector import Shifted, WayBack

PREFIX = "monitor:"
ACCEPTED = "accepted"
LOOK_S = 3_600.0
_EVERYBODY = "everybody"

# ---------------------------------------------------------------- an alarm about a gap


class GapAlarm:
    """An alarm about a gap between two groups of people, who are counted for a while, looked at hourly, and counted anew.

    It stands until a whole count has passed in which the gap was not found again, or until a person accepts it; after that only a larger
    gap is found. `since` is when the count began, `last` the gap that was found last, `tolerated` the largest that is none. A gap below 0
    has the other direction: it is told though the alarm stands for one above 0, and `tolerated_below` is what is tolerated of it.

    Args:
        name: the alarm's.
        tolerated: what is tolerated, in either direction, before anybody has accepted more.
        former: its name in logs of earlier versions; an alarm that stands under it ends under it.
    """

    def __init__(self, name: str, tolerated: float = 0.0, *, former: str = "") -> None:
        self._name, self._former, self._least = name, former, tolerated
        self.stands = ""  # the name under which it stands
        self.found = False  # in the count that runs
        self.since: float | None = None
        self._looked = 0.0
        self.last, self.tolerated, self.tolerated_below = 0.0, tolerated, tolerated

    @property
    def standing(self) -> list[str]:
        """The alarm's name while it stands."""
        return [self.stands] if self.stands else []

    def begin(self, alarms: Mapping[str, Alarm]) -> None:
        """Begin without a state: the alarm stands if it stands in the log."""
        names = (self._name, self._former)
        self.stands = next((n for n in names if n in alarms and alarms[n].state is AlarmState.RAISED), "")

    def lasted(self, at: float) -> float:
        """How many seconds the count has lasted; the first call begins the first one."""
        if self.since is None:
            self.since = self._looked = at
        return at - self.since

    def look_due(self, at: float) -> bool:
        """True once an hour, for the caller to look."""
        due = at - self._looked >= LOOK_S
        self._looked = at if due else self._looked
        return due

    def find(self, gap: float) -> bool:
        """Note that this gap was found. True if that is news: the alarm does not stand, or stands for the other direction."""
        news = not self.stands or gap * self.last < 0.0
        self.found, self.last = True, gap
        return news

    def anew(self, at: float) -> Iterator[Alarm]:
        """Begin the next count; the alarm ends if this one did not find the gap."""
        if self.stands and not self.found:
            yield self.cleared("it was not found again since both sides were counted anew", at)
        self.since, self.found = at, False

    def end(self, why: str, at: float) -> Iterator[Alarm]:
        """End the alarm if it stands, because nothing is counted any more."""
        if self.stands:
            yield self.cleared(why, at)

    def accepted(self, row: Alarm) -> bool:
        """Whether a row is a person's acceptance of the gap that was found last; takes it in."""
        if row.name not in (self._name, self._former) or row.detail.get(ACCEPTED) is not True:
            return False
        self.stands = ""
        self.tolerated, self.tolerated_below = max(self.tolerated, self.last), max(self.tolerated_below, -self.last)
        return True

    def raised(self, reason: str, at: float, detail: Mapping[str, Any]) -> Alarm:
        """The row that raises the alarm, without an id."""
        self.stands = self._name
        return Alarm(id="", name=self._name, state=AlarmState.RAISED, reason=reason, at=at, detail=detail)

    def cleared(self, reason: str, at: float) -> Alarm:
        """The row that ends the alarm, without an id."""
        name, self.stands = self.stands, ""
        return Alarm(id="", name=name, state=AlarmState.CLEARED, reason=reason, at=at)

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        return {
            "since": self.since,
            "looked": self._looked,
            "found": self.found,
            "stands": self.stands,
            "last_gap": self.last,
            "tolerated": self.tolerated,
            "tolerated_below": self.tolerated_below,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`. Raises LookupError, TypeError or ValueError for an invalid state."""
        self.since = None if state["since"] is None else float(state["since"])
        self._looked, self.found, self.stands = float(state["looked"]), bool(state["found"]), str(state["stands"])
        self.last = float(state["last_gap"])
        self.tolerated, self.tolerated_below = (
            max(self._least, float(state[name])) for name in ("tolerated", "tolerated_below")
        )


# ---------------------------------------------------------------- alarms about rates


def alarm_name(rate: str, arm: str) -> str:
    """The name of the alarm about a rate on an arm.

    Example: ``alarm_name("edit", "live") == "monitor:edit"``, ``alarm_name("edit", "canary") == "monitor:edit:canary"``
    """
    return f"{PREFIX}{rate}" if arm == Arm.LIVE else f"{PREFIX}{rate}:{arm}"


def is_about_a_rate(name: str) -> bool:
    """True for the name of an alarm about a rate."""
    return name.startswith(PREFIX)


def _parts(name: str) -> tuple[str, str]:
    """The rate and the arm that an alarm is about: the inverse of `alarm_name`."""
    rate, _, arm = name.removeprefix(PREFIX).partition(":")
    return rate, arm or Arm.LIVE.value


_Group = tuple[int | None, str]
"""A decile, or everybody (None), against one reference: an arm, or "" for what was learned."""


@dataclass(slots=True, kw_only=True)
class _Shift:
    harmful: bool
    groups: dict[_Group, WayBack] = field(default_factory=dict[_Group, WayBack])

    def to_json(self) -> dict[str, Any]:
        groups = {
            f"{_EVERYBODY if decile is None else decile}@{against}": back.to_json()
            for (decile, against), back in self.groups.items()
        }
        return {"harmful": self.harmful, "groups": groups}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        groups = {_group(key): WayBack.from_json(back) for key, back in state["groups"].items()}
        return cls(harmful=bool(state["harmful"]), groups=groups)


def _group(key: str) -> _Group:
    decile, _, against = key.partition("@")
    return None if decile == _EVERYBODY else int(decile), against


class StandingShifts:
    """By alarm: the groups in which its rate has shifted, and whether that is harmful."""

    def __init__(self) -> None:
        self._shifts: dict[str, _Shift] = {}

    @property
    def names(self) -> list[str]:
        """The alarms that stand."""
        return list(self._shifts)

    @property
    def harmful(self) -> list[str]:
        """The standing alarms that pause shipping."""
        return [name for name, shift in self._shifts.items() if shift.harmful]

    def ways_back(self, name: str, decile: int | None) -> list[tuple[str, WayBack]]:
        """By the reference that it has shifted against, the tests that a group's rate is back."""
        groups = self._shifts[name].groups if name in self._shifts else {}
        return [(against, back) for (of, against), back in groups.items() if of == decile]

    def has(self, name: str, decile: int | None, against: str) -> bool:
        """True if a group's rate has shifted against this reference."""
        return name in self._shifts and (decile, against) in self._shifts[name].groups

    def add(self, name: str, decile: int | None, against: str, shifted: Shifted, *, harmful: bool) -> bool:
        """Note that a group has shifted. True if that is news: no alarm stood about this rate, or the shift is the first harmful one."""
        known = self._shifts.get(name)
        news = known is None or (harmful and not known.harmful)
        shift = self._shifts.setdefault(name, _Shift(harmful=False))
        shift.harmful = shift.harmful or harmful
        shift.groups[decile, against] = WayBack(shifted.observed - shifted.expected)
        return news

    def back(self, name: str, decile: int | None, against: str) -> bool:
        """Note that a group is back. True if it was the last one."""
        groups = self._shifts[name].groups
        groups.pop((decile, against), None)
        return not groups

    def clear(self, name: str, why: str, at: float) -> Alarm:
        """End an alarm; returns the row that says so, without an id."""
        self.forget(name)
        return Alarm(id="", name=name, state=AlarmState.CLEARED, reason=why, at=at)

    def forget(self, name: str) -> None:
        """End an alarm, without a row."""
        self._shifts.pop(name, None)

    def heard(self, row: Alarm) -> None:
        """Take over an alarm that stands in the log, whose state was lost, from its row.

        If the row says too little to tell whether the rate is back, the alarm stands until a person accepts it.
        """
        observed, reference, decile = (row.detail.get(key) for key in ("observed", "reference", "decile"))
        shift = self._shifts[row.name] = _Shift(harmful=row.detail.get("pauses") is not False)
        if isinstance(observed, int | float) and isinstance(reference, int | float):
            group = decile if isinstance(decile, int) else None, str(row.detail.get("against") or "")
            shift.groups[group] = WayBack(float(observed) - float(reference), row.at)

    def gaps(self, name: str) -> Iterator[tuple[str, str, int | None, str, float]]:
        """Rate, arm, decile, reference, and how far the group has shifted; for a decile, beyond everybody's shift if there is one."""
        rate, arm = _parts(name)
        shift = self._shifts.get(name)
        groups = {} if shift is None else shift.groups
        for (decile, against), back in groups.items():
            overall = groups.get((None, against))
            beyond = 0.0 if decile is None or overall is None else overall.gap
            yield rate, arm, decile, against, back.gap - beyond

    def on_arm(self, arm: str) -> list[str]:
        """The alarms about an arm."""
        return [name for name in self._shifts if _parts(name)[1] == arm]

    def unwatched(self, rates: Container[str], arms: Container[str]) -> list[tuple[str, str]]:
        """The alarms about a rate that is not in `rates` or an arm that is not in `arms`, and why they end."""
        found: list[tuple[str, str]] = []
        for name in self._shifts:
            rate, arm = _parts(name)
            if rate not in rates:
                found.append((name, "this rate is not watched any more"))
            elif arm not in arms:
                found.append((name, f"the arm {arm} is not watched any more"))
        return found

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON's types."""
        return {name: shift.to_json() for name, shift in self._shifts.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `snapshot`. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._shifts = {name: _Shift.from_json(shift) for name, shift in state.items()}
