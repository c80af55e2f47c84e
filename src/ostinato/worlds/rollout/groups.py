"""The curriculum, the state of each group of rollouts, and the worker's event journal. The state is a fold over the journal, so a restart
replays it exactly.

Life of a group: it is *drawn* with a task from `next_task`; its members begin and end, some more than once; it is *told* once all members
have ended for good and its verdicts are in the log; it is *spent* once the trainer has taken it or it was held back, which `SpentGroups`
reads from the run's log. `Groups.events` is a compact history that recreates the state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from ostinato.core.errors import Corrupt, StorageFull
from ostinato.core.files import private, sync_directory
from ostinato.core.records import Batch, Holdback, Row
from ostinato.core.seams import Cursor
from ostinato.core.verdicts import BELIEF, CLOSED, FAILED, GRADED, MEASURED
from ostinato.worlds.harness.rollout import Ended, Rollout

# ---------------------------------------------------------------- the curriculum


LEAST, MOST = 0.1, 0.9  # solve rates: outside this range, a group seldom holds both a success and a failure
DECAY = 1 - 1 / 32  # per rollout, because the policy learns: a task that was too hard may not be any more


@dataclass(slots=True, kw_only=True)
class Success:
    """A task's recent solve rate: exponentially decayed sums of its rollouts and of their grades. Each rollout counts `DECAY` times as much
    as the next one.

    Example: ``Success(rollouts=16, grades=4.0).teaches``
    """

    rollouts: float = 0.0
    grades: float = 0.0

    def count(self, grade: float) -> None:
        """Count one more rollout."""
        self.rollouts = DECAY * self.rollouts + 1
        self.grades = DECAY * self.grades + grade

    @property
    def teaches(self) -> bool:
        """True if the mean grade lies between `LEAST` and `MOST`, or if there are no rollouts yet."""
        return not self.rollouts or LEAST <= self.grades / self.rollouts <= MOST


def shuffled(tasks: Iterable[str], epoch: int, seed: int) -> list[str]:
    """Return the tasks in an epoch's order, which depends on the seed but not on the order in which they are given."""

    def sort_key(task: str) -> bytes:
        return hashlib.blake2b(f"{seed}\0{epoch}\0{task}".encode(), digest_size=16).digest()

    return sorted(tasks, key=sort_key)


def next_task(left: Sequence[str], known: Mapping[str, Success], *, curriculum: bool) -> str:
    """Return the next of an epoch's remaining tasks: with the curriculum, the first one that teaches, if there is one; otherwise the first.

    No task is left out. Tasks that are too easy or too hard come at the end of the epoch, by when that may have changed.
    """
    if not curriculum:
        return left[0]
    return next((task for task in left if known.get(task, Success()).teaches), left[0])


# ---------------------------------------------------------------- the groups


Event = Mapping[str, Any]
_TASKS_PER_LINE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """How a rollout ended. `grade`: None if it ended for a reason outside the policy. `beliefs`: the change of the belief in the known
    answer at each turn; () if it was not measured.

    Example: ``RolloutOutcome(episode="w3f.0.2.0", turns=("chatcmpl-3f:0",), grade=1.0)``
    """

    episode: str
    turns: tuple[str, ...]
    grade: float | None
    beliefs: tuple[float, ...] = ()


@dataclass(slots=True, kw_only=True)
class GroupMember:
    """One member of a group. `begun` counts its episodes (attempts); `last` is set once it has ended for good."""

    begun: int = 0
    failed: list[RolloutOutcome] = field(default_factory=list[RolloutOutcome])
    last: RolloutOutcome | None = None


