"""The rollout worker's objects: tasks, harnesses, sandboxes, graders, the gateway, and the worker's own memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from ostinato.app.storage import Run
from ostinato.app.worlds_grading import open_graders
from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.worlds.harness.opening import HARNESSES, open_harness
from ostinato.worlds.harness.rollout import Harness
from ostinato.worlds.rollout.gateway import WorldGateway
from ostinato.worlds.rollout.groups import most_steps_behind
from ostinato.worlds.rollout.journal import EventFile
from ostinato.worlds.rollout.spending import Spending
from ostinato.worlds.rollout.working import Rollouts, Workshop
from ostinato.worlds.sandbox import Boxes, SingleRuns, python_inside
from ostinato.worlds.tasks.task import Split, Taskset
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
    known = open_harnesses(config)
    for task in tasks.tasks:
        if task.harness not in known:
            raise BadConfig(f"task {task.id!r}: no harness {task.harness!r}; there are {', '.join(sorted(known))}")
    return tasks


def open_harnesses(config: Config) -> dict[str, Harness]:
    """The harnesses by name. Raises BadConfig for settings that they do not have."""
    for name in config.worlds.harness:
        if name not in HARNESSES:
            raise BadConfig(f"worlds.harness.{name}: no such harness; there are {', '.join(HARNESSES)}")
    return {name: open_harness(name, config.worlds.harness.get(name)) for name in HARNESSES}


@contextlib.asynccontextmanager
async def open_rollouts(run: Run, url: str, tasks: Taskset, tell: Callable[..., None]) -> AsyncGenerator[Rollouts]:
    """Rollouts of a taskset through the gateway at `url`, going on where an earlier worker was. Raises BadConfig, Corrupt, StorageFull."""
    config = run.config
    warn_of_staleness(config)
    journal, events = EventFile.open(run.home.rollouts)
    async with contextlib.AsyncExitStack() as leaving:
        leaving.callback(journal.close)
        longest = max(task.timeout_s for task in tasks.tasks)
        async with WorldGateway(
            url, run.home.admin_key(), temperature=config.worlds.temperature, timeout_s=longest
        ) as gateway:
            spending = Spending(run.log, after=max((event.get("after", 0) for event in events), default=0))
            boxes, runs = Boxes(config.sandbox), SingleRuns(config.sandbox, gives_way=True)
            leaving.callback(runs.close)
            leaving.push_async_callback(boxes.close)
            shop = Workshop(
                harnesses=open_harnesses(config),
                backend=boxes,
                grader=open_graders(boxes, runs, python_inside()),
                gateway=gateway,
            )
            yield Rollouts(tasks, shop, journal, events, spending, config.worlds, tell)


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
