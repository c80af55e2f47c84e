"""The rollout worker's heart: groups are drawn, worked on at once, graded, told and paced, and a killed worker goes on where it was.

Data flow: `Groups` says what may begin -> each member: harness + sandbox + model -> grader -> journal -> once all members of a group have
ended, their verdicts go to the gateway -> the log says when the trainer has taken them -> the next group may begin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.seams import Backend
from ostinato.worlds.grading.grade import Grader
from ostinato.worlds.harness.rollout import Ended, Harness, Model, Rollout
from ostinato.worlds.rollout.config import WorldsConfig
from ostinato.worlds.rollout.groups import Group, Groups
from ostinato.worlds.rollout.journal import EventFile
from ostinato.worlds.rollout.spending import Spending
from ostinato.worlds.rollout.telling import measured, verdicts
from ostinato.worlds.tasks.task import Split, Task, Taskset

logger = logging.getLogger(__name__)

NO_SANDBOX = frozenset({"single"})
"""Harnesses that run nothing."""

_LONGEST_PAUSE_S = 30.0
_T = TypeVar("_T")


class Gateway(Protocol):
    """What the worker needs of the gateway."""

    def model(self, episode: str, *, group: str | None, harness: str) -> Model:
        """The model of one episode."""
        ...

    async def say(self, events: list[dict[str, Any]]) -> None:
        """Send events; they are in the log on return. Raises Unavailable, BadRequest."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Who works on tasks: harnesses by name, the sandboxes that they work in (None: no harness needs one), the grader, the gateway.

    Example: ``Workshop(harnesses={"single": SingleAnswer()}, backend=None, grader=grader, gateway=gateway)``
    """

    harnesses: Mapping[str, Harness]
    backend: Backend | None
    grader: Grader
    gateway: Gateway

    async def work(self, task: Task, model: Model) -> Rollout:
        """One rollout, in a sandbox where its harness needs one. Raises Unavailable."""
        sandbox = None
        try:
            if self.backend is not None and task.harness not in NO_SANDBOX:
                sandbox = await self.backend.start(task.spec)
            return await self.harnesses[task.harness].run(task, model, sandbox)
        finally:
            if sandbox is not None:
                await sandbox.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One rollout that came to an end. `grade` None: it was not graded, `why` says why not.

    Example: ``Tried(turns=("chatcmpl-3f:0",), grade=1.0, why="submitted")``
    """

    turns: tuple[str, ...]
    grade: float | None
    why: str
    solved: bool = False
    cheated: bool = False


