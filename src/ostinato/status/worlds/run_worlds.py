"""Queries on a run's simulated worlds: tasksets, success by version, groups in progress, rollouts step by step.

Times are Unix seconds, shares are in [0, 1]. Texts are bounded and untrusted: tasks, models and files may say anything. An unknown figure
is None.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from ostinato.config import Config
from ostinato.core.files import older
from ostinato.core.records import Turn
from ostinato.core.seams import Log
from ostinato.run_directory import Home
from ostinato.status.index_queries import PAGE_ROWS, Threads
from ostinato.status.progress_lines import FileTail, last_lines, newest_line
from ostinato.status.releases import LedgerEvent
from ostinato.status.worlds import underway
from ostinato.status.worlds.tasks import (
    Kind,
    RolloutCounts,
    SolvedShare,
    TaskFacts,
    TasksetFile,
    VersionPoint,
    counted,
    counts_of,
    solved_share,
    version_points,
)
from ostinato.status.worlds.transcript import Pieces, Readers, RolloutStep, part_of, steps_of
from ostinato.worlds.rollout.finished import Finished

# ---------------------------------------------------------------- bounded parts of a record


_MOST_TURNS = 10_000
_MOST_FIGURES = 60
_MOST_CHANGES = 60
_MOST_CHARACTERS = 40_000
_LONGEST_WHY = 4_000


def turns_of(ids: Sequence[object]) -> list[str]:
    """Return the ids of the rollout's turns."""
    return [each for each in ids[:_MOST_TURNS] if isinstance(each, str) and len(each) <= 512]


def figures_of(named: Mapping[str, float]) -> dict[str, float]:
    """Return the first `_MOST_FIGURES` named numbers."""
    return {name[:120]: number for name, number in islice(named.items(), _MOST_FIGURES)}


def why_of(record: Finished) -> str:
    """Return the reason for the grade, for people."""
    return part_of("", record.why, _LONGEST_WHY).text


def changes_of(record: Finished) -> tuple[tuple[FileChange, ...], int]:
    """Return the rollout's file changes, and how many more there are."""
    left = _MOST_CHARACTERS
    found: list[FileChange] = []
    for change in record.changes[:_MOST_CHANGES]:
        text = None if change.diff is None else change.diff[:left]
        left -= len(text or "")
        cut = len(change.diff or "") - len(text or "")
        found.append(FileChange(path=change.path[:1024], kind=change.kind.value, diff=text, cut=cut))
    return tuple(found), max(0, len(record.changes) - _MOST_CHANGES)


# ---------------------------------------------------------------- results of queries


