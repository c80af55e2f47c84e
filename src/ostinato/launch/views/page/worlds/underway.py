"""The rollout worker's journal as it grows: groups under way and their members."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

from ostinato.launch.views.page.worlds.file_tail import Growing, Spot
from ostinato.web.page.worlds.sources import GroupUnderWay, Pacing, RolloutLine
from ostinato.worlds.rollout.groups import GroupMember, Groups, RolloutGroup

MOST_GROUPS = 12
_MOST_MEMBERS = 1024
_LONGEST_NAME = 512

Recorded = Callable[[str, int], RolloutLine | None]
"""Finds the line of a finished rollout by its group's name and its number in the group."""


class UnderWay:
    """Folds the journal without writing to it. Call `look` first."""

    def __init__(self, path: Path) -> None:
        self._lines = Growing([path])
        self._begin(b"", "")
        self.bad = 0

    def look(self) -> UnderWay:
        """Read new lines."""
        for spot, line in self._lines.new():
            if not self._apply(spot, line):
                self.bad += 1
        return self

    @property
    def behind(self) -> int:
        """Bytes that are not read yet."""
        return self._lines.behind

    def pacing(self) -> Pacing:
        """How many groups were drawn, and how many are in each state."""
        return Pacing(
            drawn=self._groups.drawn,
            spent=self._groups.spent,
            open=len(self._groups.open),
            told=sum(group.told for group in self._groups.open.values()),
            at=self._lines.at,
        )

    def groups(self, recorded: Recorded, most: int = MOST_GROUPS) -> tuple[GroupUnderWay, ...]:
        """Groups that the trainer has not taken, the newest first."""
        newest = sorted(self._groups.open, reverse=True)[:most]
        return tuple(self._shown(self._groups.open[number], recorded) for number in newest)

    def group(self, name: str, recorded: Recorded) -> GroupUnderWay | None:
        """An open group by its name."""
        found = next((group for group in self._groups.open.values() if group.name == name), None)
        return None if found is None else self._shown(found, recorded)

    def find(self, episode: str) -> tuple[RolloutLine, tuple[str, ...]] | None:
        """A rollout of an open group, under way or ended, and its turns if it has ended; None if there is no such rollout."""
        for group in self._groups.open.values():
            if not episode.startswith(f"{group.name}."):
                continue
            for member, slot in enumerate(group.slots):
                for outcome in (*slot.failed, *([] if slot.last is None else [slot.last])):
                    if outcome.episode == episode:
                        ended = "failed" if outcome.grade is None else "graded"
                        return _line(group, member, episode, ended, outcome.grade), outcome.turns
                if _current(group, member, slot) == episode and slot.begun:
                    return _line(group, member, episode, _state(slot), None), ()
        return None

    def _begin(self, name: bytes, token: str) -> None:
        self._name = name
        self._groups = self._next = Groups([], token=token, epochs=0)

    @property
    def tasks(self) -> Collection[str]:
        """The tasks that were ever drawn."""
        return self._groups.latest

    def _apply(self, spot: Spot, line: bytes) -> bool:
        event = _event(line)
        if event is None:
            return False
        if spot.name != self._name:  # another journal: the groups of the previous one are gone
            token = str(event.get("token", ""))[:64]
            if token == self._groups.token and "lines" in event:
                # the journal was rewritten: show the known groups until the new file is read
                self._name, self._next = spot.name, Groups([], token=token, epochs=0)
            else:
                self._begin(spot.name, token)
        try:
            if event["kind"] == "opened":
                return True
            if event["kind"] == "drawn":
                if not (isinstance(event["task"], str) and 0 < event["size"] <= _MOST_MEMBERS):
                    return False
                event["task"] = event["task"][:_LONGEST_NAME]
            self._next.apply(event)
            if event["kind"] == "counted":
                self._groups = self._next
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            return False
        return True

    def _shown(self, group: RolloutGroup, recorded: Recorded) -> GroupUnderWay:
        members: list[RolloutLine] = []
        for member, slot in enumerate(group.slots):
            if slot.last is None:
                members.append(_line(group, member, _current(group, member, slot), _state(slot), None))
                continue
            known = recorded(group.name, member)
            ended = "failed" if slot.last.grade is None else "graded"
            members.append(known or _line(group, member, slot.last.episode, ended, slot.last.grade))
        return GroupUnderWay(name=group.name, task=group.task, told=group.told, members=tuple(members))


def _event(line: bytes) -> dict[str, Any] | None:
    """A line parsed as an event; None if it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _current(group: RolloutGroup, member: int, slot: GroupMember) -> str:
    """The name of the last episode begun."""
    return f"{group.name}.{member}.{max(0, slot.begun - 1)}"


def _state(slot: GroupMember) -> str:
    return "under way" if slot.begun > len(slot.failed) else "waiting"


def _line(group: RolloutGroup, member: int, episode: str, ended: str, grade: object) -> RolloutLine:
    value = cast("float", grade) if isinstance(grade, int | float) else None
    return RolloutLine(
        seq=0,
        episode=episode,
        task=group.task,
        family="",
        split="train",
        harness="",
        group=group.name,
        member=member,
        at=None,
        value=value,
        solved=value is not None and value >= 1.0,
        cheated=(),
        ended=ended,
    )
