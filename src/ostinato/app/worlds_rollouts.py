"""The rollout worker's objects: tasks, harnesses, sandboxes, graders, the gateway, and the worker's own memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path

from ostinato.app.storage import Home, Run
from ostinato.app.worlds_grading import open_grading
from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm
from ostinato.worlds.harness.opening import HARNESSES, open_harness
from ostinato.worlds.harness.rollout import Harness
from ostinato.worlds.rollout.finished import Finished
from ostinato.worlds.rollout.gateway import WorldGateway
from ostinato.worlds.rollout.groups import most_steps_behind
from ostinato.worlds.rollout.journal import EventFile
from ostinato.worlds.rollout.spending import Spending
from ostinato.worlds.rollout.trying import Workshop
from ostinato.worlds.rollout.working import Rollouts
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load

logger = logging.getLogger(__name__)


def open_taskset(config: Config) -> Taskset:
    """The tasks that rollouts are made of. Raises BadConfig: none is named, it cannot be read, or nothing in it teaches."""
    if config.learn.source == "people":
        raise BadConfig('learn.source is "people": rollouts would teach nothing; set it to "worlds" or "both"')
    if not config.worlds.file:
        raise BadConfig("worlds.file is empty; name a taskset (JSONL)")
    tasks = load(Path(config.worlds.file).expanduser())
    if not any(task.split is Split.TRAIN for task in tasks.tasks):
        raise BadConfig(
            f"worlds.file {config.worlds.file}: no task has the split 'train', so there is nothing to learn"
        )
    check_harnesses(config, tasks.tasks)
    return tasks


def check_harnesses(config: Config, tasks: Iterable[Task]) -> None:
    """Raise BadConfig for a task whose harness there is not."""
    known = open_harnesses(config)
    for task in tasks:
        if task.harness not in known:
            raise BadConfig(f"task {task.id!r}: no harness {task.harness!r}; there are {', '.join(sorted(known))}")


def open_harnesses(config: Config) -> dict[str, Harness]:
    """The harnesses by name. Raises BadConfig for settings that they do not have."""
    for name in config.worlds.harness:
        if name not in HARNESSES:
            raise BadConfig(f"worlds.harness.{name}: no such harness; there are {', '.join(HARNESSES)}")
    return {name: open_harness(name, config.worlds.harness.get(name)) for name in HARNESSES}


@contextlib.asynccontextmanager
async def open_rollouts(
    run: Run, url: str, tasks: Taskset, tell: Callable[..., None], keep: Callable[[Finished], None]
) -> AsyncGenerator[Rollouts]:
    """Rollouts of a taskset through the gateway at `url`, going on where an earlier worker was. Raises BadConfig, Corrupt, StorageFull.

    `tell` and `keep` are as `Rollouts` has them.
    """
    warn_of_staleness(run.config)
    journal, events = EventFile.open(run.home.rollouts)
    with contextlib.closing(journal):
        async with open_workshop(run.config, run.home, url, tasks) as shop:
            spending = Spending(run.log, after=max((event.get("after", 0) for event in events), default=0))
            flat_count = run.config.reward.flat_groups == "train"
            yield Rollouts(tasks, shop, journal, events, spending, run.config.worlds, tell, keep, flat_count=flat_count)


@contextlib.asynccontextmanager
async def open_workshop(
    config: Config, place: Home, url: str, tasks: Taskset, slot: str = Arm.WORLD.value, *, proving: bool = False
) -> AsyncGenerator[Workshop]:
    """Who works on a taskset's tasks, with the weights in a slot of the gateway at `url`. Raises BadConfig.

    `proving`: as `open_grading` has it.
    """
    longest = max(task.timeout_s for task in tasks.tasks)
    async with contextlib.AsyncExitStack() as leaving:
        gateway = await leaving.enter_async_context(
            WorldGateway(url, place.admin_key(), temperature=config.worlds.temperature, timeout_s=longest, slot=slot)
        )
        boxes, grader = await leaving.enter_async_context(open_grading(config, proving=proving))
        yield Workshop(harnesses=open_harnesses(config), backend=boxes, grader=grader, gateway=gateway)


def warn_of_staleness(config: Config) -> None:
    """Say so where groups that take long may be held back as too stale: what is then learned from is the quick ones."""
    pace, bound = config.worlds, config.reward.world_staleness
    behind = most_steps_behind(per_step=pace.groups, lead=pace.lead, window=pace.window)
    if behind > bound:
        logger.warning(
            "a group may fall %d steps behind (worlds.lead %d, worlds.window %d), and reward.world_staleness is %d: groups that take long "
            "may be held back; lower the first two or raise the last",
            *(behind, pace.lead, pace.window, bound),
        )
