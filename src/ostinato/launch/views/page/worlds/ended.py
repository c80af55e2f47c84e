"""The rollouts that ended, as a fold over the lines of their record: the newest, each under its episode's name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ostinato.core.errors import BadRequest
from ostinato.core.records import PolicyVersion
from ostinato.launch.views.page.worlds.growing import Spot
from ostinato.web.page.worlds.sources import RolloutLine
from ostinato.worlds.rollout.finished import Finished

MOST_KEPT = 20_000
"""Rollouts that are counted, the newest."""
_LONGEST_NAME = 512
_MOST_CHEATS = 20
_MOST_MEMBERS = 1_000_000
_LATEST = 1e11  # a clock beyond it cannot be written as a date


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRollout:
    """One of them, and where its line is."""

    line: RolloutLine
    taskset: str
    spot: Spot


class EndedRollouts:
    """Takes lines in; a rollout that is told twice counts once, as it was told last.

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
        """Take in lines, oldest first. What is no record is counted."""
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
        """One of them."""
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
        """A member of a group, as it was told last."""
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
        """One object for all that are alike; a dash is shown for one that no trainer numbers so."""
        if policy is None or not 0 <= policy.number < 1 << 53 or len(policy.hash) > _LONGEST_NAME:
            return None
        return self._policies.setdefault(policy, policy)


def record_of(line: bytes) -> Finished | None:
    """A line as the record that it is; None for anything else."""
    try:
        return Finished.read(line.decode())
    except (UnicodeDecodeError, BadRequest):
        return None


def _name(text: str) -> str:
    """A short text, one object for all that are alike."""
    return sys.intern(text[:_LONGEST_NAME])
