"""The rollout worker's objects: tasks, harnesses, sandboxes, graders, the gateway, and the worker's own memory."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path

from ostinato.app.storage import Run, home
from ostinato.app.worlds_grading import open_graders
from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm
from ostinato.worlds.harness.opening import HARNESSES, open_harness
from ostinato.worlds.harness.rollout import Harness
from ostinato.worlds.rollout.gateway import WorldGateway
from ostinato.worlds.rollout.journal import EventFile
from ostinato.worlds.rollout.spending import Spending
from ostinato.worlds.rollout.working import Rollouts, Workshop
from ostinato.worlds.sandbox import Boxes, SingleRuns, python_inside
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load


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
    """Raise BadConfig for a task that nobody can work on."""
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
async def open_workshop(
    config: Config, url: str, *, longest_s: float, slot: str = Arm.WORLD.value, gives_way: bool = True
) -> AsyncGenerator[tuple[Workshop, WorldGateway]]:
    """Who works on tasks, and the gateway at `url` in whose slot they ask, inside the block. Raises BadConfig.

    Args:
        config: of the run.
        url: where the gateway listens.
        longest_s: seconds of the longest answer.
        slot: whose weights answer.
        gives_way: single answers are graded only while nothing else wants the processor.
    """
    async with contextlib.AsyncExitStack() as leaving:
        key, temperature = home(config).admin_key(), config.worlds.temperature
        gateway = WorldGateway(url, key, temperature=temperature, timeout_s=longest_s, slot=slot)
        await leaving.enter_async_context(gateway)
        boxes, runs = Boxes(config.sandbox), SingleRuns(config.sandbox, gives_way=gives_way)
        leaving.callback(runs.close)
        leaving.push_async_callback(boxes.close)
        shop = Workshop(
            harnesses=open_harnesses(config),
            backend=boxes,
            grader=open_graders(boxes, runs, python_inside()),
            gateway=gateway,
        )
        yield shop, gateway


@contextlib.asynccontextmanager
async def open_rollouts(run: Run, url: str, tasks: Taskset, tell: Callable[..., None]) -> AsyncGenerator[Rollouts]:
    """Rollouts of a taskset through the gateway at `url`, going on where an earlier worker was. Raises BadConfig, Corrupt, StorageFull."""
    config = run.config
    journal, events = EventFile.open(run.home.rollouts)
    with contextlib.closing(journal):
        longest_s = max(task.timeout_s for task in tasks.tasks)
        async with open_workshop(config, url, longest_s=longest_s) as (shop, _):
            spending = Spending(run.log, after=max((event.get("after", 0) for event in events), default=0))
            yield Rollouts(tasks, shop, journal, events, spending, config.worlds, tell)
