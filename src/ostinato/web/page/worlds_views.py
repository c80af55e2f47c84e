"""The facts of the pages of simulated worlds, as their templates need them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from ostinato.core.errors import NotFound
from ostinato.core.visitors import Visitor
from ostinato.status.threads import Threads
from ostinato.status.worlds.run_worlds import RolloutQuery, RunWorlds, WorldsNow
from ostinato.status.worlds.tasks import SolvedCurve, SolvedShare, VersionPoint
from ostinato.status.worlds.underway import RolloutLine
from ostinato.web.chart import Scale, axis
from ostinato.web.page.charts import release_marks
from ostinato.web.page.query_params import place, words
from ostinato.web.page.templates import percent

# ---------------------------------------------------------------- drawing


_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 660.0, 26.0, 226.0
_CLASSES = ("arm-live", "arm-other")
MOST_LINES = 1_500


def success_chart(curves: Sequence[SolvedCurve], marks: Sequence[tuple[int, str]]) -> Markup:
    """The share that was solved over versions, with 95% intervals; a dashed line for each released version. Empty without a point."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return Markup("")
    first, last = min(point.first for point in points), max(point.last for point in points)
    x_axis, y_axis = axis(first, max(last, first + 1), min(8, max(last - first, 1))), axis(0.0, 1.0, 5)
    x, y = x_axis.scale(_LEFT, _RIGHT), y_axis.scale(_BOTTOM, _TOP)
    parts = [
        *(
            Markup('<line class="grid" x1="{:g}" x2="{:g}" y1="{:.1f}" y2="{:.1f}"/>').format(_LEFT, _RIGHT, y(t), y(t))
            + Markup('<text class="axis" x="{:g}" y="{:.1f}" text-anchor="end">{:g}%</text>').format(
                _LEFT - 8, y(t) + 4, 100 * t
            )
            for t in y_axis.ticks
        ),
        *(
            Markup('<text class="axis" x="{:.1f}" y="{:g}" text-anchor="middle">v{:g}</text>').format(
                x(t), _BOTTOM + 18, t
            )
            for t in x_axis.ticks
            if t == int(t)
        ),
        *release_marks(marks, x, _TOP, _BOTTOM, first, last),
    ]
    for number, (curve, kind) in enumerate(zip(curves, _CLASSES, strict=False)):
        parts += _curve(curve, kind, lambda value, by=4.0 * number: x(value) + by, y)  # whiskers beside each other
    said = "; ".join(
        f"{curve.name} {_share(curve.points[-1].solved)} at {versions_of(curve.points[-1])}" for curve in curves
    )
    return Markup('<svg class="chart success" viewBox="0 0 760 252" role="img" aria-label="{}">{}</svg>').format(
        f"Share of rollouts that were solved, by version, with 95% intervals. Newest: {said}.", Markup("").join(parts)
    )


def versions_of(point: VersionPoint) -> str:
    """The versions of a point. Example: ``v4 to v6``"""
    return f"v{point.first}" if point.first == point.last else f"v{point.first} to v{point.last}"


def _share(solved: SolvedShare) -> str:
    return f"{percent(solved.share)} [{percent(solved.lower)}, {percent(solved.upper)}]"


def _curve(curve: SolvedCurve, kind: str, x: Scale, y: Scale) -> list[Markup]:
    places = [(x((point.first + point.last) / 2), point.solved) for point in curve.points]
    parts = [
        Markup('<line class="whisker {}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(
            kind, at, at, y(solved.lower), y(solved.upper)
        )
        for at, solved in places
    ]
    path = " ".join(f"{at:.1f},{y(solved.share):.1f}" for at, solved in places)
    parts.append(Markup('<polyline class="line {}" points="{}"/>').format(kind, path))
    parts += [
        Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="3.2"><title>{} {}: {}</title></circle>').format(
            kind, at, y(point.solved.share), curve.name, versions_of(point), _share(point.solved)
        )
        for (at, _), point in zip(places, curve.points, strict=True)
    ]
    at, solved = places[-1]
    parts.append(
        Markup('<text class="name {}" x="{:.1f}" y="{:.1f}">{}</text>').format(
            kind, at + 9, y(solved.share) + 4, curve.name
        )
    )
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffLine:
    """One line of a unified diff. `kind` is added, removed, place or same. Example: ``DiffLine(kind="added", text="+return a + b")``"""

    kind: str
    text: str


def diff_lines(diff: str) -> list[DiffLine]:
    """The lines of a unified diff, `MOST_LINES` of them at most; only a line feed ends a line."""
    lines = diff.removesuffix("\n").split("\n")[: MOST_LINES + 1]
    found: list[DiffLine] = []
    within = False
    for text in lines[:MOST_LINES]:
        within = within or text.startswith("@@")
        header = not within and text.startswith(("--- ", "+++ "))
        kind = {"+": "added", "-": "removed", "@": "place"}.get(text[:1], "same")
        found.append(DiffLine(kind="place" if header else kind, text=text))
    if len(lines) > MOST_LINES:
        found.append(DiffLine(kind="place", text=f"… only {MOST_LINES:,} lines are shown …"))
    return found


