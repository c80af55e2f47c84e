"""The behaviour alarms that stand, and how each would end."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm
from ostinato.release.monitors.detector import Shifted, WayBack

PREFIX = "monitor:"
ACCEPTED = "accepted"
_EVERYBODY = "everybody"


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


@dataclass(slots=True, kw_only=True)
class _Shift:
    harmful: bool
    groups: dict[str, WayBack] = field(default_factory=dict[str, WayBack])

    def to_json(self) -> dict[str, Any]:
        return {"harmful": self.harmful, "groups": {group: back.to_json() for group, back in self.groups.items()}}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        groups = {group: WayBack.from_json(back) for group, back in state["groups"].items()}
        return cls(harmful=bool(state["harmful"]), groups=groups)


class StandingShifts:
    """By alarm: the groups in which its rate has shifted, and whether that is harmful.

    A group is a decile, or everybody (None), against one reference: an arm, or "" for what was learned.
    """

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
        return [(against, back) for group, back in groups.items() for of, against in [_parse(group)] if of == decile]

    def has(self, name: str, decile: int | None, against: str) -> bool:
        """True if a group's rate has shifted against this reference."""
        return name in self._shifts and _group(decile, against) in self._shifts[name].groups

    def add(self, name: str, decile: int | None, against: str, shifted: Shifted, *, harmful: bool) -> bool:
        """Note that a group has shifted. True if that is news: no alarm stood about this rate, or the shift is the first harmful one."""
        known = self._shifts.get(name)
        news = known is None or (harmful and not known.harmful)
        shift = self._shifts.setdefault(name, _Shift(harmful=False))
        shift.harmful = shift.harmful or harmful
        shift.groups[_group(decile, against)] = WayBack(shifted.observed - shifted.expected)
        return news

    def back(self, name: str, decile: int | None, against: str) -> bool:
        """Note that a group is back. True if it was the last one."""
        groups = self._shifts[name].groups
        groups.pop(_group(decile, against), None)
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
            group = _group(decile if isinstance(decile, int) else None, str(row.detail.get("against") or ""))
            shift.groups[group] = WayBack(float(observed) - float(reference), row.at)

    def gaps(self, name: str) -> Iterator[tuple[str, str, int | None, str, float]]:
        """Rate, arm, decile, reference, and how far the group has shifted; for a decile, beyond everybody's shift if there is one."""
        rate, arm = _parts(name)
        shift = self._shifts.get(name)
        groups = {} if shift is None else shift.groups
        for group, back in groups.items():
            decile, against = _parse(group)
            overall = groups.get(_group(None, against))
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


def _group(decile: int | None, against: str) -> str:
    return f"{_EVERYBODY if decile is None else decile}@{against}"


def _parse(group: str) -> tuple[int | None, str]:
    decile, _, against = group.partition("@")
    return None if decile == _EVERYBODY else int(decile), against
