"""The rollouts that ended, as a fold over the lines of their record: the newest, each under its episode's name."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ostinato.core.records import PolicyVersion
from ostinato.launch.views.page.worlds.growing import Spot
from ostinato.web.page.worlds.sources import RolloutLine

MOST_KEPT = 20_000
"""Rollouts that are counted, the newest."""
_LONGEST_NAME = 512
_MOST_CHEATS = 20


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
        self._policies: dict[tuple[int, str], PolicyVersion] = {}
        self.read = 0
        self.bad = 0
        self.dropped = 0

    def take(self, lines: Iterable[tuple[Spot, bytes]]) -> None:
        """Take in lines, oldest first. What is no record is counted."""
        for spot, line in lines:
            fields = record(line)
            found = None if fields is None else self._found(fields, spot)
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

    def _forget(self, episode: str) -> None:
        gone = self._by_episode.pop(episode, None)
        if gone is not None and gone.line.group is not None:
            of_group = self._groups[gone.line.group]
            del of_group[episode]
            if not of_group:
                del self._groups[gone.line.group]

    def _found(self, fields: Mapping[str, Any], spot: Spot) -> EndedRollout | None:
        episode, task = _name(fields.get("episode")), _name(fields.get("task"))
        at, value, member = _number(fields.get("at")), _number(fields.get("value")), fields.get("member")
        if not episode or not task or at is None or not 0 <= at < 1e11 or (value is not None and not 0 <= value <= 1):
            return None
        cheated = fields.get("cheated")
        line = RolloutLine(
            seq=self.read,
            episode=episode,
            task=task,
            family=_name(fields.get("family")),
            split=_name(fields.get("split")),
            harness=_name(fields.get("harness")),
            group=_name(fields.get("group")) or None,
            member=member if isinstance(member, int) and 0 <= member < 1_000_000 else None,
            at=at,
            value=value,
            solved=fields.get("solved") is True,
            cheated=tuple(_name(each) for each in cast("list[Any]", cheated)[:_MOST_CHEATS] if each)
            if isinstance(cheated, list)
            else (),
            ended=_name(fields.get("ended")),
            policy=self._policy(fields.get("policy")),
            policy_last=self._policy(fields.get("policy_last")),
        )
        return EndedRollout(line=line, taskset=_name(fields.get("taskset")), spot=spot)

    def _policy(self, value: object) -> PolicyVersion | None:
        if not isinstance(value, dict):
            return None
        fields = cast("dict[str, Any]", value)
        number, hash_ = fields.get("number"), fields.get("hash")
        if not isinstance(number, int) or not 0 <= number < 1 << 53 or not isinstance(hash_, str):
            return None
        made = self._policies.get((number, hash_[:128]))
        if made is None:
            made = self._policies[number, hash_[:128]] = PolicyVersion(number=number, hash=hash_[:128])
        return made


def record(line: bytes) -> dict[str, Any] | None:
    """A line as an object; None for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _name(value: object) -> str:
    """A short text, one object for all that are alike; "" for what is no text."""
    return sys.intern(value[:_LONGEST_NAME]) if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
