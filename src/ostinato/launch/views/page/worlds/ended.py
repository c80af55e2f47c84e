"""The newest finished rollouts by episode, as a fold over the lines of their record."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ostinato.core.errors import BadRequest
from ostinato.core.records import PolicyVersion
from ostinato.launch.views.page.worlds.file_tail import Spot
from ostinato.web.page.worlds.sources import RolloutLine
from ostinato.worlds.rollout.finished import Finished

MOST_KEPT = 20_000
"""How many of the newest rollouts are counted."""
_LONGEST_NAME = 512
_MOST_CHEATS = 20
_MOST_MEMBERS = 1_000_000
_LATEST = 1e11  # a later time cannot be written as a date


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRollout:
    """A finished rollout, and the place of its line."""

    line: RolloutLine
    taskset: str
    spot: Spot


class EndedRollouts:
    """Folds lines of the record. A rollout that is recorded twice counts once, by its last line.

    Example: ``EndedRollouts().take([(spot, b'{"episode": "w3f.0.2.0", "task": "calc-1", ...}')])``
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._by_episode: dict[str, EndedRollout] = {}
        self._groups: dict[str, dict[str, None]] = {}
        self._policies: dict[PolicyVersion, PolicyVersion] = {}
        self.read = 0
        self.bad = 0
        self.dropped = 0

    def take(self, lines: Iterable[tuple[Spot, bytes]]) -> None:
        """Take in lines, oldest first. A line that is no record is counted in `bad`."""
        for spot, line in lines:
            record = record_of(line)
            found = None if record is None else self._found(record, spot)
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
        """The rollout of an episode, or None."""
        return self._by_episode.get(episode)

    def all(self) -> Iterable[EndedRollout]:
        """All, oldest first."""
        return self._by_episode.values()

    def newest(self) -> Iterator[RolloutLine]:
        """All, newest first."""
        return (each.line for each in reversed(self._by_episode.values()))

    def of_group(self, name: str) -> list[RolloutLine]:
        """The members of a group, in their order."""
        found = (self._by_episode[episode].line for episode in self._groups.get(name, ()))
        return sorted(found, key=lambda line: (line.member or 0, line.episode))

    def member(self, group: str, number: int) -> RolloutLine | None:
        """A member of a group, by its last line."""
        found = (self._by_episode[episode].line for episode in reversed(self._groups.get(group, {})))
        return next((line for line in found if line.member == number), None)

    def _forget(self, episode: str) -> None:
        gone = self._by_episode.pop(episode, None)
        if gone is not None and gone.line.group is not None:
            of_group = self._groups[gone.line.group]
            del of_group[episode]
            if not of_group:
                del self._groups[gone.line.group]

    def _found(self, record: Finished, spot: Spot) -> EndedRollout | None:
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
            member=member if member is not None and 0 <= member < _MOST_MEMBERS else None,
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
        """One object for all equal policies; None (shown as a dash) for a number or hash that no trainer makes."""
        if policy is None or not 0 <= policy.number < 1 << 53 or len(policy.hash) > _LONGEST_NAME:
            return None
        return self._policies.setdefault(policy, policy)


def record_of(line: bytes) -> Finished | None:
    """A line parsed as a record; None if it is none."""
    try:
        return Finished.read(line.decode())
    except (UnicodeDecodeError, BadRequest):
        return None


def _name(text: str) -> str:
    """The text cut to a length limit, as one object for all equal texts."""
    return sys.intern(text[:_LONGEST_NAME])
