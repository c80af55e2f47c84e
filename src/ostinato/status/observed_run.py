"""Observes a run from outside, by following its log and its workers' progress lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ostinato.core.records import Holdback, ReleaseEvent, Reward, Signal, Turn
from ostinato.core.seams import Log
from ostinato.evaluate.acceptance import Rated
from ostinato.run_directory import Home
from ostinato.status.progress_lines import Lines


@dataclass(slots=True)
class Observed:
    """Everything seen so far, in order."""

    rated: list[Rated] = field(default_factory=list[Rated])
    releases: list[ReleaseEvent] = field(default_factory=list[ReleaseEvent])
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    published: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    swaps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refused: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    numerics: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    held: Counter[str] = field(default_factory=Counter[str])
    turns: int = 0
    tokens: int = 0
    signals: int = 0

    def shipped(self) -> list[ReleaseEvent]:
        """Releases after the starting model."""
        return [event for event in self.releases if event.action == "shipped" and event.previous is not None]

    def between(self, start: float, end: float) -> list[Rated]:
        """Rated turns that started in [start, end)."""
        return [each for each in self.rated if start <= each[0].started_at < end]


class RunObserver:
    """Follows one run. `look` reads new rows and lines."""

    def __init__(self, place: Home, log: Log) -> None:
        self.seen = Observed()
        self._log = log
        self._cursor = 0
        self._unrated: dict[str, Turn] = {}
        self._lines = [Lines(place.progress("train")), Lines(place.progress("serve"))]

    async def look(self) -> Observed:
        """Read new rows and lines."""
        kinds: set[type] = {Turn, Signal, Reward, Holdback, ReleaseEvent}
        async for cursor, row in self._log.read(self._cursor, kinds):
            self._cursor = cursor
            self._row(row)
        lists = {
            "step": self.seen.steps,
            "published": self.seen.published,
            "swapped": self.seen.swaps,
            "refused": self.seen.refused,
            "numerics": self.seen.numerics,
        }
        for lines in self._lines:
            for line in lines.new():
                if line["kind"] in lists:
                    lists[line["kind"]].append(line)
        return self.seen

    def _row(self, row: object) -> None:
        seen = self.seen
        match row:
            case Turn():
                seen.turns += 1
                seen.tokens += sum(span.tokens for span in row.spans)
                if row.arm.people and row.counts:
                    self._unrated[row.id] = row
            case Reward():
                turn = self._unrated.pop(row.turn, None)
                if turn is not None:
                    seen.rated.append((turn, row))
            case Holdback():
                seen.held[row.reason.partition(": ")[0].partition(":")[0]] += 1
            case Signal():
                seen.signals += 1
            case ReleaseEvent():
                seen.releases.append(row)
            case _:
                pass