@dataclass(slots=True, kw_only=True)
class RolloutGroup:
    """A group: the rollouts of one task whose grades are compared with each other."""

    number: int
    name: str
    task: str
    slots: list[GroupMember]
    told: bool = False
    continued: list[RolloutOutcome] = field(default_factory=list[RolloutOutcome])
    """Continuations: failed members resampled from one of their turns."""

    @property
    def ended(self) -> bool:
        """True once all members have ended for good."""
        return all(slot.last is not None for slot in self.slots)

    @property
    def graded(self) -> list[RolloutOutcome]:
        """The outcomes of the members that were graded."""
        return [slot.last for slot in self.slots if slot.last is not None and slot.last.grade is not None]

    @property
    def flat(self) -> bool:
        """True if all graded rollouts have the same grade (or there are fewer than two)."""
        return len({outcome.grade for outcome in (*self.graded, *self.continued)}) < 2

    def settled(self, first: int) -> bool:
        """Return True if at least two of the first `first` members were graded, all of them alike, and no other member has begun. Then the
        others need not run.

        With binary grades this keeps the direction of a task's expected gradient, since the members of a group are exchangeable given
        their grades. It only changes the weight of each task: tasks that are nearly always or nearly never solved count less.
        """
        grades = [
            slot.last.grade for slot in self.slots[:first] if slot.last is not None and slot.last.grade is not None
        ]
        begun = any(slot.begun for slot in self.slots[first:])
        return len(grades) >= 2 and len(set(grades)) == 1 and first < len(self.slots) and not begun

    @property
    def ungraded(self) -> list[RolloutOutcome]:
        """The attempts that ended for a reason outside the policy."""
        last = [slot.last for slot in self.slots if slot.last is not None and slot.last.grade is None]
        return [*(outcome for slot in self.slots for outcome in slot.failed), *last]

    @property
    def turns(self) -> list[str]:
        """The turns of the graded rollouts, which go to the trainer."""
        return [turn for outcome in (*self.graded, *self.continued) for turn in outcome.turns]


def most_steps_behind(*, per_step: int, lead: int, window: int) -> int:
    """Return the bound on a group's staleness: the most steps by which its oldest token can lag behind the trainer, however long its
    slowest rollout takes.

    Before this group the trainer may take, `per_step` at a time, all groups that were open when it was drawn and all later ones that the
    window admits. When it is drawn, one step is in progress and the weights of the one before are being stored: two more steps.

    Example: ``most_steps_behind(per_step=8, lead=2, window=16) == 5``
    """
    return (lead * per_step - 1 + window - 1) // per_step + 2