class Rollouts:
    """Works on groups of rollouts until every task was drawn as often as it may be, or it is cancelled.

    Args:
        tasks: the taskset; its `train` tasks teach, the others are only measured.
        shop: who works on them.
        journal, events: the worker's memory, and what it held at the start.
        spending: tells what the trainer has taken.
        config: how many, how far ahead.
        tell: told what happens, for people: a kind and fields.
    """

    def __init__(
        self,
        tasks: Taskset,
        shop: Workshop,
        journal: EventFile,
        events: list[dict[str, Any]],
        spending: Spending,
        config: WorldsConfig,
        tell: Callable[..., None],
    ) -> None:
        self._tasks = {task.id: task for task in tasks.tasks}
        self._shop, self._journal, self._spending = shop, journal, spending
        self._config, self._tell = config, tell
        taught = [task.id for task in tasks.tasks if task.split is Split.TRAIN]
        self.groups = Groups(
            taught, token=journal.token, seed=config.seed, epochs=config.epochs, curriculum=config.curriculum
        )
        for event in events:
            self.groups.apply(event)
        self._places = asyncio.Semaphore(config.concurrency)
        self._under_way: dict[asyncio.Task[None], None] = {}
        self.doing = "starting"

    async def run(self) -> None:
        """Until all is drawn and spent, but for groups that are too few for a step. Raises what a group raised: BadConfig of a grader,
        StorageFull, Corrupt.
        """
        try:
            for group in list(self.groups.open.values()):
                self._spending.expect(group.number, group.turns if group.told else ())
                if not group.told:
                    self._begin(self._work(group))
            while self._draw() or self._under_way or len(self.groups.open) >= self._config.groups:
                await self._look()
                await self._ended(self._config.poll_s)
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    # ------------------------------------------------------------ pace

    def _draw(self) -> bool:
        """Begin as many groups as may. True if more are to come."""
        config = self._config
        while self.groups.may_begin(per_step=config.groups, lead=config.lead, window=config.window):
            event = self.groups.draw(config.group)
            if event is None:
                self.doing = "waiting for the trainer: every task was drawn as often as it may be (worlds.epochs)"
                return False
            self._note(event, sync=True)
            self._begin(self._work(self.groups.open[event["n"]]))
            if config.measure_every and event["n"] % config.measure_every == 0:
                self._begin(self._measure(event["n"]))
        told = sum(group.told for group in self.groups.open.values())
        self.doing = f"{len(self.groups.open) - told} groups under way, {told} wait for the trainer"
        return True

    async def _look(self) -> None:
        try:
            spent = await self._spending.look()
        except Unavailable as error:
            logger.warning("the log cannot be read now: %s", error)
            return
        for number in spent:
            self._note({"kind": "spent", "n": number, "after": self._spending.cursor})

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._under_way[asyncio.ensure_future(work)] = None

    async def _ended(self, timeout_s: float) -> None:
        """Wait a while, or until something ends; raise what it raised."""
        if not self._under_way:
            await asyncio.sleep(timeout_s)
            return
        done, _ = await asyncio.wait(self._under_way, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._under_way[task]
            task.result()

    def _note(self, event: dict[str, Any], *, sync: bool = False) -> None:
        self._journal.append(event, sync=sync)
        self.groups.apply(event)

    # ------------------------------------------------------------ one group

    async def _work(self, group: Group) -> None:
        """The members that have not ended, then the group's verdicts."""
        task = self._tasks.get(group.task)
        if task is None:
            logger.warning("group %s is given up: the taskset has no task %r any more", group.name, group.task)
            self._note({"kind": "spent", "n": group.number, "after": self._spending.cursor}, sync=True)
            return
        async with asyncio.TaskGroup() as members:
            for member, slot in enumerate(group.slots):
                if slot.last is None:
                    members.create_task(self._member(group, member, task))
        self._spending.expect(group.number, group.turns)
        for events in verdicts(group):
            await self._patiently(lambda events=events: self._shop.gateway.say(events))
        self._note({"kind": "told", "n": group.number}, sync=True)
        grades = [outcome.grade or 0.0 for outcome in group.graded]
        self._tell(
            "group",
            n=group.number,
            task=group.task,
            family=task.family,
            epoch=self.groups.epoch,
            graded=len(grades),
            ungraded=len(group.ungraded),
            reward=sum(grades) / len(grades) if grades else None,
            flat=len(set(grades)) < 2,
        )
        if not group.turns:
            self._note({"kind": "spent", "n": group.number, "after": self._spending.cursor})

    async def _member(self, group: Group, member: int, task: Task) -> None:
        """One rollout, tried again where something other than the policy ended it."""
        async with self._places:
            while group.slots[member].last is None:
                episode = self.groups.episode(group.number, member)
                self._note({"kind": "begun", "n": group.number, "member": member, "episode": episode})
                tried = await self._try(task, episode, group.name)
                last = tried.grade is not None or len(group.slots[member].failed) + 1 >= self._config.tries
                event = {"kind": "ended", "n": group.number, "member": member, "episode": episode, "last": last}
                event |= {"turns": tried.turns, "grade": tried.grade, "why": tried.why}
                self._note(event, sync=True)
                if not last:
                    await asyncio.sleep(self._config.retry_pause_s)

    async def _try(self, task: Task, episode: str, group: str | None) -> Tried:
        """One rollout and its grade. A gateway or a sandbox that is away is waited for; what it left unfinished is torn."""
        harness = self._shop.harnesses[task.harness]
        pause, number = self._config.retry_pause_s, 0
        while True:
            name = episode if number == 0 else f"{episode}.{number}"
            model = self._shop.gateway.model(name, group=group, harness=harness.hash)
            try:
                rollout = await self._shop.work(task, model)
                break
            except Unavailable as error:
                logger.info("rollout %s is begun anew: %s", name, error)
            await asyncio.sleep(pause)
            pause, number = min(2 * pause, _LONGEST_PAUSE_S), number + 1
        if rollout.ended is Ended.FAILED or not rollout.turns:
            return Tried(turns=rollout.turns, grade=None, why=str(rollout.detail.get("why", rollout.ended)))
        grade = await self._patiently(lambda: self._shop.grader.grade(task, rollout))
        return Tried(
            turns=rollout.turns,
            grade=0.0 if grade.cheated else grade.value,
            why=rollout.ended.value,
            solved=grade.solved,
            cheated=bool(grade.cheated),
        )

    async def _patiently(self, ask: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Ask until it is there. Raises what no other try would change."""
        pause = self._config.retry_pause_s
        while True:
            try:
                return await ask()
            except BadRequest:
                raise
            except Unavailable as error:
                logger.info("tried again in %.1f s: %s", pause, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    # ------------------------------------------------------------ what is held out

    async def _measure(self, number: int) -> None:
        """Each task that teaches nothing, once, with the newest weights."""
        held_out = [task for task in self._tasks.values() if task.split is not Split.TRAIN]

        async def one(place: int, task: Task) -> tuple[Split, Tried]:
            async with self._places:
                tried = await self._try(task, f"{self._journal.token}.m{number}.{place}", None)
            if events := measured(tried.turns):
                await self._patiently(lambda: self._shop.gateway.say(events))
            return task.split, tried

        found = await asyncio.gather(*(one(place, task) for place, task in enumerate(held_out)))
        for split in sorted({task.split for task in held_out}):
            theirs = [tried for at, tried in found if at is split and tried.grade is not None]
            solved = sum(tried.solved for tried in theirs)
            cheated = sum(tried.cheated for tried in theirs)
            self._tell("measured", split=split.value, n=number, solved=solved, of=len(theirs), cheated=cheated)
