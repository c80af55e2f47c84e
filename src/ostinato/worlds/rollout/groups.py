"""The state of each group of rollouts: a fold over the journal's events, in order, that a restart repeats exactly; and the journal itself.

`next_task` chooses what a group works on. A group is drawn, and its members begin and end, some more than once. Once all have ended for
good and its verdicts are in the log, it is *told*. Once the trainer has taken it, or it was held back, it is *spent*: the trainer's batches
and the desk's reasons for holding back are read from the log. `Groups.events` are the few events that recreate this state.
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


LEAST, MOST = 0.1, 0.9  # share of rollouts solved: outside of this, a group seldom holds both a success and a failure
KEPT = 1 - 1 / 32  # decay with each further rollout: the policy learns, so a task that was too hard may no longer be


@dataclass(slots=True, kw_only=True)
class Success:
    """The number of a task's recent rollouts, and the sum of their grades: each counts `KEPT` times as much as the one after it.

    Example: ``Success(rollouts=16, grades=4.0).teaches``
    """

    rollouts: float = 0.0
    grades: float = 0.0

    def count(self, grade: float) -> None:
        """Count one more rollout."""
        self.rollouts = KEPT * self.rollouts + 1
        self.grades = KEPT * self.grades + grade

    @property
    def teaches(self) -> bool:
        """True if its mean grade lies between `LEAST` and `MOST`, or if it has no rollouts."""
        return not self.rollouts or LEAST <= self.grades / self.rollouts <= MOST


def shuffled(tasks: Iterable[str], epoch: int, seed: int) -> list[str]:
    """The tasks in an epoch's order: the same for the same seed, whatever order they are given in."""

    def place(task: str) -> bytes:
        return hashlib.blake2b(f"{seed}\0{epoch}\0{task}".encode(), digest_size=16).digest()

    return sorted(tasks, key=place)


def next_task(left: Sequence[str], known: Mapping[str, Success], *, curriculum: bool) -> str:
    """The next of an epoch's remaining tasks, in its order: with the curriculum, the first that teaches if any does; else the first.

    No task is left out: those that are too easy or too hard now come at the end of the epoch, and may have changed by then.
    """
    if not curriculum:
        return left[0]
    return next((task for task in left if known.get(task, Success()).teaches), left[0])


# ---------------------------------------------------------------- the groups


Event = Mapping[str, Any]
_TASKS_A_LINE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """How a rollout ended. `grade` None: something other than the policy ended it. `beliefs`: how much each turn changed the belief in the
    known answer; () if that was not measured.

    Example: ``RolloutOutcome(episode="w3f.0.2.0", turns=("chatcmpl-3f:0",), grade=1.0)``
    """

    episode: str
    turns: tuple[str, ...]
    grade: float | None
    beliefs: tuple[float, ...] = ()


@dataclass(slots=True, kw_only=True)
class GroupMember:
    """One member of a group. `begun` counts its episodes, `last` is set once it has ended for good."""

    begun: int = 0
    failed: list[RolloutOutcome] = field(default_factory=list[RolloutOutcome])
    last: RolloutOutcome | None = None


@dataclass(slots=True, kw_only=True)
class RolloutGroup:
    """The rollouts of one task that are compared with each other."""

    number: int
    name: str
    task: str
    slots: list[GroupMember]
    told: bool = False
    continued: list[RolloutOutcome] = field(default_factory=list[RolloutOutcome])
    """Failed members that were sampled anew from one of their turns."""

    @property
    def ended(self) -> bool:
        """True once all members have ended for good."""
        return all(slot.last is not None for slot in self.slots)

    @property
    def graded(self) -> list[RolloutOutcome]:
        """The members that were graded."""
        return [slot.last for slot in self.slots if slot.last is not None and slot.last.grade is not None]

    @property
    def flat(self) -> bool:
        """True if no graded rollout has a higher grade than another."""
        return len({outcome.grade for outcome in (*self.graded, *self.continued)}) < 2

    def settled(self, first: int) -> bool:
        """True if its first rollouts ended with equal grades, two at least, and none of the others has begun: these then need not begin.

        With grades of two values the expected gradient within a task keeps its direction, since a group's members are exchangeable given
        their grades; only how much each task counts changes: one that is nearly always or never solved, less.
        """
        grades = [
            slot.last.grade for slot in self.slots[:first] if slot.last is not None and slot.last.grade is not None
        ]
        begun = any(slot.begun for slot in self.slots[first:])
        return len(grades) >= 2 and len(set(grades)) == 1 and first < len(self.slots) and not begun

    @property
    def ungraded(self) -> list[RolloutOutcome]:
        """The attempts that something other than the policy ended."""
        last = [slot.last for slot in self.slots if slot.last is not None and slot.last.grade is None]
        return [*(outcome for slot in self.slots for outcome in slot.failed), *last]

    @property
    def turns(self) -> list[str]:
        """The turns of graded rollouts, which the trainer takes."""
        return [turn for outcome in (*self.graded, *self.continued) for turn in outcome.turns]


