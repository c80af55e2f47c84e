"""What the pages of simulated worlds show, and of whom they ask for it. Times are Unix seconds, shares lie in [0, 1].

Texts come bounded, and foreign: tasks, models and files say what they like. A figure that nobody knows is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.core.records import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedShare:
    """The share of graded rollouts that were solved, with its 95% interval, tasks as clusters. With one task the interval says nothing.

    Example: ``SolvedShare(rollouts=96, tasks=12, share=0.42, lower=0.31, upper=0.54)``
    """

    rollouts: int
    tasks: int
    share: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyLine:
    """The tasks of one family, split, harness and grader. `tasks` is None for a family that the taskset of now does not have.

    `drawn` counts its tasks that a group was drawn for, `solved` is over the rollouts that are counted, `newest` over those of `version`.
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
class VersionPoint:
    """What the weights of these numbers solved: one version, or several that were put together.

    Example: ``VersionPoint(first=4, last=5, solved=solved)``
    """

    first: int
    last: int
    solved: SolvedShare


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedCurve:
    """Success over versions, oldest first. `name` is "held out" or "train"."""

    name: str
    points: tuple[VersionPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetLine:
    """One taskset: that of now (`current`), or one whose rollouts are still on record. `tasks` None: not read.

    Example: ``TasksetLine(name="functions", hash="9f2c...", current=True, tasks=120, rollouts=960, first=10.0, last=90.0)``
    """

    name: str
    hash: str
    current: bool
    tasks: int | None
    rollouts: int
    first: float | None
    last: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLine:
    """One rollout. `value` None: not graded, or not over. `ended` is "waiting" or "under way" before its end, `at` is then None.

    `seq` counts what was read of the record. `policy` is the oldest version that made a token, `policy_last` the newest.
    """

    seq: int
    episode: str
    task: str
    family: str
    split: str
    harness: str
    group: str | None
    member: int | None
    at: float | None
    value: float | None
    solved: bool
    cheated: tuple[str, ...]
    ended: str
    policy: PolicyVersion | None = None
    policy_last: PolicyVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUnderWay:
    """One group that the trainer has not taken yet. `told`: all its members have ended, and it waits for the trainer."""

    name: str
    task: str
    told: bool
    members: tuple[RolloutLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Groups of which at least two members were graded. `flat`: all are worth the same, so that they teach nothing.

    `all_solved` and `none_solved` are of these.

    Example: ``GroupCounts(graded=60, flat=22, all_solved=4, none_solved=18)``
    """

    graded: int
    flat: int
    all_solved: int
    none_solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """The worker's groups: drawn so far, taken by the trainer, under way (told ones included). `at`: when its journal was written last."""

    drawn: int
    spent: int
    open: int
    told: int
    at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How much of the files was read. `kept` rollouts are counted, `dropped` older ones were let go, `skipped` bytes were passed over,
    `behind` bytes are to be read yet, `bad` lines were no record. `tasks` says what keeps the taskset from being read; "" if nothing does.
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
    """Simulated worlds of a run. `source` is `learn.source`, `family` the one that `curves` are of ("": all).

    `ended` counts rollouts by what ended them, `cheated` those that cheated, `cheats` by what was tried, with the newest rollout of each.
    `marks` are released versions.
    """

    source: str
    file: str
    family: str
    tasksets: tuple[TasksetLine, ...]
    families: tuple[FamilyLine, ...]
    more_families: int
    curves: tuple[SolvedCurve, ...]
    marks: tuple[tuple[int, str], ...]
    groups: GroupCounts
    pacing: Pacing
    ended: Mapping[str, int]
    cheated: int
    cheats: tuple[tuple[str, int, str], ...]
    under_way: tuple[GroupUnderWay, ...]
    newest: tuple[RolloutLine, ...]
    reading: Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """Which rollouts to list. "" and None stand for any; `before`: read earlier than that one.

    `outcome` is solved, failed, ungraded or cheated.

    Example: ``RolloutQuery(task="calc-1", outcome="solved")``
    """

    task: str = ""
    family: str = ""
    split: str = ""
    outcome: str = ""
    ended: str = ""
    before: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutList:
    """A page of rollouts that ended, newest first; `count` is of all that fit and are on record."""

    rows: tuple[RolloutLine, ...]
    count: int
    older: int | None
    reading: Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidPart:
    """A part of what the model was given. `role` is "" where the template does not say it. `cut` characters are not shown."""

    role: str
    text: str
    cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """A tool that the model called. `arguments` are JSON text. Example: ``CallPart(name="read", arguments='{"path": "calc.py"}')``"""

    name: str
    arguments: str
    cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    """One turn of a rollout: what was new in its prompt, and what the model answered. `at` counts from 0.

    `new` of `prompt` tokens were not in the turn before; `rewritten`: what had been before was given otherwise. `missing`: the log has
    no such turn any more; `redacted`: its words were erased.
    """

    at: int
    turn: str
    versions: tuple[PolicyVersion, ...] = ()
    prompt: int = 0
    new: int = 0
    sampled: int = 0
    finish: str = ""
    seconds: float = 0.0
    given: tuple[SaidPart, ...] = ()
    reasoning: SaidPart | None = None
    answer: SaidPart | None = None
    calls: tuple[CallPart, ...] = ()
    rewritten: bool = False
    redacted: bool = False
    missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """One file that the rollout left otherwise than it found it. `diff` None: its content was no text, or not kept.

    `cut` characters are not shown. Example: ``FileChange(path="calc.py", kind="written", diff="@@ -1 +1 @@...")``
    """

    path: str
    kind: str
    diff: str | None
    cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDetail:
    """One rollout, whole. `members` are those of its group, itself included, in their order.

    `turns` counts its turns, `steps` are a window of them that begins at `first`. What is known from the record is empty without
    (`on_record`).
    """

    line: RolloutLine
    members: tuple[RolloutLine, ...]
    steps: tuple[RolloutStep, ...]
    first: int
    turns: int
    parts: Mapping[str, float]
    why: str
    effort: Mapping[str, float]
    changes: tuple[FileChange, ...]
    more_changes: int
    on_record: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenPart:
    """What only the grader and the operator see of a task: what the grader is told, and files that lie in its own sandbox."""

    data: Mapping[str, Any]
    files: tuple[tuple[str, SaidPart], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """One task as the taskset has it. `hidden` is None for who may not see it; `hidden_files` and `hidden_facts` say how much that is."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDetail:
    """One task and its rollouts. `facts` None: the taskset of now does not have it, or was not read (`reading` says why)."""

    id: str
    facts: TaskFacts | None
    points: tuple[VersionPoint, ...]
    solved: SolvedShare | None
    rollouts: RolloutList
    reading: Reading


class WorldFacts(Protocol):
    """Answers the questions of the pages of simulated worlds, each in bounded time. Raises Unavailable."""

    async def worlds(self, family: str) -> WorldsNow:
        """All of it, with the curves of one family ("": of all)."""
        ...

    async def rollouts(self, query: RolloutQuery) -> RolloutList:
        """Rollouts that ended, newest first."""
        ...

    async def rollout(self, episode: str, first: int) -> RolloutDetail | None:
        """One rollout, its steps from `first` on; None if nothing is known of it."""
        ...

    async def task(self, id: str, *, hidden: bool) -> TaskDetail | None:
        """One task, with what is hidden if that is asked for; None if neither the taskset nor a rollout names it."""
        ...
