"""Measures candidates on simulated worlds: held-out tasks are a suite's items, tried and graded as rollouts are."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from ostinato.app.storage import home, operator_key
from ostinato.app.worlds import check_tasks, open_harnesses, open_workshop, runs_code
from ostinato.config import Config
from ostinato.core.conversation import Role
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.evaluate.suites import Item, ItemMessage, Suite
from ostinato.worlds.harness.rollout import Ended
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load

if TYPE_CHECKING:
    from ostinato.evaluate.rollouts import RolloutRunner, TryOnce, WholeTry


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSuite:
    """Tasks of a simulated world as a suite: its items have the tasks' ids, its hash stands for the taskset and its harnesses.

    `runs_code`: a harness or a grader runs code that a model wrote.

    Example: ``WorldSuite(suite=suite, tasks=taskset, runs_code=True)``
    """

    suite: Suite
    tasks: Taskset
    runs_code: bool


def world_suite(file: str, config: Config, split: Split = Split.HELD_OUT) -> WorldSuite:
    """The tasks of a split, the first `evaluate.items` of them if that is set.

    Raises BadConfig if the file cannot be read, holds no task of the split, or one that cannot be worked on or graded.
    """
    taskset = load(Path(file).expanduser())
    tasks = [task for task in taskset.tasks if task.split is split]
    if not tasks:
        raise BadConfig(f"taskset {file}: no task has the split {split.value!r}, so there is nothing to measure with")
    tasks = tasks[: config.evaluate.items or None]
    check_tasks(config, tasks)
    harnesses = open_harnesses(config)
    used = sorted({harnesses[task.harness].hash for task in tasks})
    told = "\0".join([taskset.hash, split.value, str(len(tasks)), str(config.worlds.temperature), *used])
    suite = Suite(f"world {taskset.name}", blake3(told.encode()).hexdigest(), tuple(map(_item, tasks)))
    return WorldSuite(
        suite=suite,
        tasks=replace(taskset, tasks=tuple(tasks)),
        runs_code=runs_code(config, tasks),
    )


def _item(task: Task) -> Item:
    """The item that stands for the task wherever items are counted, drawn and shown."""
    kept = (Role.SYSTEM, Role.USER, Role.ASSISTANT)
    said = tuple(ItemMessage(role=each.role.value, content=each.text) for each in task.messages if each.role in kept)
    return Item(
        id=task.id,
        family=task.family,
        messages=said or (ItemMessage(role="user", content=""),),
        grader=task.grading.grader,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutWorld:
    """Implements `TaskWorld`: a run's harnesses, sandboxes and graders, and the gateway at `url`.

    Example: ``HeldOutWorld(config=config, url="http://127.0.0.1:8321", tasks=found.tasks)``
    """

    config: Config
    url: str
    tasks: Taskset

    @contextlib.asynccontextmanager
    async def open(self, slot: str) -> AsyncGenerator[TryOnce]:
        from ostinato.evaluate.rollouts import WholeTry

        token, number = f"bar{secrets.token_hex(4)}", 0
        tasks = {task.id: task for task in self.tasks.tasks}
        place = home(self.config)
        async with open_workshop(self.config, place, self.url, self.tasks, slot, proving=True) as shop:

            async def try_once(item: Item, seed: int) -> WholeTry:
                nonlocal number
                number += 1
                task = tasks[item.id]
                harness = shop.harnesses[task.harness].hash
                model = shop.gateway.model(f"{token}.{number}", group=None, harness=harness, seed=seed)
                rollout = await shop.work(task, model)
                if rollout.ended is Ended.FAILED:
                    why = rollout.detail.get("why", "it did not begin")
                    raise BadRequest(f"task {task.id!r} cannot be tried: {why}; mend it or take it out of the taskset")
                grade = await shop.grade(task, rollout)
                return WholeTry(
                    score=0.0 if grade.cheated else grade.value,
                    formed=rollout.ended is Ended.SUBMITTED,
                    policies=tuple(sorted(model.policies)),
                )

            yield try_once


def open_rollout_runner(config: Config, url: str, world: WorldSuite) -> RolloutRunner:
    """The runner of a world's tasks against a gateway."""
    from ostinato.evaluate.rollouts import RolloutRunner

    world_of = HeldOutWorld(config=config, url=url, tasks=world.tasks)
    return RolloutRunner(world.suite, world_of, url, operator_key(config), config.evaluate.runner)
