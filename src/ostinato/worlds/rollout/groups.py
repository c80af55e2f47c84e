"""The state of each group of rollouts: a fold over the journal's events, in order, that a restart repeats exactly. Pure.

A group is drawn, and its members begin and end, some more than once. Once all have ended for good and its verdicts are in the log, it is
*told*. Once the trainer has taken it, or it was held back, it is *spent*. `Groups.events` are the few events that recreate this state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.worlds.rollout.drawing import Success, next_task, shuffled

Event = Mapping[str, Any]
_TASKS_A_LINE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rollout ended. `grade` None: something other than the policy ended it.

    Example: ``Outcome(episode="w3f.0.2.0", turns=("chatcmpl-3f:0",), grade=1.0)``
    """

    episode: str
    turns: tuple[str, ...]
    grade: float | None


@dataclass(slots=True, kw_only=True)
class Slot:
    """One member of a group. `begun` counts its episodes, `last` is set once it has ended for good."""

    begun: int = 0
    failed: list[Outcome] = field(default_factory=list[Outcome])
    last: Outcome | None = None


@dataclass(slots=True, kw_only=True)
class Group:
    """The rollouts of one task that are compared with each other."""

    number: int
    name: str
    task: str
    slots: list[Slot]
    told: bool = False

    @property
    def ended(self) -> bool:
        """True once all members have ended for good."""
        return all(slot.last is not None for slot in self.slots)

    @property
    def graded(self) -> list[Outcome]:
        """The members that were graded."""
        return [slot.last for slot in self.slots if slot.last is not None and slot.last.grade is not None]

    @property
    def flat(self) -> bool:
        """True if no graded member has a higher grade than another."""
        return len({outcome.grade for outcome in self.graded}) < 2

    @property
    def ungraded(self) -> list[Outcome]:
        """The attempts that something other than the policy ended."""
        last = [slot.last for slot in self.slots if slot.last is not None and slot.last.grade is None]
        return [*(outcome for slot in self.slots for outcome in slot.failed), *last]

    @property
    def turns(self) -> list[str]:
        """The turns of graded members, which the trainer takes."""
        return [turn for outcome in self.graded for turn in outcome.turns]


def most_steps_behind(*, per_step: int, lead: int, window: int) -> int:
    """The most steps by which a group's oldest token can lag behind the trainer, however long its slowest rollout lasts.

    The trainer may first take, `per_step` at a time, all groups that were open at this one's draw and all later ones that the window lets
    in. At the draw one step is being taken and the one before is being stored, so the weights are two steps older.

    Example: ``most_steps_behind(per_step=8, lead=2, window=16) == 5``
    """
    return (lead * per_step - 1 + window - 1) // per_step + 2


class Groups:
    """The groups that are not spent yet, and the record of what was drawn.

    Args:
        tasks: ids of the tasks to be drawn.
        token: the prefix of the groups' names, which makes them different from those of another journal.
        seed, epochs, curriculum: see `WorldsConfig`.
        flat_count: whether the trainer takes flat groups, too, so that they count as waiting for it.

    Example::

        groups = Groups(["a", "b"], token="w3f", seed=0)
        groups.apply(groups.draw(size=16))
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
        self.open: dict[int, Group] = {}

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
        slots = [Slot() for _ in range(event["size"])]
        self.open[number] = Group(number=number, name=f"{self.token}.{number}", task=event["task"], slots=slots)

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

    def _follow(self, group: Group, event: Event) -> None:
        match event["kind"]:
            case "begun":
                group.slots[event["member"]].begun += 1
            case "ended":
                slot, grade = group.slots[event["member"]], event["grade"]
                outcome = Outcome(episode=event["episode"], turns=tuple(event["turns"]), grade=grade)
                if event["last"]:
                    slot.last = outcome
                else:
                    slot.failed.append(outcome)
                if grade is not None:
                    self.known.setdefault(group.task, Success()).count(grade)
            case "told":
                group.told = True
            case "spent":
                del self.open[group.number]
                self.spent += 1
            case _:
                pass


def _retold(group: Group, epoch: int) -> Iterator[dict[str, Any]]:
    """A group's history, in as few events as possible."""
    yield {"kind": "drawn", "n": group.number, "task": group.task, "epoch": epoch, "size": len(group.slots)}
    for member, slot in enumerate(group.slots):
        about = {"n": group.number, "member": member}
        yield from ({"kind": "begun", **about, "episode": f"{group.name}.{member}.{n}"} for n in range(slot.begun))
        for outcome in (*slot.failed, *([] if slot.last is None else [slot.last])):
            ended = {"episode": outcome.episode, "last": outcome is slot.last, "turns": list(outcome.turns)}
            yield {"kind": "ended", **about, **ended, "grade": outcome.grade}
    if group.told:
        yield {"kind": "told", "n": group.number}
