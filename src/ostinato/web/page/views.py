"""View functions: the context of each page's template, from the run's facts. Those of simulated worlds come last."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from ostinato.core.errors import NotFound
from ostinato.core.records import Arm
from ostinato.core.visitors import Visitor
from ostinato.status.compactions import CompactionsNow, facts_sentence, rewards_sentence
from ostinato.status.dials import DialsNow, cautions, effect_sentence
from ostinato.status.index_queries import MOST_COUNTED, Threads, TurnQuery
from ostinato.status.releases import ReleaseDetail, ReleaseList
from ostinato.status.run_facts import RunFacts, TurnDetail
from ostinato.status.run_state import RunNow
from ostinato.status.training_state import LearningNow
from ostinato.status.worlds.run_worlds import RolloutQuery, RunWorlds, WorldsNow
from ostinato.status.worlds.tasks import SolvedCurve
from ostinato.status.worlds.underway import RolloutLine
from ostinato.web.chart import lines
from ostinato.web.page import charts
from ostinato.web.page.charts import Station
from ostinato.web.page.query_params import place, turn_query, version, words
from ostinato.web.page.release_answers import answers, dealt_as_set, sentence
from ostinato.web.page.templates import DASH, ago, capital, cells, count, prompt_text

Fields = Mapping[str, str]
Shown = Mapping[str, Any]

TABS = (
    ("now", "/", "Now"),
    ("releases", "/releases", "Releases"),
    ("turns", "/turns", "Turns"),
    ("learning", "/learning", "Learning"),
    ("monitors", "/monitors", "Monitors"),
    ("weights", "/weights", "Weights"),
    ("worlds", "/worlds", "Worlds"),
    ("playground", "/playground", "Playground"),
)
MOST_SIGNALS = 20
"""Number of the newest signals on a turn's page."""
OPEN_TO_TENANTS = frozenset({"turns", "turn"})


