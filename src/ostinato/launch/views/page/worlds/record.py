"""The details of one finished rollout's record beyond its line in a list, always bounded in size. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from ostinato.launch.views.page.worlds.wording import part_of
from ostinato.web.page.worlds.sources import FileChange
from ostinato.worlds.rollout.finished import Finished

_MOST_TURNS = 10_000
_MOST_FIGURES = 60
_MOST_CHANGES = 60
_MOST_CHARACTERS = 40_000
_LONGEST_WHY = 4_000


def turns_of(ids: Sequence[object]) -> list[str]:
    """The ids of the rollout's turns."""
    return [each for each in ids[:_MOST_TURNS] if isinstance(each, str) and len(each) <= 512]


def figures_of(named: Mapping[str, float]) -> dict[str, float]:
    """The first `_MOST_FIGURES` named numbers."""
    return {name[:120]: number for name, number in islice(named.items(), _MOST_FIGURES)}


def why_of(record: Finished) -> str:
    """The reason for the grade, for people."""
    return part_of("", record.why, _LONGEST_WHY).text


def changes_of(record: Finished) -> tuple[tuple[FileChange, ...], int]:
    """The rollout's file changes, and how many more there are."""
    left = _MOST_CHARACTERS
    found: list[FileChange] = []
    for change in record.changes[:_MOST_CHANGES]:
        text = None if change.diff is None else change.diff[:left]
        left -= len(text or "")
        cut = len(change.diff or "") - len(text or "")
        found.append(FileChange(path=change.path[:1024], kind=change.kind.value, diff=text, cut=cut))
    return tuple(found), max(0, len(record.changes) - _MOST_CHANGES)
