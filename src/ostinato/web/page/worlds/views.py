"""The facts of the pages of simulated worlds, as their templates need them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from ostinato.core.errors import NotFound
from ostinato.core.visitors import Visitor
from ostinato.web.page.asking import place, words
from ostinato.web.page.threads import Ask
from ostinato.web.page.worlds.drawing import diff_lines, success_chart, versions_of
from ostinato.web.page.worlds.sources import RolloutLine, RolloutQuery, SolvedCurve, WorldFacts, WorldsNow

Fields = Mapping[str, str]
Shown = Mapping[str, Any]
OUTCOMES = ("solved", "failed", "ungraded", "cheated")
ENDINGS = ("submitted", "turns", "length", "timeout", "broken", "failed")


class WorldViews:
    """Builds the facts that the templates show, as `web.page.views.Views` does."""

    def __init__(self, facts: WorldFacts, ask: Ask) -> None:
        self._facts, self._ask = facts, ask
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
            "chart": await self._ask(lambda: success_chart(found.curves, found.marks)),
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
        diffs = await self._ask(
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
