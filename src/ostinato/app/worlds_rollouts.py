"""The rollout worker's objects: tasks, harnesses, sandboxes, graders, the gateway, and the worker's own journal."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.app.storage import Home, Run, home, operator_key
from ostinato.app.worlds_grading import check_grading, open_grading
from ostinato.config import Config
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.records import Arm
from ostinato.core.retry import RetryPolicy, retry
from ostinato.worlds.harness.harnesses import HARNESSES, is_agent, no_harness, open_harness
from ostinato.worlds.harness.rollout import Harness
from ostinato.worlds.remote.owners import OwnTurns
from ostinato.worlds.remote.rollout_server import Door, FarOutcomes
from ostinato.worlds.remote.trust import RefusedSerials, door_context, worker_context
from ostinato.worlds.rollout.attempt import Workshop
from ostinato.worlds.rollout.finished import Finished
from ostinato.worlds.rollout.gateway import WorldGateway
from ostinato.worlds.rollout.groups import EventFile, Spending, most_steps_behind
from ostinato.worlds.rollout.rollout_worker import Rollouts
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load

logger = logging.getLogger(__name__)


def open_taskset(config: Config) -> Taskset:
    """The taskset for rollouts. Raises BadConfig if none is named, it cannot be read, or nothing could be learned from it."""
    if config.learn.source == "people":
        raise BadConfig('learn.source is "people": rollouts would teach nothing; set it to "worlds" or "both"')
    if not config.worlds.file:
        raise BadConfig("worlds.file is empty; name a taskset (JSONL)")
    tasks = load(Path(config.worlds.file).expanduser())
    if not any(task.split is Split.TRAIN for task in tasks.tasks):
        raise BadConfig(
            f"worlds.file {config.worlds.file}: no task has the split 'train', so there is nothing to learn"
        )
    check_tasks(config, tasks.tasks)
    return tasks


def check_tasks(config: Config, tasks: Iterable[Task]) -> None:
    """Raise BadConfig for a task whose harness or grader does not exist, or whose grader cannot work with its data."""
    known = open_harnesses(config)
    for task in tasks:
        if task.harness not in known:
            raise BadConfig(f"task {task.id!r}: {no_harness(task.harness)}")
        check_grading(task)


def runs_code(config: Config, tasks: Iterable[Task]) -> bool:
    """True if a harness or a grader of these tasks runs code that a model wrote, for which there must be a sandbox."""
    harnesses = open_harnesses(config)
    return any(harnesses[task.harness].spec(task) is not None or task.grading.grader != "pattern" for task in tasks)


def check_steps(config: Config, tasks: Taskset) -> None:
    """Raise BadConfig if too few groups are drawn for even one step."""
    worlds = config.worlds
    drawn = worlds.epochs * sum(task.split is Split.TRAIN for task in tasks.tasks)
    if worlds.epochs and drawn < worlds.groups and config.learn.source == "worlds":
        raise BadConfig(
            f"taskset {tasks.name!r} gives {drawn} groups (worlds.epochs is {worlds.epochs}), and a step takes {worlds.groups} "
            "(worlds.groups): not one step is possible; set worlds.epochs=0 to draw tasks for ever, lower worlds.groups, or add tasks"
        )


def open_harnesses(config: Config) -> dict[str, Harness]:
    """The harnesses by name. Raises BadConfig for settings that they do not have."""
    for name in config.worlds.harness:
        if name not in HARNESSES and not is_agent(name):
            raise BadConfig(f"worlds.harness.{name}: no such harness; there are {', '.join(HARNESSES)} and agent")
    names = dict.fromkeys([*HARNESSES, *config.worlds.harness])
    return {name: open_harness(name, config.worlds.harness.get(name)) for name in names}


@contextlib.asynccontextmanager
async def open_rollouts(
    run: Run, url: str, tasks: Taskset, tell: Callable[..., None], keep: Callable[[Finished], None]
) -> AsyncGenerator[Rollouts]:
    """Rollouts of a taskset through the gateway at `url`, resumed where an earlier worker was. Raises BadConfig, Corrupt, StorageFull.

    `tell` and `keep` are as `Rollouts` has them.
    """
    warn_of_staleness(run.config, tasks)
    journal, events = EventFile.open(run.home.rollouts)
    with contextlib.closing(journal):
        async with open_workshop(run.config, run.home, url, tasks) as shop:
            spending = Spending(run.log, after=_read_upto(events) or 0)
            flat_count = run.config.reward.flat_groups == "train"
            yield Rollouts(tasks, shop, journal, events, spending, run.config.worlds, tell, keep, flat_count=flat_count)


@contextlib.asynccontextmanager
async def open_far_rollouts(
    config: Config,
    tasks: Taskset,
    tell: Callable[..., None],
    keep: Callable[[Finished], None],
    waiting: Callable[[str], None],
) -> AsyncGenerator[Rollouts]:
    """Rollouts of a taskset for a run on another machine, through its door, resumed where an earlier worker was.

    `waiting` is told why the door does not answer, as long as it does not. Raises BadConfig, Corrupt, StorageFull.
    """
    aim, worlds = config.worlds.connect, config.worlds
    context = worker_context(aim.certificate, aim.key, aim.authority)
    longest = max(task.timeout_s for task in tasks.tasks)
    journal, events = EventFile.open(home(config).rollouts)
    with contextlib.closing(journal):
        gateway = WorldGateway(aim.url, "", temperature=worlds.temperature, timeout_s=longest, context=context)
        async with _shop_behind(config, gateway) as shop:
            outcomes = FarOutcomes(gateway)
            after = _read_upto(events)
            if after is None:
                after = await _patient_end(outcomes, worlds.retry_pause_s, waiting)
                events.append({"kind": "linked", "n": -1, "after": after})
                journal.append(events[-1], sync=True)
            spending = Spending(outcomes, after=after)
            flat_count = config.reward.flat_groups == "train"
            yield Rollouts(tasks, shop, journal, events, spending, worlds, tell, keep, flat_count=flat_count)


@contextlib.asynccontextmanager
async def open_workshop(
    config: Config, place: Home, url: str, tasks: Taskset, slot: str = Arm.WORLD.value, *, proving: bool = False
) -> AsyncGenerator[Workshop]:
    """A workshop for a taskset's tasks, with the weights in a slot of the gateway at `url`. Raises BadConfig.

    `proving`: as `open_grading` has it.
    """
    longest = max(task.timeout_s for task in tasks.tasks)
    gateway = WorldGateway(
        url, operator_key(config, place), temperature=config.worlds.temperature, timeout_s=longest, slot=slot
    )
    async with _shop_behind(config, gateway, proving=proving) as shop:
        yield shop


@contextlib.asynccontextmanager
async def _shop_behind(config: Config, gateway: WorldGateway, *, proving: bool = False) -> AsyncGenerator[Workshop]:
    async with contextlib.AsyncExitStack() as leaving:
        await leaving.enter_async_context(gateway)
        boxes, grader = await leaving.enter_async_context(open_grading(config, proving=proving))
        yield Workshop(harnesses=open_harnesses(config), backend=boxes, grader=grader, gateway=gateway)


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
            refused=RefusedSerials(config.refused),
            connections=config.connections,
            calls=config.calls,
            body_bytes=config.body_bytes,
        )
        async with door:
            yield


def _read_upto(events: Sequence[Mapping[str, Any]]) -> int | None:
    return max((int(event["after"]) for event in events if "after" in event), default=None)


async def _patient_end(outcomes: FarOutcomes, pause_s: float, waiting: Callable[[str], None]) -> int:
    policy = RetryPolicy(pause_s=pause_s, longest_s=pause_s)
    return await retry(outcomes.end, policy, on=Unavailable, failed=lambda error: waiting(str(error)))


def warn_of_staleness(config: Config, tasks: Taskset) -> None:
    """Warn if a step may hold fewer groups than configured because their answers are long, and if slow groups may be held back as too
    stale, so that only the quick ones are learned from.
    """
    pace, bound, most = config.worlds, config.reward.world_staleness, config.reward.batch_tokens
    longest = max(task.turns * task.tokens for task in tasks.tasks if task.split is Split.TRAIN)
    fit = min(pace.groups, max(1, most // (pace.group * longest)))
    if fit < pace.groups:
        logger.warning(
            "a group of %d rollouts may have %d tokens in answers alone, so that a step may hold %d of worlds.groups = %d, or hold a group "
            "back as too_long; raise reward.batch_tokens (%d), or lower worlds.group or the tasks' turns and tokens",
            *(pace.group, pace.group * longest, fit, pace.groups, most),
        )
    behind = most_steps_behind(per_step=fit, lead=-(-pace.lead * pace.groups // fit), window=pace.window)
    if behind > bound:
        logger.warning(
            "a group may fall %d steps behind (worlds.lead %d, worlds.window %d), and reward.world_staleness is %d: groups that take long "
            "may be held back; lower the first two or raise the last",
            *(behind, pace.lead, pace.window, bound),
        )