class Groups:
    """The state of the journal: the groups that are not spent yet, and the position in the epochs over `tasks` (task ids).

    `token` is the prefix of the groups' names, which makes them unique among journals. `flat_count`: the trainer takes flat groups, too, so
    they count as waiting for it.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        token: str,
        seed: int = 0,
        epochs: int = 1,
        curriculum: bool = True,
        flat_count: bool = False,
    ) -> None:
        self._tasks, self.token, self._seed = tuple(tasks), token, seed
        self._epochs, self._curriculum, self._flat_count = epochs, curriculum, flat_count
        self._left: list[str] = []
        self.known: dict[str, Success] = {}
        self.latest: dict[str, int] = {}  # task -> the epoch in which it was last drawn
        self.read_upto: int | None = None  # the log's cursor up to which all outcomes are in the journal
        self.epoch = -1  # the current epoch
        self.drawn = 0
        self.spent = 0
        self.open: dict[int, RolloutGroup] = {}

    def draw(self, size: int) -> dict[str, Any] | None:
        """Return the event that draws the next group, or None once every task was drawn in every epoch. The state changes only when the
        event is applied.
        """
        left, epoch = self._left, self.epoch
        if not left:
            left, epoch = shuffled(self._tasks, self.epoch + 1, self._seed), self.epoch + 1
            if self._epochs and epoch >= self._epochs:
                return None
        task = next_task(left, self.known, curriculum=self._curriculum)
        return {"kind": "drawn", "n": self.drawn, "task": task, "epoch": epoch, "size": size}

    def apply(self, event: Event) -> None:
        """Apply one event to the state."""
        if "after" in event:
            self.read_upto = max(self.read_upto or 0, int(event["after"]))
        if event["kind"] == "drawn":
            self._add_group(event)
        elif event["kind"] == "known":
            self._restore_tasks(event)
        elif event["kind"] == "counted":
            self._restore_counters(event)
        elif (group := self.open.get(event["n"])) is not None:
            self._update(group, event)

    def episode(self, number: int, member: int) -> str:
        """Return the name of a member's next episode."""
        group = self.open[number]
        return f"{group.name}.{member}.{group.slots[member].begun}"

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events that recreate this state in a new `Groups`: the histories of the open groups, the tasks' solve rates, and finally
        the counters, which overwrite the sums of the earlier events.
        """
        for group in self.open.values():
            yield from _history(group, self.latest.get(group.task, 0))
        known = [(task, epoch, self.known.get(task)) for task, epoch in self.latest.items()]
        rows = [[task, epoch, *([found.rollouts, found.grades] if found else [])] for task, epoch, found in known]
        for start in range(0, len(rows), _TASKS_PER_LINE):
            yield {"kind": "known", "tasks": rows[start : start + _TASKS_PER_LINE]}
        counts = {"kind": "counted", "epoch": self.epoch, "drawn": self.drawn, "spent": self.spent}
        yield counts if self.read_upto is None else counts | {"after": self.read_upto}

    def may_begin(self, *, per_step: int, lead: int, window: int) -> bool:
        """Return True if another group may begin without being too far ahead of the trainer (`lead`) or of the oldest group in progress
        (`window`).
        """
        waiting = [group.number for group in self.open.values() if not group.told]
        near = not waiting or self.drawn < min(waiting) + window
        ahead = sum(1 for group in self.open.values() if not (group.told and group.flat) or self._flat_count)
        return near and ahead < lead * per_step

    def _add_group(self, event: Event) -> None:
        if event["epoch"] != self.epoch:
            self.epoch, self._left = event["epoch"], shuffled(self._tasks, event["epoch"], self._seed)
        if event["task"] in self._left:  # not so if the taskset has changed since
            self._left.remove(event["task"])
        self.latest[event["task"]] = event["epoch"]
        number = event["n"]
        self.drawn = number + 1
        slots = [GroupMember() for _ in range(event["size"])]
        self.open[number] = RolloutGroup(number=number, name=f"{self.token}.{number}", task=event["task"], slots=slots)

    def _restore_tasks(self, event: Event) -> None:
        for task, epoch, *sums in event["tasks"]:
            self.latest[task] = epoch
            if sums:
                rollouts, grades = sums
                self.known[task] = Success(rollouts=rollouts, grades=grades)

    def _restore_counters(self, event: Event) -> None:
        epoch, drawn, spent = (int(event[name]) for name in ("epoch", "drawn", "spent"))
        self.epoch, self.drawn, self.spent = epoch, drawn, spent
        left = shuffled(self._tasks, epoch, self._seed) if epoch >= 0 else []
        self._left = [task for task in left if self.latest.get(task) != epoch]

    def _update(self, group: RolloutGroup, event: Event) -> None:
        match event["kind"]:
            case "begun":
                group.slots[event["member"]].begun += 1
            case "ended":
                slot, grade = group.slots[event["member"]], event["grade"]
                beliefs = tuple(event.get("beliefs", ()))
                outcome = RolloutOutcome(
                    episode=event["episode"], turns=tuple(event["turns"]), grade=grade, beliefs=beliefs
                )
                if event["last"]:
                    slot.last = outcome
                else:
                    slot.failed.append(outcome)
                if grade is not None:
                    self.known.setdefault(group.task, Success()).count(grade)
            case "continued":
                turns = tuple(event["turns"])
                group.continued.append(RolloutOutcome(episode=event["episode"], turns=turns, grade=event["grade"]))
            case "settled":
                del group.slots[int(event["size"]) :]
            case "told":
                group.told = True
            case "spent":
                del self.open[group.number]
                self.spent += 1
            case _:
                pass


def open_groups(events: Iterable[Event]) -> Mapping[int, RolloutGroup]:
    """Return the groups that are not spent after these events, by number."""
    groups = Groups((), token="")
    for event in events:
        groups.apply(event)
    return groups.open


def set_back(events: Iterable[Event], lost: Iterable[int]) -> list[dict[str, Any]]:
    """Return a journal's events for use after an older backup of the log was restored: without the log's cursor, and with the `lost` groups
    given up.
    """
    kept = [{name: value for name, value in event.items() if name != "after"} for event in events]
    return [*kept, *({"kind": "spent", "n": number} for number in lost)]


def _history(group: RolloutGroup, epoch: int) -> Iterator[dict[str, Any]]:
    """Yield the fewest events that recreate a group."""
    yield {"kind": "drawn", "n": group.number, "task": group.task, "epoch": epoch, "size": len(group.slots)}
    for member, slot in enumerate(group.slots):
        about = {"n": group.number, "member": member}
        yield from ({"kind": "begun", **about, "episode": f"{group.name}.{member}.{n}"} for n in range(slot.begun))
        for outcome in (*slot.failed, *([] if slot.last is None else [slot.last])):
            ended = {"episode": outcome.episode, "last": outcome is slot.last, "turns": list(outcome.turns)}
            beliefs = {"beliefs": list(outcome.beliefs)} if outcome.beliefs else {}
            yield {"kind": "ended", **about, **ended, "grade": outcome.grade, **beliefs}
    for outcome in group.continued:
        again = {"episode": outcome.episode, "turns": list(outcome.turns), "grade": outcome.grade}
        yield {"kind": "continued", "n": group.number, **again}
    if group.told:
        yield {"kind": "told", "n": group.number}


# ---------------------------------------------------------------- the journal


logger = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
"""A larger journal is compacted. The run's page reads a file that it has not seen before whole up to eight times this size."""
# it must also have grown by this factor since the last compaction, so that a large state is not rewritten again and again
TIMES_NEEDED = 4