STEPS = 20
"""How many steps of a rollout one page shows."""
_NEWEST = 20
_MOST_FAMILIES = 50
_MOST_TASKSETS = 10
Shipped = Callable[[], Awaitable[Sequence[LedgerEvent]]]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyLine:
    """The tasks of one family, split, harness and grader. `tasks`: how many; None for a family that the current taskset does not have.

    `drawn`: how many of its tasks a group was drawn for. `solved`: over all counted rollouts; `newest`: over those of `version`.
    """

    family: str
    split: str
    harness: str
    grader: str
    tasks: int | None
    drawn: int
    solved: SolvedShare | None
    newest: SolvedShare | None
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetLine:
    """One taskset: the current one (`current`), or one whose rollouts are still on record. `tasks`: how many; None if it was not read."""

    name: str
    hash: str
    current: bool
    tasks: int | None
    rollouts: int
    first: float | None
    last: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesRead:
    """How much of the files was read. `kept`: rollouts counted; `dropped`: older rollouts that were forgotten; `skipped`: bytes never read;
    `behind`: bytes not read yet; `bad`: lines that are no record. `tasks`: why the taskset cannot be read; "" if it can.
    """

    kept: int
    dropped: int
    skipped: int
    behind: int
    bad: int
    most: int
    tasks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldsNow:
    """The simulated worlds of a run. `source` is `learn.source`; `family` is the one that the curves of `counts` show ("": all).

    `marks` are released versions.
    """

    source: str
    file: str
    family: str
    tasksets: tuple[TasksetLine, ...]
    families: tuple[FamilyLine, ...]
    more_families: int
    counts: RolloutCounts
    marks: tuple[tuple[int, str], ...]
    pacing: underway.Pacing
    under_way: tuple[underway.GroupUnderWay, ...]
    newest: tuple[underway.RolloutLine, ...]
    reading: FilesRead


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """Which rollouts to list. "" and None mean any; `before`: those with a smaller `seq`.

    `outcome` is solved, failed, ungraded or cheated.
    """

    task: str = ""
    family: str = ""
    split: str = ""
    outcome: str = ""
    ended: str = ""
    before: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutList:
    """A page of finished rollouts, newest first; `count`: how many on record match."""

    rows: tuple[underway.RolloutLine, ...]
    count: int
    older: int | None
    reading: FilesRead


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """One file that the rollout changed. `diff` None: its content is not text, or was not kept.

    `cut`: characters that are not shown. Example: ``FileChange(path="calc.py", kind="written", diff="@@ -1 +1 @@...")``
    """

    path: str
    kind: str
    diff: str | None
    cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDetail:
    """One rollout in full. `members`: the rollouts of its group in order, including itself.

    `turns`: number of its turns; `steps`: a window of them that begins at `first`. Fields from the record are empty if there is none
    (`on_record`).
    """

    line: underway.RolloutLine
    members: tuple[underway.RolloutLine, ...]
    steps: tuple[RolloutStep, ...]
    first: int
    turns: int
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    why: str = ""
    effort: Mapping[str, float] = field(default_factory=dict[str, float])
    changes: tuple[FileChange, ...] = ()
    more_changes: int = 0
    on_record: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDetail:
    """One task and its rollouts. `facts` None: the current taskset does not have it, or was not read (`reading` says why)."""

    id: str
    facts: TaskFacts | None
    points: tuple[VersionPoint, ...]
    solved: SolvedShare | None
    rollouts: RolloutList
    reading: FilesRead


