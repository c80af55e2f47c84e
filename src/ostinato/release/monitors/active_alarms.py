"""The raised alarms and what clears each of them: alarms about behaviour rates, and alarms about a gap between two groups of people."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm
from ostinato.release.monitors.detector import ReturnTest, Shifted

PREFIX = "monitor:"
ACCEPTED = "accepted"
LOOK_S = 3_600.0
_EVERYBODY = "everybody"

# ---------------------------------------------------------------- an alarm about a gap


class GapAlarm:
    """An alarm about a gap between two groups of people, who are counted for one period, compared hourly, and then counted anew.

    It stays raised until a whole period has passed in which the gap was not found again, or until a person accepts it; after that, only a
    larger gap is found. A negative gap has the other direction: it is reported even while the alarm is raised for a positive one.

    Attributes:
        since: when the current period began.
        last: the gap that was found last.
        tolerated, tolerated_below: the largest gap that is tolerated in either direction.

    Args:
        name: the alarm's name.
        tolerated: the tolerance in both directions until a person accepts more.
        former: the alarm's name in logs of earlier versions; an alarm raised under it is cleared under it.
    """

    def __init__(self, name: str, tolerated: float = 0.0, *, former: str = "") -> None:
        self._name, self._former, self._least = name, former, tolerated
        self.stands = ""  # the name under which it is raised, "" if it is not
        self.found = False  # whether the gap was found in the current period
        self.since: float | None = None
        self._looked = 0.0
        self.last, self.tolerated, self.tolerated_below = 0.0, tolerated, tolerated

    @property
    def standing(self) -> list[str]:
        """The alarm's name while it is raised."""
        return [self.stands] if self.stands else []

    def begin(self, alarms: Mapping[str, Alarm]) -> None:
        """Begin without a saved state: the alarm is raised if the log says so."""
        names = (self._name, self._former)
        self.stands = next((n for n in names if n in alarms and alarms[n].state is AlarmState.RAISED), "")

    def lasted(self, at: float) -> float:
        """Return how many seconds the current period has lasted. The first call begins the first period."""
        if self.since is None:
            self.since = self._looked = at
        return at - self.since

    def look_due(self, at: float) -> bool:
        """Return true once an hour, when the caller is to compare the groups."""
        due = at - self._looked >= LOOK_S
        self._looked = at if due else self._looked
        return due

    def find(self, gap: float) -> bool:
        """Note that this gap was found. Return true if the alarm must be raised: it is not, or it is for the other direction."""
        news = not self.stands or gap * self.last < 0.0
        self.found, self.last = True, gap
        return news

    def anew(self, at: float) -> Iterator[Alarm]:
        """Begin the next period. Clear the alarm if the last one did not find the gap."""
        if self.stands and not self.found:
            yield self.cleared("it was not found again since both sides were counted anew", at)
        self.since, self.found = at, False

    def end(self, why: str, at: float) -> Iterator[Alarm]:
        """Clear the alarm if it is raised, because nothing is counted any more."""
        if self.stands:
            yield self.cleared(why, at)

    def accepted(self, row: Alarm) -> bool:
        """Apply a row if it is a person's acceptance of the gap that was found last. Return whether it is."""
        if row.name not in (self._name, self._former) or row.detail.get(ACCEPTED) is not True:
            return False
        self.stands = ""
        self.tolerated, self.tolerated_below = max(self.tolerated, self.last), max(self.tolerated_below, -self.last)
        return True

    def raised(self, reason: str, at: float, detail: Mapping[str, Any]) -> Alarm:
        """Return the row that raises the alarm, without an id."""
        self.stands = self._name
        return Alarm(id="", name=self._name, state=AlarmState.RAISED, reason=reason, at=at, detail=detail)

    def cleared(self, reason: str, at: float) -> Alarm:
        """Return the row that clears the alarm, without an id."""
        name, self.stands = self.stands, ""
        return Alarm(id="", name=name, state=AlarmState.CLEARED, reason=reason, at=at)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
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
        """Restore what `snapshot` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        self.since = None if state["since"] is None else float(state["since"])
        self._looked, self.found, self.stands = float(state["looked"]), bool(state["found"]), str(state["stands"])
        self.last = float(state["last_gap"])
        self.tolerated, self.tolerated_below = (
            max(self._least, float(state[name])) for name in ("tolerated", "tolerated_below")
        )


# ---------------------------------------------------------------- alarms about rates


def alarm_name(rate: str, arm: str) -> str:
    """Return the name of the alarm about a rate on an arm.

    Example: ``alarm_name("edit", "live") == "monitor:edit"``, ``alarm_name("edit", "canary") == "monitor:edit:canary"``
    """
    return f"{PREFIX}{rate}" if arm == Arm.LIVE else f"{PREFIX}{rate}:{arm}"


def is_about_a_rate(name: str) -> bool:
    """Return true for the name of an alarm about a rate."""
    return name.startswith(PREFIX)


def _parts(name: str) -> tuple[str, str]:
    """Return the rate and the arm that an alarm is about: the inverse of `alarm_name`."""
    rate, _, arm = name.removeprefix(PREFIX).partition(":")
    return rate, arm or Arm.LIVE.value


_Group = tuple[int | None, str]
"""A decile of activity or everybody (None), and one reference: an arm, or "" for the learned rate."""


@dataclass(slots=True, kw_only=True)
class _Shift:
    harmful: bool
    groups: dict[_Group, ReturnTest] = field(default_factory=dict[_Group, ReturnTest])

    def to_json(self) -> dict[str, Any]:
        groups = {
            f"{_EVERYBODY if decile is None else decile}@{against}": back.to_json()
            for (decile, against), back in self.groups.items()
        }
        return {"harmful": self.harmful, "groups": groups}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        groups = {_group(key): ReturnTest.from_json(back) for key, back in state["groups"].items()}
        return cls(harmful=bool(state["harmful"]), groups=groups)


def _group(key: str) -> _Group:
    decile, _, against = key.partition("@")
    return None if decile == _EVERYBODY else int(decile), against


class RaisedShifts:
    """The groups in which a rate has shifted, and whether that is harmful, for each raised alarm about a rate."""

    def __init__(self) -> None:
        self._shifts: dict[str, _Shift] = {}

    @property
    def names(self) -> list[str]:
        """The names of the raised alarms."""
        return list(self._shifts)

    @property
    def harmful(self) -> list[str]:
        """The raised alarms that pause shipping."""
        return [name for name, shift in self._shifts.items() if shift.harmful]

    def return_tests(self, name: str, decile: int | None) -> list[tuple[str, ReturnTest]]:
        """Return the tests for the return of a group's rate, each with the reference from which the rate has shifted."""
        groups = self._shifts[name].groups if name in self._shifts else {}
        return [(against, back) for (of, against), back in groups.items() if of == decile]

    def has(self, name: str, decile: int | None, against: str) -> bool:
        """Return true if a group's rate has shifted from this reference."""
        return name in self._shifts and (decile, against) in self._shifts[name].groups

    def add(self, name: str, decile: int | None, against: str, shifted: Shifted, *, harmful: bool) -> bool:
        """Note that a group has shifted. Return true if the alarm must be written: it is new, or this is its first harmful shift."""
        known = self._shifts.get(name)
        news = known is None or (harmful and not known.harmful)
        shift = self._shifts.setdefault(name, _Shift(harmful=False))
        shift.harmful = shift.harmful or harmful
        shift.groups[decile, against] = ReturnTest(shifted.observed - shifted.expected)
        return news

    def back(self, name: str, decile: int | None, against: str) -> bool:
        """Note that a group is back. Return true if it was the last one."""
        groups = self._shifts[name].groups
        groups.pop((decile, against), None)
        return not groups

    def clear(self, name: str, why: str, at: float) -> Alarm:
        """Clear an alarm. Return the row that does so, without an id."""
        self.forget(name)
        return Alarm(id="", name=name, state=AlarmState.CLEARED, reason=why, at=at)

    def forget(self, name: str) -> None:
        """Clear an alarm without a row."""
        self._shifts.pop(name, None)

    def heard(self, row: Alarm) -> None:
        """Take over an alarm from its row in the log after its state was lost.

        If the row says too little to test whether the rate is back, the alarm stays raised until a person accepts it.
        """
        observed, reference, decile = (row.detail.get(key) for key in ("observed", "reference", "decile"))
        shift = self._shifts[row.name] = _Shift(harmful=row.detail.get("pauses") is not False)
        if isinstance(observed, int | float) and isinstance(reference, int | float):
            group = decile if isinstance(decile, int) else None, str(row.detail.get("against") or "")
            shift.groups[group] = ReturnTest(float(observed) - float(reference), row.at)

    def gaps(self, name: str) -> Iterator[tuple[str, str, int | None, str, float]]:
        """Yield rate, arm, decile, reference, and how far the group has shifted; for a decile, beyond everybody's shift if there is one."""
        rate, arm = _parts(name)
        shift = self._shifts.get(name)
        groups = {} if shift is None else shift.groups
        for (decile, against), back in groups.items():
            overall = groups.get((None, against))
            beyond = 0.0 if decile is None or overall is None else overall.gap
            yield rate, arm, decile, against, back.gap - beyond

    def on_arm(self, arm: str) -> list[str]:
        """Return the alarms about an arm."""
        return [name for name in self._shifts if _parts(name)[1] == arm]

    def unwatched(self, rates: Container[str], arms: Container[str]) -> list[tuple[str, str]]:
        """Return the alarms about a rate that is not in `rates` or an arm that is not in `arms`, and why they are cleared."""
        found: list[tuple[str, str]] = []
        for name in self._shifts:
            rate, arm = _parts(name)
            if rate not in rates:
                found.append((name, "this rate is not watched any more"))
            elif arm not in arms:
                found.append((name, f"the arm {arm} is not watched any more"))
        return found

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {name: shift.to_json() for name, shift in self._shifts.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        self._shifts = {name: _Shift.from_json(shift) for name, shift in state.items()}