def most_steps_behind(*, per_step: int, lead: int, window: int) -> int:
    """The most steps by which a group's oldest token can lag behind the trainer, however long its slowest rollout lasts.

    The trainer may first take, `per_step` at a time, all groups that were open at this one's draw and all later ones that the window lets
    in. At the draw one step is being taken and the one before is being stored, so the weights are two steps older.

    Example: ``most_steps_behind(per_step=8, lead=2, window=16) == 5``
    """
    return (lead * per_step - 1 + window - 1) // per_step + 2


class Groups:
    """The groups that are not spent yet, and the record of what was drawn of the tasks with these ids.

    `token` is the prefix of the groups' names, by which they differ from those of another journal. `flat_count`: the trainer takes flat
    groups, too, so that they count as waiting for it.
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
        self.latest: dict[str, int] = {}  # the epoch in which a task was drawn last
        self.read_upto: int | None = None  # the cursor of the log up to which all outcomes are noted
        self.epoch = -1  # the epoch that is drawn from
        self.drawn = 0
        self.spent = 0
        self.open: dict[int, RolloutGroup] = {}

    def draw(self, size: int) -> dict[str, Any] | None:
        """The event of the next group; None once every task was drawn in every epoch. Nothing changes until the event is applied."""
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
            self._draw(event)
        elif event["kind"] == "known":
            self._know(event)
        elif event["kind"] == "counted":
            self._count(event)
        elif (group := self.open.get(event["n"])) is not None:
            self._follow(group, event)

    def episode(self, number: int, member: int) -> str:
        """The name of a member's next episode."""
        group = self.open[number]
        return f"{group.name}.{member}.{group.slots[member].begun}"

    def events(self) -> Iterator[dict[str, Any]]:
        """Events that recreate this state when applied to a new `Groups`: the history of the open groups, then what is known of tasks, then
        the counts, which replace those that the earlier events added up to.
        """
        for group in self.open.values():
            yield from _retold(group, self.latest.get(group.task, 0))
        known = [(task, epoch, self.known.get(task)) for task, epoch in self.latest.items()]
        rows = [[task, epoch, *([found.rollouts, found.grades] if found else [])] for task, epoch, found in known]
        for start in range(0, len(rows), _TASKS_A_LINE):
            yield {"kind": "known", "tasks": rows[start : start + _TASKS_A_LINE]}
        counts = {"kind": "counted", "epoch": self.epoch, "drawn": self.drawn, "spent": self.spent}
        yield counts if self.read_upto is None else counts | {"after": self.read_upto}

    def may_begin(self, *, per_step: int, lead: int, window: int) -> bool:
        """True if another group may begin: neither too far ahead of the trainer nor of the oldest group that has not ended."""
        waiting = [group.number for group in self.open.values() if not group.told]
        near = not waiting or self.drawn < min(waiting) + window
        ahead = sum(1 for group in self.open.values() if not (group.told and group.flat) or self._flat_count)
        return near and ahead < lead * per_step

    def _draw(self, event: Event) -> None:
        if event["epoch"] != self.epoch:
            self.epoch, self._left = event["epoch"], shuffled(self._tasks, event["epoch"], self._seed)
        if event["task"] in self._left:  # otherwise the taskset has changed
            self._left.remove(event["task"])
        self.latest[event["task"]] = event["epoch"]
        number = event["n"]
        self.drawn = number + 1
        slots = [GroupMember() for _ in range(event["size"])]
        self.open[number] = RolloutGroup(number=number, name=f"{self.token}.{number}", task=event["task"], slots=slots)

    def _know(self, event: Event) -> None:
        for task, epoch, *found in event["tasks"]:
            self.latest[task] = epoch
            if found:
                rollouts, grades = found
                self.known[task] = Success(rollouts=rollouts, grades=grades)

    def _count(self, event: Event) -> None:
        epoch, drawn, spent = (int(event[name]) for name in ("epoch", "drawn", "spent"))
        self.epoch, self.drawn, self.spent = epoch, drawn, spent
        left = shuffled(self._tasks, epoch, self._seed) if epoch >= 0 else []
        self._left = [task for task in left if self.latest.get(task) != epoch]

    def _follow(self, group: RolloutGroup, event: Event) -> None:
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
    """The groups that are not spent after these events, by their numbers."""
    groups = Groups((), token="")
    for event in events:
        groups.apply(event)
    return groups.open


def set_back(events: Iterable[Event], lost: Iterable[int]) -> list[dict[str, Any]]:
    """A journal's events once an older backup of the log was restored: the `lost` groups are given up, and the log is to be read again."""
    kept = [{name: value for name, value in event.items() if name != "after"} for event in events]
    return [*kept, *({"kind": "spent", "n": number} for number in lost)]


def _retold(group: RolloutGroup, epoch: int) -> Iterator[dict[str, Any]]:
    """A group's history, in as few events as possible."""
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
"""A file beyond this is rewritten with what is still needed. The run's page reads a file that is new to it whole up to eight times this."""
# it must also be this many times its size at the last rewrite: a large state is not written again and again
TIMES_NEEDED = 4