class RunWorlds:
    """Answers queries about one run's simulated worlds, each in bounded time. Raises Unavailable.

    Args:
        home, config, log: the run's.
        pieces: returns the bytes of a token.
        readers: makes readers of answers; None: answers are shown as they were sampled.
        shipped: returns the newest releases, for the marks of a chart.
    """

    def __init__(
        self,
        home: Home,
        config: Config,
        log: Log,
        pieces: Pieces,
        readers: Readers | None = None,
        shipped: Shipped | None = None,
    ) -> None:
        self._config, self._log, self._pieces, self._readers = config, log, pieces, readers
        self._shipped = shipped
        self._lines = FileTail([older(home.finished), home.finished])
        self._ended = underway.EndedRollouts()
        self._under_way = underway.UnderWay(home.rollouts)
        named = config.worlds.file
        self._tasks = TasksetFile(Path(named).expanduser() if named else None)
        self._progress = home.progress("rollout")
        self._lock = threading.Lock()
        self._threads = Threads()
        self._counted: dict[str, tuple[tuple[int, int], RolloutCounts]] = {}

    def close(self) -> None:
        self._threads.close()

    async def worlds(self, family: str) -> WorldsNow:
        """Return the run's simulated worlds, with the curves of one family ("": of all)."""
        events = () if self._shipped is None else await self._shipped()
        marks = {event.policy.number: f"v{event.policy.number}" for event in events if event.action == "shipped"}
        return await self._ask(lambda: self._worlds(family, tuple(sorted(marks.items()))))

    async def rollouts(self, query: RolloutQuery) -> RolloutList:
        return await self._ask(lambda: self._list(query))

    async def rollout(self, episode: str, first: int) -> RolloutDetail | None:
        """Return one rollout with its steps from `first` on; None if it is unknown."""
        found = await self._ask(lambda: self._rollout(episode))
        if found is None:
            return None
        line, members, record, turns = found
        steps = await self._steps(turns, first, tools=not line.harness.startswith("single"))
        detail = RolloutDetail(line=line, members=tuple(members), steps=steps, first=first, turns=len(turns))
        if record is None:
            return detail
        changes, more = changes_of(record)
        return replace(
            detail,
            parts=figures_of(record.parts),
            why=why_of(record),
            effort=figures_of(record.effort),
            changes=changes,
            more_changes=more,
            on_record=True,
        )

    async def task(self, id: str, *, hidden: bool) -> TaskDetail | None:
        """Return one task, with its hidden part if asked for; None if neither the taskset nor a rollout names it."""
        return await self._ask(lambda: self._task(id, hidden=hidden))

    # ------------------------------------------------------------ on a thread, one query at a time

    async def _ask(self, question: Callable[[], _T]) -> _T:
        def answer() -> _T:
            with self._lock:
                self._ended.take(self._lines.new())
                self._under_way.look()
                self._tasks.look()
                return question()

        return await self._threads.ask(answer)

    def _worlds(self, family: str, marks: tuple[tuple[int, str], ...]) -> WorldsNow:
        found = self._count(family)
        families = self._families(found)
        return WorldsNow(
            source=self._config.learn.source,
            file=self._config.worlds.file,
            family=family,
            tasksets=self._tasksets(),
            families=families[:_MOST_FAMILIES],
            more_families=max(0, len(families) - _MOST_FAMILIES),
            counts=found,
            marks=marks,
            pacing=self._under_way.pacing(),
            under_way=self._under_way.groups(self._ended.member),
            newest=tuple(islice(self._ended.newest(), _NEWEST)),
            reading=self._reading(),
        )

    def _count(self, family: str) -> RolloutCounts:
        """Return the counts, cached until something changes."""
        revision = (self._ended.read, self._tasks.revision)
        kept = self._counted.get(family)
        if kept is None or kept[0] != revision:
            if len(self._counted) > 8:
                self._counted.clear()
            kept = revision, counted([each.line for each in self._ended.all()], self._kind_of, family)
            self._counted[family] = kept
        return kept[1]

    def _kind_of(self, line: underway.RolloutLine) -> Kind:
        known = self._tasks.tasks.get(line.task)
        if known is None or (known.family, known.split) != (line.family, line.split):
            return line.family, line.split, line.harness.partition("@")[0], ""
        return known.family, known.split, known.harness, known.grader

    def _families(self, found: RolloutCounts) -> tuple[FamilyLine, ...]:
        """Return the kinds of tasks, those with most rollouts first."""
        sizes: dict[Kind, int] = {}
        drawn: dict[Kind, int] = {}
        for id, task in self._tasks.tasks.items():
            kind = task.family, task.split, task.harness, task.grader
            sizes[kind] = sizes.get(kind, 0) + 1
            drawn[kind] = drawn.get(kind, 0) + (id in self._under_way.tasks)
        tried = {kind: sum(n for _, n in kinds.all.values()) for kind, kinds in found.kinds.items()}
        order = sorted({**sizes, **tried}, key=lambda kind: (-tried.get(kind, 0), kind))
        lines: list[FamilyLine] = []
        for place, kind in enumerate(order):
            kinds = found.kinds.get(kind) if place < _MOST_FAMILIES else None
            lines.append(
                FamilyLine(
                    family=kind[0],
                    split=kind[1],
                    harness=kind[2],
                    grader=kind[3],
                    tasks=sizes.get(kind),
                    drawn=drawn.get(kind, 0),
                    solved=None if kinds is None else solved_share(kinds.all),
                    newest=None if kinds is None else solved_share(kinds.newest),
                    version=found.version,
                )
            )
        return tuple(lines)

    def _tasksets(self) -> tuple[TasksetLine, ...]:
        """Return the current taskset, as the worker last read it, and those of the rollouts on record."""
        said = newest_line(last_lines(self._progress), "tasks")
        now = "" if said is None else str(said.get("hash", ""))[:128]
        spans: dict[str, tuple[int, float, float]] = {}
        for each in self._ended.all():
            at = each.line.at or 0.0
            n, first, last = spans.get(each.taskset, (0, at, at))
            spans[each.taskset] = n + 1, min(first, at), max(last, at)
        file = Path(self._config.worlds.file)
        lines: list[TasksetLine] = []
        for hash_ in dict.fromkeys((now, *reversed(spans))):
            n, first, last = spans.get(hash_, (0, None, None))
            current = bool(now) and hash_ == now
            if not current and not n:
                continue
            known = len(self._tasks.tasks) if current and not self._tasks.trouble else None
            name = file.stem if current else ""
            line = TasksetLine(name=name, hash=hash_, current=current, tasks=known, rollouts=n, first=first, last=last)
            lines.append(line)
        return tuple(lines[:_MOST_TASKSETS])

    def _list(self, query: RolloutQuery) -> RolloutList:
        fits = [line for line in self._ended.newest() if _fits(line, query)]
        rows = [line for line in fits if query.before is None or line.seq < query.before]
        older_ = rows[PAGE_ROWS - 1].seq if len(rows) > PAGE_ROWS else None
        return RolloutList(rows=tuple(rows[:PAGE_ROWS]), count=len(fits), older=older_, reading=self._reading())

    def _rollout(
        self, episode: str
    ) -> tuple[underway.RolloutLine, list[underway.RolloutLine], Finished | None, Sequence[str]] | None:
        known = self._ended.get(episode)
        if known is None:
            open_ = self._under_way.find(episode)
            if open_ is None:
                return None
            line, turns = open_
            return line, self._members(line), None, turns_of(turns)
        record = self._record(known)
        return known.line, self._members(known.line), record, () if record is None else turns_of(record.turns)

    def _members(self, line: underway.RolloutLine) -> list[underway.RolloutLine]:
        if line.group is None:
            return [line]
        open_ = self._under_way.group(line.group, self._ended.member)
        found = self._ended.of_group(line.group) if open_ is None else list(open_.members)
        return found if any(each.episode == line.episode for each in found) else [*found, line]

    def _record(self, known: underway.EndedRollout) -> Finished | None:
        """Return the whole record; None if its file is gone."""
        data = self._lines.line(known.spot)
        record = None if data is None else underway.record_of(data)
        return record if record is not None and record.episode.startswith(known.line.episode) else None

    def _task(self, id: str, *, hidden: bool) -> TaskDetail | None:
        facts = self._tasks.task(id, hidden=hidden)
        lines = [each.line for each in self._ended.all() if each.line.task == id]
        if facts is None and not lines and id not in self._under_way.tasks:
            return None
        return TaskDetail(
            id=id,
            facts=facts,
            points=version_points(lines, one_task=True),
            solved=solved_share(counts_of(lines), one_task=True),
            rollouts=self._list(RolloutQuery(task=id)),
            reading=self._reading(),
        )

    def _reading(self) -> FilesRead:
        return FilesRead(
            kept=len(self._ended),
            dropped=self._ended.dropped,
            skipped=self._lines.skipped,
            behind=self._lines.behind + self._under_way.behind,
            bad=self._ended.bad + self._lines.bad + self._under_way.bad,
            most=underway.MOST_KEPT,
            tasks=self._tasks.trouble,
        )

    # ------------------------------------------------------------ steps

    async def _steps(self, ids: Sequence[str], first: int, *, tools: bool) -> tuple[RolloutStep, ...]:
        shown = ids[first : first + STEPS]
        if not shown:
            return ()
        before = ids[first - 1] if first else None
        wanted: Iterable[str] = shown if before is None else (before, *shown)
        found = {turn.id: turn for turn in await self._log.find(Turn, [(id,) for id in dict.fromkeys(wanted)])}
        turns = [found.get(id) for id in shown]
        previous = None if before is None else found.get(before)
        return await self._threads.ask(
            lambda: steps_of(shown, turns, first, previous, self._pieces, self._readers, tools=tools)
        )


def _fits(line: underway.RolloutLine, query: RolloutQuery) -> bool:
    asked = (query.task, line.task), (query.family, line.family), (query.split, line.split), (query.ended, line.ended)
    if any(want and want != have for want, have in asked):
        return False
    match query.outcome:
        case "solved":
            return line.solved and not line.cheated
        case "failed":
            return line.value is not None and not line.solved
        case "ungraded":
            return line.value is None
        case "cheated":
            return bool(line.cheated)
        case _:
            return True
