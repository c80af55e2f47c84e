"""The data that the pages of simulated worlds show, and the protocol that provides it. Times are Unix seconds, shares lie in [0, 1].

Texts are bounded and untrusted: tasks, models and files may say anything. An unknown figure is None.
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
    """The tasks of one family, split, harness and grader. `tasks` is None for a family that the current taskset does not have.

    `drawn` counts its tasks for which a group was drawn, `solved` is over all counted rollouts, `newest` over those of `version`.
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
    """The share solved by one version, or by several that were merged.

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
    """One taskset: the current one (`current`), or one whose rollouts are still on record. `tasks` None: not read.

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

    `seq` is its number among the records read. `policy` is the oldest version that made a token, `policy_last` the newest.
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
    """Groups of which at least two members were graded. `flat`: all grades are equal, so that nothing can be learned from them.

    `all_solved` and `none_solved` count flat groups.

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
class FilesRead:
    """How much of the files was read. `kept` rollouts are counted, `dropped` older ones were forgotten, `skipped` bytes were never read,
    `behind` bytes are not read yet, `bad` lines were no record. `tasks` says why the taskset cannot be read; "" if it can.
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

    `ended` counts rollouts by what ended them, `cheated` those that cheated, `cheats` by kind of cheat, with the newest rollout of each.
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
    reading: FilesRead


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """Which rollouts to list. "" and None stand for any; `before`: with a smaller `seq`.

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
    """A page of rollouts that ended, newest first; `count` is of all on record that match."""

    rows: tuple[RolloutLine, ...]
    count: int
    older: int | None
    reading: FilesRead


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidPart:
    """A part of the model's input or output. `role` is "" if the template does not state it. `cut` characters are not shown."""

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
    """One turn of a rollout: the new part of its prompt, and the model's answer. `at` counts from 0.

    `new` of `prompt` tokens were not in the turn before; `rewritten`: the earlier text was given in another form. `missing`: the log has
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
    """One file that the rollout changed. `diff` None: its content is not text, or was not kept.

    `cut` characters are not shown. Example: ``FileChange(path="calc.py", kind="written", diff="@@ -1 +1 @@...")``
    """

    path: str
    kind: str
    diff: str | None
    cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDetail:
    """One rollout in full. `members` are the rollouts of its group, itself included, in their order.

    `turns` counts its turns, `steps` are a window of them that begins at `first`. Fields from the record are empty without one
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
    """The part of a task that only the grader and the operator see: the grader's data, and the files of its own sandbox."""

    data: Mapping[str, Any]
    files: tuple[tuple[str, SaidPart], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """One task of the taskset. `hidden` is None for visitors who may not see it; `hidden_files` and `hidden_facts` count what it holds."""

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
    """One task and its rollouts. `facts` None: the current taskset does not have it, or was not read (`reading` says why)."""

    id: str
    facts: TaskFacts | None
    points: tuple[VersionPoint, ...]
    solved: SolvedShare | None
    rollouts: RolloutList
    reading: FilesRead


class WorldFacts(Protocol):
    """Answers the questions of the pages of simulated worlds, each in bounded time. Raises Unavailable."""

    async def worlds(self, family: str) -> WorldsNow:
        """The run's simulated worlds, with the curves of one family ("": of all)."""
        ...

    async def rollouts(self, query: RolloutQuery) -> RolloutList:
        """Rollouts that ended, newest first."""
        ...

    async def rollout(self, episode: str, first: int) -> RolloutDetail | None:
        """One rollout, its steps from `first` on; None if nothing is known of it."""
        ...

    async def task(self, id: str, *, hidden: bool) -> TaskDetail | None:
        """One task, with its hidden part if asked for; None if neither the taskset nor a rollout names it."""
        ...
