"""Finished rollouts -> shares solved, by family and by version, with intervals; groups; endings; cheats. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ostinato.evaluate.statistics import clustered_share, wilson
from ostinato.web.page.worlds.sources import (
    GroupCounts,
    RolloutLine,
    SolvedCurve,
    SolvedShare,
    VersionPoint,
)

MOST_POINTS = 30
"""The most points of one curve; beyond it, consecutive versions are merged."""
SPLITS: Mapping[str, str] = {"held_out": "held out", "train": "train"}
"""The splits that are drawn, by the names of their curves. A canary cannot be solved, so its share means nothing."""

Counts = dict[str, tuple[int, int]]
"""Task -> how many of its rollouts were solved, and how many were graded."""
Kind = tuple[str, str, str, str]
"""Family, split, harness, grader."""


@dataclass(slots=True)
class Kinds:
    """The counts of one kind of task, over all versions and for the newest."""

    all: Counts
    newest: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """All counts over the rollouts on record."""

    kinds: Mapping[Kind, Kinds]
    version: int | None
    curves: tuple[SolvedCurve, ...]
    groups: GroupCounts
    ended: Mapping[str, int]
    cheated: int
    cheats: tuple[tuple[str, int, str], ...]


def counted(lines: Sequence[RolloutLine], kind_of: Callable[[RolloutLine], Kind], family: str) -> Counted:
    """Count lines, oldest first. The curves are of one family, or of all ("")."""
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
    return Counted(
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
    """The share solved, with tasks as clusters, because rollouts of one task turn out alike. None if nothing was graded.

    `one_task`: the share is of one task alone, so each rollout counts as an independent try (Wilson's interval).
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
    """Success by the oldest policy version that made a token, oldest first."""
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
    """Groups with at least two grades, and those of them whose grades are all equal."""
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
    """The counts of graded rollouts by task."""
    counts: Counts = {}
    for line in lines:
        if line.value is not None:
            _count(counts, line)
    return counts


def _count(counts: Counts, line: RolloutLine) -> None:
    solved, n = counts.get(line.task, (0, 0))
    counts[line.task] = solved + (line.solved and not line.cheated), n + 1