# ---------------------------------------------------------------- views


Fields = Mapping[str, str]
Shown = Mapping[str, Any]
OUTCOMES = ("solved", "failed", "ungraded", "cheated")
ENDINGS = ("submitted", "turns", "length", "timeout", "broken", "failed")


class WorldViews:
    """Builds the facts that the templates show, as `web.page.views.Views` does."""

    def __init__(self, facts: RunWorlds, threads: Threads) -> None:
        self._facts, self._threads = facts, threads
        self.by_name: Mapping[str, Callable[[Visitor, Fields], Awaitable[Shown]]] = {
            "worlds": self.worlds,
            "rollouts": self.rollouts,
            "rollout": self.rollout,
            "task": self.task,
        }

    async def worlds(self, visitor: Visitor, fields: Fields) -> Shown:
        """Tasksets, success, groups under way."""
        found = await self._facts.worlds(words(fields, "family"))
        return {
            "found": found,
            "nothing": _nothing(found),
            "chart": await self._threads.ask(lambda: success_chart(found.counts.curves, found.marks)),
            "versions_of": versions_of,
            "state_of": state_of,
        }

    async def rollouts(self, visitor: Visitor, fields: Fields) -> Shown:
        """Rollouts that ended, newest first."""
        query = RolloutQuery(
            task=words(fields, "task"),
            family=words(fields, "family"),
            split=words(fields, "split"),
            outcome=words(fields, "outcome"),
            ended=words(fields, "ended"),
            before=place(fields, "before"),
        )
        found = await self._facts.rollouts(query)
        return {
            "found": found,
            "query": query,
            "outcomes": OUTCOMES,
            "endings": ENDINGS,
            "state_of": state_of,
            "older": None if found.older is None else rollouts_address(query, found.older),
            "newest": rollouts_address(query, None),
        }

    async def rollout(self, visitor: Visitor, fields: Fields) -> Shown:
        """One rollout. Raises NotFound."""
        first = place(fields, "from") or 0
        found = await self._facts.rollout(fields["episode"], first)
        if found is None:
            raise NotFound(
                "No rollout with that name is on record: it never began, or its record was dropped as one of the oldest.",
                field="episode",
            )
        diffs = await self._threads.ask(
            lambda: [(each, [] if each.diff is None else diff_lines(each.diff)) for each in found.changes]
        )
        names = [line.episode for line in found.members]
        at = names.index(found.line.episode) if found.line.episode in names else -1
        return {
            "found": found,
            "line": found.line,
            "state_of": state_of,
            "previous": found.members[at - 1] if at > 0 else None,
            "following": found.members[at + 1] if 0 <= at < len(names) - 1 else None,
            "diffs": diffs,
        }

    async def task(self, visitor: Visitor, fields: Fields) -> Shown:
        """One task; only the operator sees its hidden part. Raises NotFound."""
        found = await self._facts.task(fields["id"], hidden=visitor.operator)
        if found is None:
            raise NotFound("Neither the taskset nor a rollout on record has that task.", field="id")
        curve = SolvedCurve(name="solved", points=found.points)
        return {
            "found": found,
            "facts": found.facts,
            "chart": success_chart((curve,) if found.points else (), ()),
            "versions_of": versions_of,
            "state_of": state_of,
            "all": rollouts_address(RolloutQuery(task=found.id), None),
        }


def state_of(line: RolloutLine) -> tuple[str, str]:
    """A rollout in a few words, and the class of its badge. A mark precedes the words, so that the meaning is not in the colour alone."""
    if line.cheated:
        return "bad", "✕ cheated"
    if line.ended == "waiting":
        return "", "waiting"
    if line.ended == "under way":
        return "wait", "◷ under way"
    if line.value is None:
        return "wait", "◷ not graded"
    return ("good", "✓ solved") if line.solved else ("bad", "✕ not solved")


def rollouts_address(query: RolloutQuery, before: int | None) -> str:
    """The address of a list of rollouts."""
    asked = {
        "task": query.task,
        "family": query.family,
        "split": query.split,
        "outcome": query.outcome,
        "ended": query.ended,
        "before": before,
    }
    chosen = {name: value for name, value in asked.items() if value not in (None, "")}
    return "/worlds/rollouts" + (f"?{urlencode(chosen)}" if chosen else "")


def _nothing(found: WorldsNow) -> bool:
    """True if no rollout was ever tried here, and none will be."""
    return found.source == "people" and not found.reading.kept and not found.pacing.drawn