class Views:
    """Builds the template contexts. Each view takes the visitor and the URL's fields. Slow views render on the page's threads."""

    def __init__(self, facts: RunFacts, worlds: RunWorlds, threads: Threads) -> None:
        self._facts, self._worlds, self._threads = facts, worlds, threads
        self.by_name: Mapping[str, Callable[[Visitor, Fields], Awaitable[Shown]]] = {
            "now": self.now,
            "releases": self.releases,
            "release": self.release,
            "turns": self.turns,
            "turn": self.turn,
            "learning": self.learning,
            "monitors": self.monitors,
            "alarm": self.alarm,
            "weights": self.weights,
            "playground": self.playground,
            "worlds": self.worlds,
            "rollouts": self.rollouts,
            "rollout": self.rollout,
            "task": self.task,
        }

    async def frame(self, visitor: Visitor) -> Shown:
        """Return the context of the frame around every page: the run in one line, and the tabs that this visitor may see."""
        run = await self._facts.now() if visitor.sees_all else None
        tabs = TABS if visitor.sees_all else tuple(tab for tab in TABS if tab[0] in OPEN_TO_TENANTS)
        return {"visitor": visitor, "run": run, "tabs": tabs, "state": None if run is None else state_of(run)}

    async def now(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return the loop with its figures."""
        found = await self._facts.now()
        return await self._threads.ask(lambda: now_shown(found))

    async def releases(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return the release ledger."""
        found = await self._facts.releases(place(fields, "before"))
        return await self._threads.ask(lambda: releases_shown(found))

    async def release(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return one version. Raises NotFound."""
        found = await self._facts.release(version(fields["root"]))
        if found is None:
            raise NotFound(f"The ledger has no version {fields['root'][:16]}.", field="root")
        return await self._threads.ask(lambda: release_shown(found))

    async def turns(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return the newest turns that match the query."""
        query = turn_query(fields, visitor.tenant)
        found = await self._facts.turns(query)
        return {
            "found": found,
            "query": query,
            "most": MOST_COUNTED,
            "arms": [*Arm],
            "older": None if found.page.older is None else address(query, visitor, before=found.page.older),
            "newer": None if found.page.newer is None else address(query, visitor, after=found.page.newer),
            "newest": address(query, visitor),
        }

    async def turn(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return one turn. Raises NotFound, also for another tenant's."""
        found = await self._facts.turn(fields["id"], visitor.tenant)
        if found is None:
            raise NotFound("There is no such turn.", field="id")
        start = place(fields, "from") or 0
        return await self._threads.ask(lambda: turn_shown(found, start))

    async def learning(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return the training figures over steps."""
        found = await self._facts.learning()
        return await self._threads.ask(lambda: learning_shown(found))

    async def monitors(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return the active and the past alarms."""
        return {"found": await self._facts.alarms(place(fields, "before"))}

    async def alarm(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return one alarm. Raises NotFound."""
        found = await self._facts.alarm(fields["name"])
        if found is None:
            raise NotFound("There never was such an alarm.", field="name")
        return {"found": found}

    async def weights(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return the state of the weight store."""
        return {"found": await self._facts.weights()}

    async def playground(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return the empty playground."""
        run = await self._facts.now()
        return {"arms": [arm for arm in ("live", "control") if arm in run.refs], "prompt": "", "answers": ()}

    # ------------------------------------------------------------ simulated worlds

    async def worlds(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return tasksets, success rates and the groups in progress."""
        found = await self._worlds.worlds(words(fields, "family"))
        return {
            "found": found,
            "nothing": _has_no_rollouts(found),
            "chart": await self._threads.ask(lambda: charts.success(found.counts.curves, found.marks)),
            "versions_of": charts.versions_of,
            "state_of": rollout_state,
        }

    async def rollouts(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return finished rollouts, newest first."""
        chosen = {name: words(fields, name) for name in ("task", "family", "split", "outcome", "ended")}
        query = RolloutQuery(**chosen, before=place(fields, "before"))
        found = await self._worlds.rollouts(query)
        return {
            "found": found,
            "query": query,
            "outcomes": OUTCOMES,
            "endings": ENDINGS,
            "state_of": rollout_state,
            "older": None if found.older is None else rollouts_address(query, found.older),
            "newest": rollouts_address(query, None),
        }

    async def rollout(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return one rollout. Raises NotFound."""
        first = place(fields, "from") or 0
        found = await self._worlds.rollout(fields["episode"], first)
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
            "state_of": rollout_state,
            "previous": found.members[at - 1] if at > 0 else None,
            "following": found.members[at + 1] if 0 <= at < len(names) - 1 else None,
            "diffs": diffs,
        }

    async def task(self, visitor: Visitor, fields: Fields) -> Shown:
        """Return one task; only the operator sees its hidden part. Raises NotFound."""
        found = await self._worlds.task(fields["id"], hidden=visitor.operator)
        if found is None:
            raise NotFound("Neither the taskset nor a rollout on record has that task.", field="id")
        curve = SolvedCurve(name="solved", points=found.points)
        return {
            "found": found,
            "facts": found.facts,
            "chart": charts.success((curve,) if found.points else (), ()),
            "versions_of": charts.versions_of,
            "state_of": rollout_state,
            "all": rollouts_address(RolloutQuery(task=found.id), None),
        }


def turn_shown(found: TurnDetail, start: int) -> Shown:
    """Return the context of one turn, with the tokens of its answer from `start` on."""
    turn = found.line.turn
    return {
        "found": found,
        "turn": turn,
        "cells": cells(found, start),
        "start": start,
        "total": len(turn.sampled_ids),
        "prompt": prompt_text(found.prompt),
        "versions": turn.versions,
        "signals": found.signals[-MOST_SIGNALS:],
    }


def now_shown(run: RunNow) -> Shown:
    """Return the context of the loop with its figures, and acceptance over time."""
    stations = stations_of(run)
    ends = ", ".join(f"{arm.arm} {100 * arm.point.acceptance:.0f}%" for arm in run.arms)
    title = "Share of rated turns that were accepted, per arm"
    return {
        "stations": stations,
        "wide": charts.loop(stations, narrow=False),
        "narrow": charts.loop(stations, narrow=True),
        "acceptance": lines(title, ends or "nothing rated", run.curves, run.marks) if run.curves else "",
        "dials": None if run.dials is None else dials_shown(run.dials),
        "compactions": None if run.compactions is None else compactions_shown(run.compactions),
    }


def dials_shown(found: DialsNow) -> Shown:
    """Return the effect of dials in words, both sides' acceptance over time, and the distribution of people's dials."""
    said = effect_sentence(found)
    title = "Share of rated turns that were accepted, people with dials beside the holdout"
    return {
        "found": found,
        "sentence": capital(said),
        "cautions": cautions(found),
        "course": lines(title, said, found.curves, ()) if found.curves else "",
        "spread": charts.spread(found.spread),
    }


def compactions_shown(found: CompactionsNow) -> Shown:
    """Return how good the summaries of people's sessions are, in words and figures."""
    said = [facts_sentence(found), rewards_sentence(found)]
    return {"found": found, "sentences": [capital(each) for each in said]}


def releases_shown(found: ReleaseList) -> Shown:
    """Return the context of the ledger by version, with the forest plot."""
    return {"found": found, "forest": charts.forest(found.rows), "sentence": sentence}


def learning_shown(found: LearningNow) -> Shown:
    """Return the context of each training figure over steps, with its chart."""
    drawn = [
        (series, charts.steps_chart(series, found.marks), charts.thinned(series.points).every)
        for series in found.series
    ]
    return {"found": found, "charts": drawn}


def release_shown(found: ReleaseDetail) -> Shown:
    """Return the context of a release's page, which the report uses too."""
    proof = found.evidence
    return {
        "found": found,
        "evidence": proof,
        "answers": answers(found),
        "looks": charts.looks(found.looks),
        "sequence": charts.sequence(proof.trial, proof.rules),
        "balance": None if proof.dealt is None else dealt_as_set(proof.dealt, proof.rules),
        "shifts": charts.shifts(proof.rates),
        "layers": charts.layers(proof.weights),
        "prompts": [prompt_text(each.prompt) for each in proof.examples],
    }


def state_of(run: RunNow) -> tuple[str, str]:
    """Return the run's state as (CSS class, sentence). Faults come first."""
    if run.troubles:
        return "bad", run.troubles[0]
    if run.alarms:
        newest = run.alarms[0]
        more = f" (and {len(run.alarms) - 1} more)" if len(run.alarms) > 1 else ""
        return "wait", f"{newest.name}: {newest.reason}{more}"
    if not run.accounts.balanced:
        return "bad", "The turns are not balanced: some are counted twice, or lost."
    return "good", "Nothing stands out."


def stations_of(run: RunNow) -> list[Station]:
    """Return the loop's six boxes, from serving to the live version."""
    live, canary, candidate = run.refs.get("live"), run.refs.get("canary"), run.refs.get("candidate")
    pace = DASH if run.pace is None else f"{run.pace:.2g} turns/s"
    accounts = run.accounts
    wait = "" if accounts.oldest_wait is None else f"oldest {ago(run.at - accounts.oldest_wait)}"
    doing = {worker.name: worker for worker in run.workers}
    bad = {name: "bad" for name, worker in doing.items() if worker.condition == "failed" or worker.trouble}
    judged = run.refs.get("evaluation")
    back = "to " if run.last is not None and run.last.action == "rolled_back" else ""
    last = f"{run.last.action.replace('_', ' ')} {back}v{run.last.policy.number}" if run.last else "no release yet"
    tried = f"canary v{canary.number}" if canary is not None and canary != live else ""
    ready = candidate is not None and candidate != live
    return [
        Station(
            name="Serve", figure=pace, note=f"{count(accounts.ingested)} turns served", state=bad.get("serve", "good")
        ),
        Station(name="Signals", figure=count(run.signals), note="feedback on turns"),
        Station(
            name="Reward",
            figure=f"{count(accounts.waiting)} waiting",
            note=wait,
            state="good" if accounts.balanced else "bad",
        ),
        Station(
            name="Train",
            figure=f"step {count(run.step)}",
            note=f"{'at least ' * run.every}{count(run.batch)} turns a step",
            state=bad.get("train", "good"),
        ),
        Station(
            name="Prove",
            figure=f"v{judged.number}" if judged is not None and judged != live else DASH,
            note=f"candidate v{candidate.number}" if ready and candidate is not None else "no new candidate",
            state=bad.get("release", "good"),
        ),
        Station(
            name="Release",
            figure=DASH if live is None else f"live v{live.number}",
            note=tried or last,
            state="wait" if run.alarms else "good",
        ),
    ]


def address(query: TurnQuery, visitor: Visitor, *, before: int | None = None, after: int | None = None) -> str:
    """Return the URL of a list of turns."""
    shown = replace(query, tenant=query.tenant if visitor.sees_all else None, before=before, after=after)
    return _with_query("/turns", asdict(shown))


def _with_query(path: str, asked: Mapping[str, str | int | None]) -> str:
    """Return the URL of a list, with its non-empty fields as the query string."""
    chosen = {name: value for name, value in asked.items() if value not in (None, "")}
    return path + (f"?{urlencode(chosen)}" if chosen else "")


# ---------------------------------------------------------------- simulated worlds


MOST_LINES = 1_500


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffLine:
    """One line of a unified diff. `kind`: added, removed, place (a header) or same. Example: ``DiffLine(kind="added", text="+x = 1")``"""

    kind: str
    text: str


def diff_lines(diff: str) -> list[DiffLine]:
    """Return the lines of a unified diff, at most `MOST_LINES`. Only a line feed ends a line."""
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


OUTCOMES = ("solved", "failed", "ungraded", "cheated")
ENDINGS = ("submitted", "turns", "length", "timeout", "broken", "failed")


def rollout_state(line: RolloutLine) -> tuple[str, str]:
    """Return (CSS class, words) of a rollout's badge. The words begin with a symbol, so that the meaning is not in the colour alone."""
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
    """Return the URL of a list of rollouts."""
    return _with_query("/worlds/rollouts", asdict(replace(query, before=before)))


def _has_no_rollouts(found: WorldsNow) -> bool:
    """Return True if there are no rollouts, and the run's settings make none."""
    return found.source == "people" and not found.reading.kept and not found.pacing.drawn
