"""Rollouts in progress, read from the rollout worker's journal as it grows, with their groups and members.

Also the newest finished rollouts by episode, a fold over the lines of their record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ostinato.core.errors import BadRequest
from ostinato.core.records import PolicyVersion
from ostinato.status.progress_lines import FileTail, Spot
from ostinato.worlds.rollout.finished import Finished
from ostinato.worlds.rollout.groups import GroupMember, Groups, RolloutGroup, RolloutOutcome

MOST_GROUPS = 12
_MOST_MEMBERS = 1024
_LONGEST_NAME = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLine:
    """One rollout. `value`: its grade; None if it is not graded or not finished. `at`: when it ended.

    `ended`: how it ended; "waiting" or "under way" before that, when `at` is None. `seq`: its number among the records read. `policy`,
    `policy_last`: the oldest and the newest version that sampled a token.
    """

    seq: int = 0
    episode: str
    task: str
    family: str = ""
    split: str
    harness: str = ""
    group: str | None
    member: int | None
    at: float | None = None
    value: float | None
    solved: bool
    cheated: tuple[str, ...] = ()
    ended: str
    policy: PolicyVersion | None = None
    policy_last: PolicyVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUnderWay:
    """A group that the trainer has not taken yet. `told`: all its members have ended, and it waits for the trainer."""

    name: str
    task: str
    told: bool
    members: tuple[RolloutLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """The worker's groups: `drawn` so far, taken by the trainer (`spent`), in progress (`open`, including `told` ones).

    `at`: when the journal was last written.
    """

    drawn: int
    spent: int
    open: int
    told: int
    at: float | None


Recorded = Callable[[str, int], RolloutLine | None]
"""Returns a finished rollout, given its group's name and its number in the group."""


class UnderWay:
    """Folds the journal without writing to it. Call `look` first."""

    def __init__(self, path: Path) -> None:
        self._lines = FileTail([path])
        self._begin(b"", "")
        self.bad = 0

    def look(self) -> UnderWay:
        for spot, line in self._lines.new():
            if not self._apply(spot, line):
                self.bad += 1
        return self

    @property
    def behind(self) -> int:
        """Bytes that are not read yet."""
        return self._lines.behind

    def pacing(self) -> Pacing:
        """Return how many groups were drawn, and how many are in each state."""
        return Pacing(
            drawn=self._groups.drawn,
            spent=self._groups.spent,
            open=len(self._groups.open),
            told=sum(group.told for group in self._groups.open.values()),
            at=self._lines.at,
        )

    def groups(self, recorded: Recorded, most: int = MOST_GROUPS) -> tuple[GroupUnderWay, ...]:
        """Return the groups that the trainer has not taken, newest first."""
        newest = sorted(self._groups.open, reverse=True)[:most]
        return tuple(self._shown(self._groups.open[number], recorded) for number in newest)

    def group(self, name: str, recorded: Recorded) -> GroupUnderWay | None:
        found = next((group for group in self._groups.open.values() if group.name == name), None)
        return None if found is None else self._shown(found, recorded)

    def find(self, episode: str) -> tuple[RolloutLine, tuple[str, ...]] | None:
        """Return a rollout of an open group, with its turns if it has ended; None if there is no such rollout."""
        for group in self._groups.open.values():
            if not episode.startswith(f"{group.name}."):
                continue
            for member, slot in enumerate(group.slots):
                for outcome in (*slot.failed, *([] if slot.last is None else [slot.last])):
                    if outcome.episode == episode:
                        return _ended(group, member, outcome), outcome.turns
                if slot.begun and (line := _current(group, member, slot)).episode == episode:
                    return line, ()
        return None

    def _begin(self, name: bytes, token: str) -> None:
        self._name = name
        self._groups = self._next = Groups([], token=token, epochs=0)

    @property
    def tasks(self) -> Collection[str]:
        return self._groups.latest

    def _apply(self, spot: Spot, line: bytes) -> bool:
        event = _event(line)
        if event is None:
            return False
        if spot.name != self._name:  # another journal, so the groups of the previous one are gone
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
                members.append(_current(group, member, slot))
            else:
                members.append(recorded(group.name, member) or _ended(group, member, slot.last))
        return GroupUnderWay(name=group.name, task=group.task, told=group.told, members=tuple(members))


def _event(line: bytes) -> dict[str, Any] | None:
    """Parse a line as an event; None if it is not one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _current(group: RolloutGroup, member: int, slot: GroupMember) -> RolloutLine:
    """Return a member's newest rollout if it is in progress, or the one that it waits for."""
    state = "under way" if slot.begun > len(slot.failed) else "waiting"
    return _line(group, member, f"{group.name}.{member}.{max(0, slot.begun - 1)}", state, None)


