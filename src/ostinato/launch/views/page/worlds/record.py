"""The fields of one finished rollout's record that are read only when it is looked at: bounded, whatever they hold. Pure."""

from __future__ import annotations

import math
from typing import Any, cast

from ostinato.launch.views.page.worlds.wording import part_of
from ostinato.web.page.worlds.sources import FileChange

_MOST_TURNS = 10_000
_MOST_FIGURES = 60
_MOST_CHANGES = 60
_MOST_CHARACTERS = 40_000
_LONGEST_WHY = 4_000


def turns_of(value: object) -> list[str]:
    """The ids of its turns."""
    found = cast("list[Any]", value)[:_MOST_TURNS] if isinstance(value, list) else []
    return [each for each in found if isinstance(each, str) and len(each) <= 512]


def figures_of(value: object) -> dict[str, float]:
    """Named numbers. Example: ``figures_of({"turns": 3, "x": "y"}) == {"turns": 3.0}``"""
    found = list(cast("dict[Any, Any]", value).items())[:_MOST_FIGURES] if isinstance(value, dict) else []
    return {
        name[:120]: float(number)
        for name, number in found
        if isinstance(number, int | float) and abs(number) < 1e300 and math.isfinite(number)
    }


def text_of(value: object) -> str:
    """A text for people."""
    return part_of("", value, _LONGEST_WHY).text if isinstance(value, str) else ""


def changes_of(fields: object) -> tuple[tuple[FileChange, ...], int]:
    """What it changed, and how many further files that is."""
    value = cast("dict[str, Any]", fields).get("changes") if isinstance(fields, dict) else None
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    left = _MOST_CHARACTERS
    found: list[FileChange] = []
    for each in listed[:_MOST_CHANGES]:
        if not isinstance(each, dict):
            continue
        change = cast("dict[str, Any]", each)
        diff = change.get("diff")
        text = diff[:left] if isinstance(diff, str) else None
        left -= len(text or "")
        found.append(
            FileChange(
                path=str(change.get("path", ""))[:1024],
                kind=str(change.get("kind", ""))[:40],
                diff=text,
                cut=len(diff) - len(text) if isinstance(diff, str) and text is not None else 0,
            )
        )
    return tuple(found), max(0, len(listed) - _MOST_CHANGES)
