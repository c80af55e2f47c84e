"""The taskset file for the page: a list of its tasks, and one task in full. Only viewers who may see them get the hidden parts.

Also counts finished rollouts: shares solved by family and version, with intervals; groups; how rollouts ended; cheats.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.core.errors import BadConfig
from ostinato.evaluate.statistics import clustered_share, wilson
from ostinato.status.worlds.transcript import SaidPart, part_of
from ostinato.status.worlds.underway import RolloutLine
from ostinato.worlds.tasks.rows import EncodedBytes, MessageRow, TaskRow, parse_row

MOST_BYTES = 128 << 20
"""The largest file that is read for the page; the worker also reads larger ones."""
WAIT_S = 0.3  # how long `look` waits for a file that is being read
_MOST_FILES = 200
_MOST_MESSAGES = 50
_HIDDEN_FILES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenPart:
    """The part of a task that only the grader and the operator see: the grader's data, and the files of its own sandbox."""

    data: Mapping[str, Any]
    files: tuple[tuple[str, SaidPart], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """One task of the taskset. `hidden`: None for viewers who may not see it; `hidden_files` and `hidden_facts` count what it contains."""

    id: str
    family: str
    split: str
    harness: str
    grader: str
    turns: int
    tokens: int
    timeout_s: float
    messages: tuple[SaidPart, ...]
    files: tuple[str, ...]
    more_files: int
    layers: tuple[str, ...]
    hosts: tuple[str, ...]
    about: Mapping[str, str]
    hidden_files: int
    hidden_facts: int
    hidden: HiddenPart | None


@dataclass(frozen=True, slots=True)
class KnownTask:
    """A task's short facts, and the byte offset of its line in the file."""

    family: str
    split: str
    harness: str
    grader: str
    at: int


class TasksetFile:
    """Reads a file, if one is configured, on a thread of its own whenever it has changed. Call `look` first.

    `look` waits at most `WAIT_S` for the thread, so a large file may be ready only at a later call.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._reader: threading.Thread | None = None
        self.tasks: Mapping[str, KnownTask] = {}
        self.trouble = "worlds.file names no taskset" if path is None else "it is being read"
        self.revision = 0

    def look(self) -> TasksetFile:
        """Start reading the file if it has changed. Until that is done, the previous tasks are kept."""
        if self._path is None:
            return self
        if self._reader is None or not self._reader.is_alive():
            try:
                found = self._path.stat()
                seen = (found.st_mtime_ns, found.st_size)
            except OSError as error:
                self._settle({}, f"{self._path} cannot be read: {error.strerror}")
                self._seen = None
                return self
            if seen != self._seen:
                self._seen = seen
                self._reader = threading.Thread(target=self._read, args=(self._path, seen[1]), daemon=True)
                self._reader.start()
        if self._reader is not None:
            self._reader.join(WAIT_S)
        return self

    def task(self, id: str, *, hidden: bool) -> TaskFacts | None:
        known = self.tasks.get(id)
        if known is None or self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                file.seek(known.at)
                row = parse_row("taskset", file.readline().decode())
        except (OSError, UnicodeDecodeError, BadConfig):
            return None  # the file is being rewritten
        return _facts(row, hidden=hidden) if row.id == id else None

    def _read(self, path: Path, size: int) -> None:
        if size > MOST_BYTES:
            self._settle({}, f"{path} has {size >> 20} MiB; the page reads taskset files of {MOST_BYTES >> 20} MiB")
            return
        found: dict[str, KnownTask] = {}
        at = number = 0
        try:
            with path.open("rb") as file:
                for line in file:
                    number += 1
                    if line.strip():
                        row = parse_row(f"{path.name}, line {number}", line.decode())
                        found[row.id] = KnownTask(row.family, row.split.value, row.harness, row.grading.grader, at)
                    at += len(line)
        except (OSError, UnicodeDecodeError, BadConfig) as error:
            self._settle({}, str(error)[:300])
            return
        self._settle(found, "")

    def _settle(self, tasks: Mapping[str, KnownTask], trouble: str) -> None:
        if (self.tasks, self.trouble) != (tasks, trouble):
            self.tasks, self.trouble = tasks, trouble
            self.revision += 1


def _facts(row: TaskRow, *, hidden: bool) -> TaskFacts:
    paths = sorted(row.world.files)
    return TaskFacts(
        id=row.id,
        family=row.family,
        split=row.split.value,
        harness=row.harness,
        grader=row.grading.grader,
        turns=row.turns,
        tokens=row.tokens,
        timeout_s=row.timeout_s,
        messages=tuple(map(_message, row.messages[:_MOST_MESSAGES])),
        files=tuple(paths[:_MOST_FILES]),
        more_files=max(0, len(paths) - _MOST_FILES),
        layers=row.world.layers,
        hosts=row.world.hosts,
        about={name[:80]: text[:500] for name, text in row.about.items()},
        hidden_files=len(row.grading.hidden),
        hidden_facts=len(row.grading.data),
        hidden=_hidden(row) if hidden else None,
    )


def _message(row: MessageRow) -> SaidPart:
    calls = "".join(f"\n{call.name}({call.arguments})" for call in row.calls)
    return part_of(row.role.value, row.content + calls)


def _hidden(row: TaskRow) -> HiddenPart:
    files = list(row.grading.hidden.items())[:_HIDDEN_FILES]
    data = {name: part_of("", _written(value)).text for name, value in list(row.grading.data.items())[:50]}
    return HiddenPart(
        data=data,
        files=tuple(
            (path, part_of("", "(not text)" if isinstance(text, EncodedBytes) else text)) for path, text in files
        ),
    )


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------- counting rollouts


MOST_POINTS = 30
"""The most points of one curve; with more versions, consecutive ones are merged."""
SPLITS: Mapping[str, str] = {"held_out": "held out", "train": "train"}
"""The splits that are drawn, with the names of their curves. A canary cannot be solved, so its share means nothing."""

Counts = dict[str, tuple[int, int]]
"""{task: (rollouts solved, rollouts graded)}."""
Kind = tuple[str, str, str, str]
"""(family, split, harness, grader)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedShare:
    """The share of graded rollouts that were solved, with its 95% interval, clustered by task. With one task the interval says nothing."""

    rollouts: int
    tasks: int
    share: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPoint:
    """The share solved by one version, or by several consecutive ones that were merged."""

    first: int
    last: int
    solved: SolvedShare


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedCurve:
    """The share solved over versions, oldest first. `name` is "held out" or "train"."""

    name: str
    points: tuple[VersionPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Groups with at least two graded members. `flat`: those whose grades are all equal, so that nothing can be learned from them.

    `all_solved` and `none_solved` count flat groups.
    """

    graded: int
    flat: int
    all_solved: int
    none_solved: int


@dataclass(slots=True)
class Kinds:
    """The counts of one kind of task, over all versions and for the newest."""

    all: Counts
    newest: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCounts:
    """All counts over the rollouts on record, by kind of task and as curves over versions; `version` is the newest.

    `ended`: number of rollouts by how they ended. `cheated`: number that cheated. `cheats`: (kind of cheat, number, newest such rollout).
    """

    kinds: Mapping[Kind, Kinds]
    version: int | None
    curves: tuple[SolvedCurve, ...]
    groups: GroupCounts
    ended: Mapping[str, int]
    cheated: int
    cheats: tuple[tuple[str, int, str], ...]


def counted(lines: Sequence[RolloutLine], kind_of: Callable[[RolloutLine], Kind], family: str) -> RolloutCounts:
    """Count rollouts (oldest first). The curves are of one family, or of all ("")."""
    version = max((line.policy.number for line in lines if line.policy is not None), default=None)
    kinds: defaultdict[Kind, Kinds] = defaultdict(lambda: Kinds({}, {}))
    ended: Counter[str] = Counter()
    cheats: dict[str, tuple[int, str]] = {}
    for line in lines:
        ended[line.ended or "unknown"] += 1
        for name in line.cheated:
            cheats[name] = (cheats.get(name, (0, ""))[0] + 1, line.episode)
        if line.value is None:
            continue
        of_kind = kinds[kind_of(line)]
        _count(of_kind.all, line)
        if line.policy is not None and line.policy.number == version:
            _count(of_kind.newest, line)
    drawn = [line for line in lines if family in ("", line.family)]
    return RolloutCounts(
        kinds=kinds,
        version=version,
        curves=tuple(
            SolvedCurve(name=name, points=points)
            for split, name in SPLITS.items()
            if (points := version_points(line for line in drawn if line.split == split))
        ),
        groups=group_counts(lines),
        ended=dict(ended.most_common(20)),
        cheated=sum(bool(line.cheated) for line in lines),
        cheats=tuple((name, *cheats[name]) for name in sorted(cheats, key=lambda name: -cheats[name][0])[:20]),
    )


def solved_share(counts: Counts, *, one_task: bool = False) -> SolvedShare | None:
    """Return the share solved, clustered by task, because rollouts of one task are correlated. None if nothing was graded.

    `one_task`: all rollouts are of one task, so each counts as an independent trial (Wilson's interval).
    """
    rollouts, solved = sum(n for _, n in counts.values()), sum(solved for solved, _ in counts.values())
    if not rollouts:
        return None
    share = solved / rollouts
    clusters = {("", task): (float(of_task), n) for task, (of_task, n) in counts.items()}
    lower, upper = wilson(solved, rollouts) if one_task else clustered_share(clusters)
    return SolvedShare(rollouts=rollouts, tasks=len(counts), share=share, lower=lower, upper=upper)


def version_points(
    lines: Iterable[RolloutLine], most: int = MOST_POINTS, *, one_task: bool = False
) -> tuple[VersionPoint, ...]:
    """Return the share solved by policy version, oldest first. A rollout counts for the oldest version that sampled a token of it."""
    by_version: defaultdict[int, Counts] = defaultdict(dict)
    for line in lines:
        if line.value is not None and line.policy is not None:
            _count(by_version[line.policy.number], line)
    numbers = sorted(by_version)
    every = max(1, -(-len(numbers) // most))
    points: list[VersionPoint] = []
    for start in range(0, len(numbers), every):
        together = numbers[start : start + every]
        merged: Counts = {}
        for number in together:
            for task, (solved, n) in by_version[number].items():
                had = merged.get(task, (0, 0))
                merged[task] = had[0] + solved, had[1] + n
        share = solved_share(merged, one_task=one_task)
        assert share is not None
        points.append(VersionPoint(first=together[0], last=together[-1], solved=share))
    return tuple(points)


def group_counts(lines: Iterable[RolloutLine]) -> GroupCounts:
    """Count the groups with at least two grades, and those of them whose grades are all equal."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line.group is not None and line.value is not None:
            values[line.group].append(line.value)
    graded = [each for each in values.values() if len(each) > 1]
    flat = [each for each in graded if len(set(each)) == 1]
    return GroupCounts(
        graded=len(graded),
        flat=len(flat),
        all_solved=sum(each[0] >= 1.0 for each in flat),
        none_solved=sum(each[0] == 0.0 for each in flat),
    )


def counts_of(lines: Iterable[RolloutLine]) -> Counts:
    """Return the counts of graded rollouts by task."""
    counts: Counts = {}
    for line in lines:
        if line.value is not None:
            _count(counts, line)
    return counts


def _count(counts: Counts, line: RolloutLine) -> None:
    solved, n = counts.get(line.task, (0, 0))
    counts[line.task] = solved + (line.solved and not line.cheated), n + 1