def _ended(group: RolloutGroup, member: int, outcome: RolloutOutcome) -> RolloutLine:
    """Return a finished rollout of a member."""
    return _line(group, member, outcome.episode, "failed" if outcome.grade is None else "graded", outcome.grade)


def _line(group: RolloutGroup, member: int, episode: str, ended: str, grade: object) -> RolloutLine:
    value = cast("float", grade) if isinstance(grade, int | float) else None
    return RolloutLine(
        episode=episode,
        task=group.task,
        split="train",
        group=group.name,
        member=member,
        value=value,
        solved=value is not None and value >= 1.0,
        ended=ended,
    )


# ---------------------------------------------------------------- finished rollouts


MOST_KEPT = 20_000
"""How many of the newest finished rollouts are counted."""
_MOST_CHEATS = 20
_MOST_ENDED_MEMBERS = 1_000_000
_LATEST = 1e11  # Unix seconds; a later time cannot be written as a date


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRollout:
    """A finished rollout, and the position of its line."""

    line: RolloutLine
    taskset: str
    spot: Spot


class EndedRollouts:
    """Folds the lines of finished rollouts. A rollout that is recorded twice counts once, by its last line."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._by_episode: dict[str, EndedRollout] = {}
        self._groups: dict[str, dict[str, None]] = {}
        self._policies: dict[PolicyVersion, PolicyVersion] = {}
        self.read = 0
        self.bad = 0
        self.dropped = 0

    def take(self, lines: Iterable[tuple[Spot, bytes]]) -> None:
        """Add lines, oldest first. A line that is no record is counted in `bad`."""
        for spot, line in lines:
            record = record_of(line)
            found = None if record is None else self._ended_rollout(record, spot)
            if found is None:
                self.bad += 1
                continue
            self.read += 1
            self._forget(found.line.episode)
            self._by_episode[found.line.episode] = found
            if found.line.group is not None:
                self._groups.setdefault(found.line.group, {})[found.line.episode] = None
            if len(self._by_episode) > self._most:
                self._forget(next(iter(self._by_episode)))
                self.dropped += 1

    def __len__(self) -> int:
        return len(self._by_episode)

    def get(self, episode: str) -> EndedRollout | None:
        return self._by_episode.get(episode)

    def all(self) -> Iterable[EndedRollout]:
        return self._by_episode.values()

    def newest(self) -> Iterator[RolloutLine]:
        return (each.line for each in reversed(self._by_episode.values()))

    def of_group(self, name: str) -> list[RolloutLine]:
        """Return the members of a group, in order."""
        found = (self._by_episode[episode].line for episode in self._groups.get(name, ()))
        return sorted(found, key=lambda line: (line.member or 0, line.episode))

    def member(self, group: str, number: int) -> RolloutLine | None:
        """Return a member of a group, from its last line."""
        found = (self._by_episode[episode].line for episode in reversed(self._groups.get(group, {})))
        return next((line for line in found if line.member == number), None)

    def _forget(self, episode: str) -> None:
        gone = self._by_episode.pop(episode, None)
        if gone is not None and gone.line.group is not None:
            of_group = self._groups[gone.line.group]
            del of_group[episode]
            if not of_group:
                del self._groups[gone.line.group]

    def _ended_rollout(self, record: Finished, spot: Spot) -> EndedRollout | None:
        if not record.episode or not record.task or not 0 <= record.at < _LATEST:
            return None
        member = record.member
        line = RolloutLine(
            seq=self.read,
            episode=_name(record.episode),
            task=_name(record.task),
            family=_name(record.family),
            split=record.split.value,
            harness=_name(record.harness),
            group=_name(record.group or "") or None,
            member=member if member is not None and 0 <= member < _MOST_ENDED_MEMBERS else None,
            at=record.at,
            value=record.value,
            solved=record.solved,
            cheated=tuple(map(_name, record.cheated[:_MOST_CHEATS])),
            ended=record.ended.value,
            policy=self._policy(record.policy),
            policy_last=self._policy(record.policy_last),
        )
        return EndedRollout(line=line, taskset=_name(record.taskset), spot=spot)

    def _policy(self, policy: PolicyVersion | None) -> PolicyVersion | None:
        """Intern a policy. Return None (shown as a dash) for a number or hash that no trainer produces."""
        if policy is None or not 0 <= policy.number < 1 << 53 or len(policy.hash) > _LONGEST_NAME:
            return None
        return self._policies.setdefault(policy, policy)


def record_of(line: bytes) -> Finished | None:
    """Parse a line as a record; None if it is not one."""
    try:
        return Finished.read(line.decode())
    except (UnicodeDecodeError, BadRequest):
        return None


def _name(text: str) -> str:
    """Cut a text to a length limit, and intern it."""
    return sys.intern(text[:_LONGEST_NAME])