class EventFile:
    """The journal: an append-only file of events, one JSON line each, that can be compacted. Opening it drops at most a last line that a
    kill cut short.

    The first line holds a random `token` that identifies the file; after a rewrite also the number of rewritten lines and their hash. The
    file is `grown` beyond `most_bytes`, or beyond `TIMES_NEEDED` times its size after the last rewrite, if that is more.
    """

    def __init__(self, path: Path, token: str, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most, self._rewrite_at = path, most_bytes, most_bytes
        self._file = _appending(path)
        self.token = token

    @classmethod
    def open(cls, path: Path, most_bytes: int = MOST_BYTES) -> tuple[EventFile, list[dict[str, Any]]]:
        """Open or create the file. Returns it with its events. Raises Corrupt, StorageFull."""
        path.touch(mode=0o600)
        _beside(path).unlink(missing_ok=True)  # left behind by a kill
        with path.open("r+b") as file:
            events, whole = _read(path, file)
            file.truncate(whole)
        if events:
            return cls(path, str(events[0]["token"]), most_bytes), events[1:]
        made = cls(path, f"w{secrets.token_hex(4)}", most_bytes)
        made.append({"kind": "opened", "token": made.token}, sync=True)
        return made, []

    @property
    def grown(self) -> bool:
        """True if the file should be compacted by `rewrite`."""
        return os.fstat(self._file.fileno()).st_size > self._rewrite_at

    def append(self, event: Mapping[str, Any], *, sync: bool = False) -> None:
        """Append one event. With `sync` it is fsynced and survives a crash of the machine. Raises StorageFull, with nothing written."""
        size = os.fstat(self._file.fileno()).st_size  # not the file position, which a failed append may have moved
        data = _line(event)
        try:
            if self._file.write(data) != len(data):
                raise OSError("cut short")
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(size)
            raise StorageFull(f"{self._path} cannot be written: {error}; free some space") from error

    def rewrite(self, events: Iterable[Mapping[str, Any]]) -> bool:
        """Replace the file's events by these, atomically. If there is no room, logs a warning and returns False: the old file stays in use
        and is `grown` again after `most_bytes` more.

        Raises StorageFull if the file was replaced but the new one may not survive a crash of the machine.
        """
        lines = b"".join(map(_line, events))
        first = {"kind": "opened", "token": self.token, "lines": lines.count(b"\n"), "hash": _hash(lines)}
        data = _line(first) + lines
        try:
            made = _replaced(self._path, data)
        except OSError as error:
            self._rewrite_at = os.fstat(self._file.fileno()).st_size + self._most
            logger.warning("%s could not be compacted and keeps growing: %s; free some space", self._path, error)
            return False
        self._file.close()
        self._file, self._rewrite_at = made, max(self._most, TIMES_NEEDED * len(data))
        try:
            sync_directory(self._path.parent)
        except OSError as error:
            raise StorageFull(f"{self._path.parent} cannot be written: {error}; see to the disk") from error
        return True

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _appending(path: Path) -> FileIO:
    return FileIO(path, "a", opener=private)


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def _hash(lines: bytes) -> str:
    return hashlib.blake2b(lines, digest_size=16).hexdigest()


def _replaced(path: Path, data: bytes) -> FileIO:
    """Atomically replace a file by one with this content, fsynced. Returns it open for appending. Raises OSError, with the old file
    kept.
    """
    new = _beside(path)
    new.unlink(missing_ok=True)
    file = _appending(new)
    try:
        if file.write(data) != len(data):
            raise OSError("cut short")
        os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        file.close()
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    return file


def _read(path: Path, file: BinaryIO) -> tuple[list[dict[str, Any]], int]:
    """Return the events of the complete lines, and the offset at which these lines end. Raises Corrupt."""
    events, whole, rewritten, digest = list[dict[str, Any]](), 0, 0, hashlib.blake2b(digest_size=16)
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):  # cut short by a kill
            break
        whole += len(line)
        try:
            event: Any = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or ("token" if number == 1 else "kind") not in event:
            raise Corrupt(f"{path}, line {number} is no event; move the file away to start over")
        events.append(cast("dict[str, Any]", event))
        if number == 1:
            rewritten = int(events[0].get("lines", 0))
        elif number <= 1 + rewritten:
            digest.update(line)
    if rewritten and (len(events) <= rewritten or digest.hexdigest() != events[0].get("hash")):
        raise Corrupt(
            f"{path}: its first {rewritten} events are not what was written; move the file away to start over"
        )
    return events, whole