class EventFile:
    """An append-only file of events. Only a last line that a kill cut short is ever dropped.

    The first line names the file by a random `token`; after a rewrite it also holds the number of lines that were written, and their hash.
    Beyond `most_bytes` it is `grown`.
    """

    def __init__(self, path: Path, token: str, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most, self._rewrite_at = path, most_bytes, most_bytes
        self._file = _appending(path)
        self.token = token

    @classmethod
    def open(cls, path: Path, most_bytes: int = MOST_BYTES) -> tuple[EventFile, list[dict[str, Any]]]:
        """Open the file, or create it. Returns it and its events. Raises Corrupt, StorageFull."""
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
        """True if it should be rewritten."""
        return os.fstat(self._file.fileno()).st_size > self._rewrite_at

    def append(self, event: Mapping[str, Any], *, sync: bool = False) -> None:
        """Write one event; with `sync`, it also survives a crash of the machine. Raises StorageFull, with nothing written."""
        size = os.fstat(self._file.fileno()).st_size  # not the file's position, which a failed append may have moved
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
        """Replace the file's events by these, atomically. False, with a warning, if there is no room: the old file stays in use, and is
        `grown` again once it is larger by `most_bytes`.

        Raises StorageFull if the file was replaced, but may not survive a crash of the machine.
        """
        lines = b"".join(map(_line, events))
        first = {"kind": "opened", "token": self.token, "lines": lines.count(b"\n"), "hash": _hash(lines)}
        data = _line(first) + lines
        try:
            made = _replaced(self._path, data)
        except OSError as error:
            self._rewrite_at = os.fstat(self._file.fileno()).st_size + self._most
            logger.warning("%s could not be written anew and grows on: %s; free some space", self._path, error)
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
    """Replace a file by one that holds this, synced to disk and open for appending. Raises OSError, with the old one kept."""
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
    """The events of the complete lines, and the offset at which they end. Raises Corrupt."""
    events, whole, begun, digest = list[dict[str, Any]](), 0, 0, hashlib.blake2b(digest_size=16)
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
            begun = int(events[0].get("lines", 0))
        elif number <= 1 + begun:
            digest.update(line)
    if begun and (len(events) <= begun or digest.hexdigest() != events[0].get("hash")):
        raise Corrupt(f"{path}: its first {begun} events are not what was written; move the file away to start over")
    return events, whole


# ---------------------------------------------------------------- verdicts as signals


MOST_EVENTS = 1000  # of one call, which enter the log all or not at all


def verdicts(group: RolloutGroup, most: int = MOST_EVENTS) -> list[list[dict[str, Any]]]:
    """The calls that report a group's verdicts. The same group gives the same ids and values, so a worker that was killed in between can
    report all of them again.

    A rollout's last turn gets its grade, those before it get 0; what changed the belief in a known answer is said before that. The last
    call also closes the group, with an event about a turn that gets a verdict in the same call. Nothing is reported for a group without a
    turn.
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
    """The events for a rollout that is not trained on."""
    return [_event(turn, MEASURED, 1.0) for turn in turns]


def shape(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """How long rollouts were and how they ended: each rollout's sampled tokens and turns, and how many were cut by a length limit, ran out
    of time, broke their sandbox, or were ended by something other than the policy; and how often a window was summarised, in all.
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


# ---------------------------------------------------------------- what became of the groups that were told


_OF_ONE_TURN = (
    "finish:", "arm:", "empty", "greedy", "top_p", "cold", "purpose:", "late_group", "gold", "gone", "stale_turn:", "secret",
    "consent:",
)  # fmt: skip
"""Reasons that hold back a turn and not its group."""


class OutcomeRows(Protocol):
    """The run's log, or a remote view of it."""

    def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """As `Log.read`."""
        ...


class SpentGroups:
    """Finds the groups that the trainer has taken, or that were held back, in the log after a cursor."""

    def __init__(self, log: OutcomeRows, after: Cursor) -> None:
        self._log = log
        self.cursor = after
        self.steps = 0
        self._of: dict[str, int] = {}
        self._found: dict[int, None] = {}  # and not returned yet

    def expect(self, number: int, turns: Iterable[str]) -> None:
        """Expect the outcome of a group with these graded turns. Call this before the group is told, or its outcome may be missed."""
        self._of |= dict.fromkeys(turns, number)

    async def look(self) -> Sequence[int]:
        """The numbers of the groups that were spent since the last look. Raises Unavailable, Corrupt."""
        found = self._found  # what was found before a failure is returned the next time
        async for place, row in self._log.read(self.cursor, {Batch, Holdback}):
            self.cursor = place
            if isinstance(row, Batch):
                self.steps = max(self.steps, row.step)
                found.update(dict.fromkeys(self._of[turn] for turn in row.turns if turn in self._of))
            elif isinstance(row, Holdback) and row.turn in self._of and not row.reason.startswith(_OF_ONE_TURN):
                found[self._of[row.turn]] = None
        if found:
            self._of = {turn: number for turn, number in self._of.items() if number not in found}
        self._found = {}
        return list(found)
