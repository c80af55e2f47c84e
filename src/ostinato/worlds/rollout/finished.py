"""Records of finished rollouts, one JSON line each, for people to read and for statistics; and the alarm on cheating.

The file holds text that a model wrote, and programs that display it read it, so everything in it is validated on reading.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated

import msgspec

from ostinato.core.errors import BadRequest
from ostinato.core.lines import whole_lines
from ostinato.core.records import PolicyVersion
from ostinato.core.sandbox import Change, ChangeKind
from ostinato.worlds.harness.rollout import Ended
from ostinato.worlds.tasks.task import Split

MOST_DIFF = 20_000
"""Most characters of all diffs of one rollout together."""

_MOST_PATHS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownChange:
    r"""A path that a rollout changed. `diff` is a unified diff against the task's original file, or None if either side is not text.

    Example: ``ShownChange(path="calc.py", kind=ChangeKind.WRITTEN, diff="--- calc.py\n+++ calc.py\n@@ -1 +1 @@\n...")``
    """

    path: str
    kind: ChangeKind
    diff: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The record of a rollout that ended for good.

    `policy` and `policy_last` are the oldest and the newest policy version that sampled one of its tokens, None if unknown; `value`, in
    [0, 1], is None if it was not graded; `at` is in Unix seconds.

    Example: ``Finished(at=9.0, taskset="9f2c", task="calc-1", family="repair", split=Split.HELD_OUT, episode="w3f.m0.1", value=1.0, ...)``
    """

    at: float
    taskset: str
    task: str
    family: str
    split: Split
    harness: str
    group: str | None
    member: int | None
    episode: str
    turns: tuple[str, ...]
    policy: PolicyVersion | None
    policy_last: PolicyVersion | None
    value: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None
    solved: bool
    why: str
    ended: Ended
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    cheated: tuple[str, ...] = ()
    effort: Mapping[str, float] = field(default_factory=dict[str, float])
    changes: tuple[ShownChange, ...] = ()

    def line(self) -> str:
        """Return the record as one line of JSON, without the line break."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def read(cls, line: str) -> Finished:
        """Parse the output of `line`. Raises BadRequest for anything else."""
        try:
            row = json.loads(line)
            if missing := {each.name for each in fields(cls)} - set(row):
                raise ValueError(f"{min(missing)} is missing")
            record = msgspec.convert(row, cls)
            numbers = (record.at, record.value or 0.0, *record.parts.values(), *record.effort.values())
            if not all(map(math.isfinite, numbers)):
                raise ValueError("a number is not finite")
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise BadRequest(f"no finished rollout: {type(error).__name__}: {error}"[:300]) from error
        return record


def shown_changes(changes: Sequence[Change], original: Callable[[str], bytes | None]) -> tuple[ShownChange, ...]:
    """Return the changes as diffs of at most `MOST_DIFF` characters together. A diff that is cut ends with a note; diffs after it are
    replaced by a note.

    `original` gives the bytes of the task's own file at a path, or None if the task has none there.
    """
    shown: list[ShownChange] = []
    left = MOST_DIFF
    for change in changes[:_MOST_PATHS]:
        if not left:  # computing a diff would block the worker's event loop
            shown.append(ShownChange(path=change.path, kind=change.kind, diff="[... left out here ...]"))
            continue
        diff = _diff(change, original(change.path))
        if diff is not None and len(diff) > left:
            diff = f"{diff[:left]}\n[... {len(diff) - left} characters left out here ...]"
            left = 0
        elif diff is not None:
            left -= len(diff)
        shown.append(ShownChange(path=change.path, kind=change.kind, diff=diff))
    if len(changes) > _MOST_PATHS:
        note = f"[... {len(changes) - _MOST_PATHS} paths left out here ...]"
        shown.append(ShownChange(path="", kind=ChangeKind.OTHER, diff=note))
    return tuple(shown)


def read_finished(lines: Iterable[str]) -> tuple[list[Finished], int]:
    """Return the finished rollouts of a file, in file order, and the number of malformed lines."""
    records: list[Finished] = []
    bad = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            records.append(Finished.read(line))
        except BadRequest:
            bad += 1
    return records, bad


def _diff(change: Change, before: bytes | None) -> str | None:
    """Return the diff of a change, None if it is not text, or the target of a link."""
    if change.kind is ChangeKind.OTHER:
        return None
    if change.kind is ChangeKind.LINK:
        return f"-> {change.data.decode('utf-8', 'replace')}"
    try:
        old = (before or b"").decode()
        new = "" if change.kind is ChangeKind.DELETED else change.data.decode()
    except UnicodeDecodeError:
        return None
    if "\0" in old or "\0" in new:
        return None
    was, now = whole_lines(old), whole_lines(new)
    # difflib's worst case is quadratic
    if len(was) * len(now) > 1 << 22 or len(old) + len(new) > 1 << 20:
        return f"[{len(was)} lines became {len(now)}: too long to compare]"
    names = (
        "/dev/null" if before is None else change.path,
        "/dev/null" if change.kind is ChangeKind.DELETED else change.path,
    )
    lines = difflib.unified_diff(was, now, *names)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


# ---------------------------------------------------------------- the cheating alarm


CHEATED = "worlds:cheated"
"""The name of the alarm that is raised while rollouts fake outcomes."""


class CheatWatch:
    """The state of the cheating alarm, updated with each finished rollout.

    `raised`: None until a rollout gives reason to change the state that the log has. The trainer gets a grade of 0 for a faked outcome in
    any case; the alarm tells people to close the loophole. It is cleared after `quiet` consecutive graded rollouts without a cheat.
    """

    def __init__(self, quiet: int) -> None:
        self._quiet, self._clean = quiet, 0
        self.raised: bool | None = None
        self.why = ""

    def take(self, record: Finished) -> None:
        """Update the state with one more rollout. A rollout that was not graded changes nothing."""
        if record.cheated:
            self._clean, self.raised = 0, True
            turn = f", turn {record.turns[-1]}" if record.turns else ""
            policy = f" by {record.policy_last}" if record.policy_last else ""
            self.why = f"task {record.task}, rollout {record.episode}{turn}{policy}: {'; '.join(record.cheated)}"[:1000]
        elif record.value is not None:
            self._clean += 1
            if self._clean >= self._quiet:
                self.raised, self.why = False, f"nobody cheated in {self._quiet} graded rollouts"
