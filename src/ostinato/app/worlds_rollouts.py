"""The rollout worker's objects: tasks, harnesses, sandboxes, graders, the gateway, and the worker's own memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.app.storage import Run, home
from ostinato.app.worlds_grading import open_graders
from ostinato.config import Config
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.worlds.harness.opening import HARNESSES, is_agent, open_harness
from ostinato.worlds.harness.rollout import Harness
from ostinato.worlds.remote.door import Door
from ostinato.worlds.remote.link import FarOutcomes
from ostinato.worlds.remote.owners import OwnTurns
from ostinato.worlds.remote.trust import door_context, worker_context
from ostinato.worlds.rollout.gateway import WorldGateway
from ostinato.worlds.rollout.journal import EventFile
from ostinato.worlds.rollout.spending import Spending
from ostinato.worlds.rollout.working import Rollouts, Workshop
from ostinato.worlds.sandbox import Boxes, SingleRuns, python_inside
from ostinato.worlds.tasks.task import Split, Taskset
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
    known = open_harnesses(config)
    for task in tasks.tasks:
        if task.harness not in known:
            raise BadConfig(f"task {task.id!r}: no harness {task.harness!r}; there are {', '.join(sorted(known))}")
    return tasks


def open_harnesses(config: Config) -> dict[str, Harness]:
    """The harnesses by name. Raises BadConfig for settings that they do not have."""
    for name in config.worlds.harness:
        if name not in HARNESSES and not is_agent(name):
            raise BadConfig(f"worlds.harness.{name}: no such harness; there are {', '.join(HARNESSES)} and agent")
    names = dict.fromkeys([*HARNESSES, *config.worlds.harness])
    return {name: open_harness(name, config.worlds.harness.get(name)) for name in names}


@contextlib.asynccontextmanager
async def open_rollouts(run: Run, url: str, tasks: Taskset, tell: Callable[..., None]) -> AsyncGenerator[Rollouts]:
    """Rollouts of a taskset through the gateway at `url`, going on where an earlier worker was. Raises BadConfig, Corrupt, StorageFull."""
    journal, events = EventFile.open(run.home.rollouts)
    async with contextlib.AsyncExitStack() as leaving:
        leaving.callback(journal.close)
        gateway = await leaving.enter_async_context(_open_gateway(run, url, tasks))
        spending = Spending(run.log, after=_read_upto(events) or 0)
        shop = _open_shop(run.config, gateway, leaving)
        yield Rollouts(tasks, shop, journal, events, spending, run.config.worlds, tell)


@contextlib.asynccontextmanager
async def open_far_rollouts(
    config: Config, tasks: Taskset, tell: Callable[..., None], waiting: Callable[[str], None]
) -> AsyncGenerator[Rollouts]:
    """Rollouts of a taskset for a run on another machine, through its door, going on where an earlier worker was.

    `waiting` is told why the door does not answer, as long as it does not. Raises BadConfig, Corrupt, StorageFull.
    """
    aim = config.worlds.connect
    context = worker_context(aim.certificate, aim.key, aim.authority)
    journal, events = EventFile.open(home(config).rollouts)
    async with contextlib.AsyncExitStack() as leaving:
        leaving.callback(journal.close)
        gateway = await leaving.enter_async_context(
            WorldGateway(
                aim.url,
                "",
                temperature=config.worlds.temperature,
                timeout_s=max(task.timeout_s for task in tasks.tasks),
                context=context,
            )
        )
        outcomes = FarOutcomes(gateway)
        after = _read_upto(events)
        if after is None:
            after = await _patient_end(outcomes, config.worlds.retry_pause_s, waiting)
            journal.append({"kind": "linked", "n": -1, "after": after}, sync=True)
        yield Rollouts(
            tasks,
            _open_shop(config, gateway, leaving),
            journal,
            events,
            Spending(outcomes, after=after),
            config.worlds,
            tell,
        )


@contextlib.asynccontextmanager
async def open_door(run: Run, url: str, listener: socket.socket) -> AsyncGenerator[None]:
    """The door for workers of other machines, in front of the gateway at `url`. Raises BadConfig."""
    config = run.config.worlds.door
    context = door_context(config.certificate, config.key, config.authority)
    async with WorldGateway(url, run.home.admin_key(), temperature=run.config.worlds.temperature) as gateway:
        door = Door(
            gateway,
            OwnTurns(run.log),
            listener,
            context,
            names=config.names,
            calls=config.calls,
            body_bytes=config.body_bytes,
        )
        async with door:
            yield


def _open_gateway(run: Run, url: str, tasks: Taskset) -> WorldGateway:
    longest = max(task.timeout_s for task in tasks.tasks)
    return WorldGateway(url, run.home.admin_key(), temperature=run.config.worlds.temperature, timeout_s=longest)


def _open_shop(config: Config, gateway: WorldGateway, leaving: contextlib.AsyncExitStack) -> Workshop:
    boxes, runs = Boxes(config.sandbox), SingleRuns(config.sandbox, gives_way=True)
    leaving.callback(runs.close)
    leaving.push_async_callback(boxes.close)
    return Workshop(
        harnesses=open_harnesses(config),
        backend=boxes,
        grader=open_graders(boxes, runs, python_inside()),
        gateway=gateway,
    )


def _read_upto(events: Sequence[Mapping[str, Any]]) -> int | None:
    return max((int(event["after"]) for event in events if "after" in event), default=None)


async def _patient_end(outcomes: FarOutcomes, pause_s: float, waiting: Callable[[str], None]) -> int:
    while True:
        try:
            return await outcomes.end()
        except Unavailable as error:
            waiting(str(error))
        await asyncio.sleep(pause_s)