# ---------------------------------------------------------------- verdicts as feedback events


MOST_EVENTS = 1000  # per call; the events of a call enter the log atomically


def verdicts(group: RolloutGroup, most: int = MOST_EVENTS) -> list[list[dict[str, Any]]]:
    """Return the feedback events that report a group's verdicts, one list per call. They are idempotent: the same group gives the same ids
    and values, so a worker that was killed in between may report all of them again.

    A rollout's last turn gets its grade, the turns before it get 0; changes of the belief in a known answer come before the grades. The
    last call also closes the group, with an event about a turn that gets a verdict in the same call. A group without turns gives no calls.
    """
    events = [_event(turn, FAILED, 1.0) for outcome in group.ungraded for turn in outcome.turns]
    for outcome in (*group.continued, *group.graded):
        events += [_event(turn, BELIEF, value) for turn, value in zip(outcome.turns, outcome.beliefs, strict=False)]
        for turn in outcome.turns:
            final = turn == outcome.turns[-1]
            events.append(_event(turn, GRADED, (outcome.grade or 0.0) if final else 0.0))
    if not events:
        return []
    closing = _event(events[-1]["target"], CLOSED, float(len(group.graded)))
    calls = [events[start : start + most - 1] for start in range(0, len(events), most - 1)]
    calls[-1].append(closing | {"id": f"{CLOSED}:{group.name}"})
    return calls


def measured(turns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the events for a rollout that must not be trained on."""
    return [_event(turn, MEASURED, 1.0) for turn in turns]


def shape(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return statistics of rollouts: the sampled tokens and turns of each, how many were cut by a length limit, ran out of time, broke
    their sandbox or failed for a reason outside the policy, and the total number of summaries.
    """
    ended = [rollout.ended for rollout in rollouts]
    return {
        "tokens": [int(rollout.effort.get("tokens", 0)) for rollout in rollouts],
        "turns": [len(rollout.turns) for rollout in rollouts],
        "cut": ended.count(Ended.LENGTH),
        "timeouts": ended.count(Ended.TIMEOUT),
        "broken": ended.count(Ended.BROKEN),
        "failed": ended.count(Ended.FAILED),
        "summaries": sum(int(rollout.effort.get("summaries", 0)) for rollout in rollouts),
    }


def _event(turn: str, name: str, value: float) -> dict[str, Any]:
    return {"id": f"{name}:{turn}", "target": turn, "name": name, "value": value, "source": "code"}


# ---------------------------------------------------------------- the outcome of reported groups


_SINGLE_TURN_REASONS = (
    "finish:", "arm:", "empty", "greedy", "top_p", "cold", "purpose:", "late_group", "gold", "gone", "stale_turn:", "secret",
    "consent:",
)  # fmt: skip
"""Prefixes of the reasons that hold back a single turn and not its group."""


class OutcomeRows(Protocol):
    """The run's log, or a remote view of it."""

    def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """As `Log.read`."""
        ...


class SpentGroups:
    """Reads from the log, after a cursor, which groups the trainer has taken and which were held back."""

    def __init__(self, log: OutcomeRows, after: Cursor) -> None:
        self._log = log
        self.cursor = after
        self.steps = 0
        self._group_of: dict[str, int] = {}  # turn -> the number of its group
        self._found: dict[int, None] = {}  # spent groups that were not returned yet

    def expect(self, number: int, turns: Iterable[str]) -> None:
        """Register a group by its graded turns. Must be called before the group's verdicts are reported, or its outcome may be missed."""
        self._group_of |= dict.fromkeys(turns, number)

    async def look(self) -> Sequence[int]:
        """Return the numbers of the groups that were spent since the last call. Raises Unavailable, Corrupt."""
        found = self._found  # groups found before a failure are returned by the next call
        async for place, row in self._log.read(self.cursor, {Batch, Holdback}):
            self.cursor = place
            if isinstance(row, Batch):
                self.steps = max(self.steps, row.step)
                found.update(dict.fromkeys(self._group_of[turn] for turn in row.turns if turn in self._group_of))
            elif (
                isinstance(row, Holdback)
                and row.turn in self._group_of
                and not row.reason.startswith(_SINGLE_TURN_REASONS)
            ):
                found[self._group_of[row.turn]] = None
        if found:
            self._group_of = {turn: number for turn, number in self._group_of.items() if number not in found}
        self._found = {}
        return list(found)
