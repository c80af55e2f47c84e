"""The core of the rollout worker: draws, works on, grades, reports and paces groups concurrently, and resumes after a kill.

Data flow: `Groups` says what may begin -> each member: harness + sandbox + model -> grader -> journal -> once all members of a group have
ended, their verdicts go to the gateway -> the log says when the trainer has taken them -> the next group may begin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ostinato.core.clock import wall_clock
from ostinato.core.errors import Unavailable
from ostinato.core.seams import Clock
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.rollout.attempt import FinishedRollout, RolloutAttempts, Workshop
from ostinato.worlds.rollout.config import WorldsConfig
from ostinato.worlds.rollout.finished import Finished
from ostinato.worlds.rollout.groups import EventFile, Groups, RolloutGroup, SpentGroups, shape, verdicts
from ostinato.worlds.tasks.task import Split, Task, Taskset

logger = logging.getLogger(__name__)


class Rollouts:
    """Works on groups of rollouts until every task was drawn in every epoch, or it is cancelled.

    Args:
        tasks: the taskset; its `train` tasks are trained on, the others are only measured.
        journal, events: the worker's journal, and its events at the start.
        tell: called with what happens, for people: a kind and fields.
        keep: called with each rollout that ended for good, and with each that was only measured.
        flat_count: as in `Groups`.
        beliefs: whether the belief in the tasks' known answers is measured after each turn.
    """

    def __init__(
        self,
        tasks: Taskset,
        shop: Workshop,
        journal: EventFile,
        events: list[dict[str, Any]],
        spent: SpentGroups,
        config: WorldsConfig,
        tell: Callable[..., None],
        keep: Callable[[Finished], None] = lambda _: None,
        *,
        flat_count: bool = False,
        beliefs: bool = False,
        clock: Clock = wall_clock,
    ) -> None:
        self._taskset, self._keep, self._clock = tasks, keep, clock
        self._beliefs = beliefs
        self._attempts = RolloutAttempts(
            shop, pause_s=config.retry_pause_s, tries=config.tries, patience_s=config.patience_s
        )
        self._tasks = {task.id: task for task in tasks.tasks}
        self._shop, self._journal, self._spent = shop, journal, spent
        self._config, self._tell = config, tell
        taught = [task.id for task in tasks.tasks if task.split is Split.TRAIN]
        self.groups = Groups(
            taught,
            token=journal.token,
            seed=config.seed,
            epochs=config.epochs,
            curriculum=config.curriculum,
            flat_count=flat_count,
        )
        for event in events:
            self.groups.apply(event)
        self._places = asyncio.Semaphore(config.concurrency)
        self._under_way: dict[asyncio.Task[None], None] = {}
        self._suspected: dict[int, list[tuple[FinishedRollout, tuple[float, ...]]]] = {}  # of open groups
        self._shapes: dict[int, list[Rollout]] = {}  # of open groups, those that ended since this worker began
        self.doing = "starting"

    async def run(self) -> None:
        """Work until all groups are drawn and spent, except a remainder too small for a step. Raises what a group raised: BadConfig of a
        grader, StorageFull, Corrupt.
        """
        try:
            for group in list(self.groups.open.values()):
                # after a kill between telling a group and noting that, the group may be in a batch already
                self._spent.expect(group.number, group.turns)
                if not group.told:
                    self._begin(self._work(group))
                elif not group.turns:  # a kill after it was told; no row of the log will say so
                    self._note({"kind": "spent", "n": group.number})
            while self._draw() or self._under_way or len(self.groups.open) >= self._config.groups:
                await self._look()
                await self._ended(self._config.poll_s)
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    # ------------------------------------------------------------ pace

    def _draw(self) -> bool:
        """Begin as many groups as are allowed. True if more are to come."""
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
            spent = await self._spent.look()
        except Unavailable as error:
            logger.warning("the log cannot be read now: %s", error)
            return
        for number in spent:  # the cursor goes with the last of them, when all that was found up to it is noted
            upto = {"after": self._spent.cursor} if number == spent[-1] else {}
            self._note({"kind": "spent", "n": number} | upto)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._under_way[asyncio.ensure_future(work)] = None

    async def _ended(self, timeout_s: float) -> None:
        """Wait until some work ends, or for `timeout_s`; raise what that work raised."""
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
        if self._journal.grown:
            self._journal.rewrite(self.groups.events())

    # ------------------------------------------------------------ one group

    async def _work(self, group: RolloutGroup) -> None:
        """Run the members that have not ended, then tell the group's verdicts."""
        task = self._tasks.get(group.task)
        if task is None:
            logger.warning("group %s is given up: the taskset has no task %r any more", group.name, group.task)
            self._note({"kind": "spent", "n": group.number}, sync=True)
            return
        first = self._config.group_first
        for last in (first, len(group.slots)):
            async with asyncio.TaskGroup() as members:
                for member, slot in enumerate(group.slots[:last]):
                    if slot.last is None:
                        members.create_task(self._member(group, member, task))
            if group.settled(first):
                self._note({"kind": "settled", "n": group.number, "size": first}, sync=True)
        await self._continue(group)
        self._spent.expect(group.number, group.turns)
        for events in verdicts(group):
            await self._attempts.patiently(lambda events=events: self._shop.gateway.say(events))
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
            flat=group.flat,
            **shape(self._shapes.pop(group.number, [])),
        )
        if not group.turns:
            self._note({"kind": "spent", "n": group.number})

    async def _member(self, group: RolloutGroup, member: int, task: Task) -> None:
        """Run one rollout, and try it again if something other than the policy ended it."""
        async with self._places:
            while group.slots[member].last is None:
                episode = self.groups.episode(group.number, member)
                begun = {"kind": "begun", "n": group.number, "member": member, "episode": episode}
                self._note(begun, sync=True)  # its turns are in the log for good, and no other rollout may get its name
                recorded = self._beliefs and self._config.suspects > 0 and task.known is not None
                tried = await self._attempts.once(task, episode, group.name, record=recorded)
                last = tried.value is not None or len(group.slots[member].failed) + 1 >= self._config.tries
                beliefs = await self._attempts.belief_changes(tried) if self._beliefs else ()
                event = {"kind": "ended", "n": group.number, "member": member, "episode": episode, "last": last}
                event |= {"turns": tried.turns, "grade": tried.value, "why": tried.why}
                self._note(event | ({"beliefs": beliefs} if beliefs else {}), sync=True)
                if last:
                    if tried.given and beliefs and min(beliefs) < 0 and not tried.solved:
                        self._suspected.setdefault(group.number, []).append((tried, beliefs))
                    self._shapes.setdefault(group.number, []).append(tried.rollout)
                    self._keep(tried.record(self._taskset, self._clock, group=group.name, member=member))
                else:
                    await asyncio.sleep(self._config.retry_pause_s)

    async def _continue(self, group: RolloutGroup) -> None:
        """Sample failures anew from the turn at which the belief in the known answer fell most, those of the largest falls first. What a
        worker did not finish before it was killed is left out: the rollouts' files are gone.
        """
        suspected = sorted(self._suspected.pop(group.number, []), key=lambda each: min(each[1]))
        async with asyncio.TaskGroup() as work:
            for tried, beliefs in suspected[: self._config.suspects]:
                at = beliefs.index(min(beliefs))
                for number in range(self._config.suspect_tries):
                    work.create_task(self._continuation(group, tried, at, number))

    async def _continuation(self, group: RolloutGroup, tried: FinishedRollout, at: int, number: int) -> None:
        async with self._places:
            found = await self._attempts.continued(tried, group.name, at, number)
        if found is not None:
            event = {"kind": "continued", "n": group.number, "episode": found.episode}
            self._note(event | {"turns": found.turns, "grade": found.value}, sync=True)

    # ------------------------------------------------------------ held-out tasks

    async def _measure(self, number: int) -> None:
        """Run each task that is not trained on once, with the newest weights."""
        held_out = [task for task in self._tasks.values() if task.split is not Split.TRAIN]

        async def one(place: int, task: Task) -> tuple[Split, FinishedRollout]:
            async with self._places:
                tried = await self._attempts.measure(task, f"{self._journal.token}.m{number}.{place}")
            self._keep(tried.record(self._taskset, self._clock))
            return task.split, tried

        async with asyncio.TaskGroup() as work:  # one that fails ends the others
            each = [work.create_task(one(place, task)) for place, task in enumerate(held_out)]
        found = [ended.result() for ended in each]
        for split in sorted({task.split for task in held_out}):
            theirs = [tried for at, tried in found if at is split and tried.value is not None]
            solved = sum(tried.solved for tried in theirs)
            cheated = sum(tried.cheated for tried in theirs)
            self._tell("measured", split=split.value, n=number, solved=solved, of=len(theirs), cheated=cheated)
