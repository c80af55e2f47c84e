"""The core of the rollout worker: draws, runs, grades and reports groups concurrently, with backpressure, and resumes after a kill.

Data flow: `Groups` says whether a group may begin -> each member: harness + sandbox + model -> grader -> journal -> once all members of a
group have ended, their verdicts go to the gateway -> the log shows when the trainer has taken them -> the next group may begin.
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
    """Runs groups of rollouts until every task was drawn in every epoch, or until cancelled.

    Args:
        tasks: the taskset. Its `train` tasks are trained on, the others are only measured.
        shop: the harnesses, sandboxes, grader and gateway.
        journal, events: the worker's journal, and its events at the start.
        spent: finds in the log which groups the trainer has taken, and which were held back.
        tell: called with progress events for people: a kind, and fields.
        keep: called with the record of each rollout that ended for good or was only measured.
        flat_count: as in `Groups`.
        beliefs: whether to measure the belief in the tasks' known answers after each turn.
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
        self._concurrency = asyncio.Semaphore(config.concurrency)
        self._under_way: dict[asyncio.Task[None], None] = {}
        self._suspected: dict[int, list[tuple[FinishedRollout, tuple[float, ...]]]] = {}  # by open group
        self._ended_rollouts: dict[int, list[Rollout]] = {}  # by open group, since this worker started
        self.doing = "starting"

    async def run(self) -> None:
        """Run until all groups are drawn and spent, except a remainder too small for a step. Raises BadConfig (of a grader), StorageFull or
        Corrupt if a group did.
        """
        try:
            for group in list(self.groups.open.values()):
                # the worker may have been killed after reporting a group and before recording that: it may be in a batch already
                self._spent.expect(group.number, group.turns)
                if not group.told:
                    self._begin(self._work(group))
                elif not group.turns:  # the worker was killed after reporting it, and no row of the log will mention it
                    self._record({"kind": "spent", "n": group.number})
            while self._draw() or self._under_way or len(self.groups.open) >= self._config.groups:
                await self._record_spent()
                await self._wait_for_work(self._config.poll_s)
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    # ------------------------------------------------------------ backpressure

    def _draw(self) -> bool:
        """Begin as many groups as may begin. Returns False once no task is left to draw."""
        config = self._config
        while self.groups.may_begin(per_step=config.groups, lead=config.lead, window=config.window):
            event = self.groups.draw(config.group)
            if event is None:
                self.doing = "waiting for the trainer: every task was drawn as often as it may be (worlds.epochs)"
                return False
            self._record(event, sync=True)
            self._begin(self._work(self.groups.open[event["n"]]))
            if config.measure_every and event["n"] % config.measure_every == 0:
                self._begin(self._measure(event["n"]))
        told = sum(group.told for group in self.groups.open.values())
        self.doing = f"{len(self.groups.open) - told} groups under way, {told} wait for the trainer"
        return True

    async def _record_spent(self) -> None:
        try:
            spent = await self._spent.look()
        except Unavailable as error:
            logger.warning("the log cannot be read now: %s", error)
            return
        for number in spent:  # only the last event moves the cursor, when all groups found before it are recorded
            upto = {"after": self._spent.cursor} if number == spent[-1] else {}
            self._record({"kind": "spent", "n": number} | upto)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._under_way[asyncio.ensure_future(work)] = None

    async def _wait_for_work(self, timeout_s: float) -> None:
        """Wait until some work ends, for at most `timeout_s`. Raises what that work raised."""
        if not self._under_way:
            await asyncio.sleep(timeout_s)
            return
        done, _ = await asyncio.wait(self._under_way, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._under_way[task]
            task.result()

    def _record(self, event: dict[str, Any], *, sync: bool = False) -> None:
        self._journal.append(event, sync=sync)
        self.groups.apply(event)
        if self._journal.grown:
            self._journal.rewrite(self.groups.events())

    # ------------------------------------------------------------ one group

    async def _work(self, group: RolloutGroup) -> None:
        """Run the members that have not ended, then report the group's verdicts."""
        task = self._tasks.get(group.task)
        if task is None:
            logger.warning("group %s is given up: the taskset has no task %r any more", group.name, group.task)
            self._record({"kind": "spent", "n": group.number}, sync=True)
            return
        first = self._config.group_first
        for last in (first, len(group.slots)):
            async with asyncio.TaskGroup() as members:
                for member, slot in enumerate(group.slots[:last]):
                    if slot.last is None:
                        members.create_task(self._member(group, member, task))
            if group.settled(first):
                self._record({"kind": "settled", "n": group.number, "size": first}, sync=True)
        await self._continue(group)
        self._spent.expect(group.number, group.turns)
        for events in verdicts(group):
            await self._attempts.patiently(lambda events=events: self._shop.gateway.say(events))
        self._record({"kind": "told", "n": group.number}, sync=True)
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
            **shape(self._ended_rollouts.pop(group.number, [])),
        )
        if not group.turns:
            self._record({"kind": "spent", "n": group.number})

    async def _member(self, group: RolloutGroup, member: int, task: Task) -> None:
        """Run one rollout, and retry it if it ended for a reason outside the policy."""
        async with self._concurrency:
            while group.slots[member].last is None:
                episode = self.groups.episode(group.number, member)
                begun = {"kind": "begun", "n": group.number, "member": member, "episode": episode}
                # durable, because its turns stay in the log under this name, which no other rollout may get
                self._record(begun, sync=True)
                recorded = self._beliefs and self._config.suspects > 0 and task.known is not None
                tried = await self._attempts.once(task, episode, group.name, record=recorded)
                last = tried.value is not None or len(group.slots[member].failed) + 1 >= self._config.tries
                beliefs = await self._attempts.belief_changes(tried) if self._beliefs else ()
                event = {"kind": "ended", "n": group.number, "member": member, "episode": episode, "last": last}
                event |= {"turns": tried.turns, "grade": tried.value, "why": tried.why}
                self._record(event | ({"beliefs": beliefs} if beliefs else {}), sync=True)
                if last:
                    if tried.given and beliefs and min(beliefs) < 0 and not tried.solved:
                        self._suspected.setdefault(group.number, []).append((tried, beliefs))
                    self._ended_rollouts.setdefault(group.number, []).append(tried.rollout)
                    self._keep(tried.record(self._taskset, self._clock, group=group.name, member=member))
                else:
                    await asyncio.sleep(self._config.retry_pause_s)

    async def _continue(self, group: RolloutGroup) -> None:
        """Resample failed rollouts from the turn at which the belief in the known answer fell most, the largest falls first. Continuations
        that a kill interrupted are left out, because the recorded rollouts are lost.
        """
        suspected = sorted(self._suspected.pop(group.number, []), key=lambda each: min(each[1]))
        async with asyncio.TaskGroup() as work:
            for tried, beliefs in suspected[: self._config.suspects]:
                at = beliefs.index(min(beliefs))
                for number in range(self._config.suspect_tries):
                    work.create_task(self._continuation(group, tried, at, number))

    async def _continuation(self, group: RolloutGroup, tried: FinishedRollout, at: int, number: int) -> None:
        async with self._concurrency:
            found = await self._attempts.continued(tried, group.name, at, number)
        if found is not None:
            event = {"kind": "continued", "n": group.number, "episode": found.episode}
            self._record(event | {"turns": found.turns, "grade": found.value}, sync=True)

    # ------------------------------------------------------------ held-out tasks

    async def _measure(self, number: int) -> None:
        """Run each task that is not trained on once, with the newest weights."""
        held_out = [task for task in self._tasks.values() if task.split is not Split.TRAIN]

        async def one(place: int, task: Task) -> tuple[Split, FinishedRollout]:
            async with self._concurrency:
                tried = await self._attempts.measure(task, f"{self._journal.token}.m{number}.{place}")
            self._keep(tried.record(self._taskset, self._clock))
            return task.split, tried

        async with asyncio.TaskGroup() as work:  # a failure cancels the others
            each = [work.create_task(one(place, task)) for place, task in enumerate(held_out)]
        found = [ended.result() for ended in each]
        for split in sorted({task.split for task in held_out}):
            theirs = [tried for at, tried in found if at is split and tried.value is not None]
            solved = sum(tried.solved for tried in theirs)
            cheated = sum(tried.cheated for tried in theirs)
            self._tell("measured", split=split.value, n=number, solved=solved, of=len(theirs), cheated=cheated)
