"""The rollout worker: runs the newest weights on the tasks of simulated worlds, so that the trainer can learn from them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ostinato.app.storage import home, open_run
from ostinato.app.worlds import note_cheats, open_door, open_far_rollouts, open_rollouts, open_taskset
from ostinato.config import Config
from ostinato.core.errors import OstinatoError
from ostinato.core.seams import Log
from ostinato.launch.placing.address import await_gateway, bind
from ostinato.launch.views.progress import Progress, kept_bytes
from ostinato.launch.workers.prepare import await_prepared
from ostinato.launch.workers.shutdown import unless
from ostinato.launch.workers.worker_main import WorkerContext, patience_of
from ostinato.record.roles import hold
from ostinato.worlds.rollout.finished import CheatWatch, Finished
from ostinato.worlds.rollout.rollout_worker import Rollouts
from ostinato.worlds.tasks.task import Taskset

logger = logging.getLogger(__name__)


async def rollout(config: Config, context: WorkerContext) -> None:
    """Make rollouts until told to stop: for this run, or with `worlds.connect.url` for a run on another machine.

    With `worlds.door` also accept the rollout workers of other machines. Raises BadConfig for an unusable taskset or certificate, Conflict
    if another worker already makes these rollouts.
    """
    with hold(home(config).root, "rollout"):
        if config.worlds.connect.url:
            await _work_remotely(config, context)
            return
        with open_run(config, patience=patience_of(config, context)) as run:
            door = config.worlds.door
            tasks = await _read_tasks(config, context) if config.worlds.file or not door.host else None
            context.pulse.begin("waiting for the gateway")
            await unless(context.stopping, await_prepared(run))
            url = await unless(context.stopping, await_gateway(run.home))
            async with contextlib.AsyncExitStack() as leaving:
                if door.host:
                    listener = bind(door.host, door.port, "set worlds.door.host and worlds.door.port")
                    await leaving.enter_async_context(open_door(run, url, listener))
                    logger.info("workers of other machines come in at port %d", listener.getsockname()[1])
                if tasks is None:
                    context.pulse.begin("letting in workers of other machines")
                    context.pulse.ready = True
                    await context.stopping.wait()
                    return
                progress = _progress(config, tasks)
                watch = CheatWatch(config.worlds.cheat_quiet)
                opening = open_rollouts(run, url, tasks, progress.write, _keep(config, watch))
                rollouts = await leaving.enter_async_context(opening)
                await _work(rollouts, context, run.log, watch)


async def _work_remotely(config: Config, context: WorkerContext) -> None:
    """Make rollouts on this machine for a run on another one, which receives only tokens and verdicts."""
    tasks = await _read_tasks(config, context)
    context.pulse.begin("waiting for the door")

    def waiting(why: str) -> None:
        logger.warning("the door at %s: %s", config.worlds.connect.url, why)
        context.pulse.begin(f"waiting for the door: {why}"[:200])

    async with contextlib.AsyncExitStack() as leaving:
        watch = CheatWatch(config.worlds.cheat_quiet)
        opening = open_far_rollouts(config, tasks, _progress(config, tasks).write, _keep(config, watch), waiting)
        rollouts = await unless(context.stopping, leaving.enter_async_context(opening))
        await _work(rollouts, context, None, watch)


async def _read_tasks(config: Config, context: WorkerContext) -> Taskset:
    context.starting(config)("reading the tasks")
    return await asyncio.to_thread(open_taskset, config)


def _progress(config: Config, tasks: Taskset) -> Progress:
    progress = Progress(home(config).progress("rollout"), kept_bytes(config))
    progress.write("tasks", name=tasks.name, hash=tasks.hash, count=len(tasks.tasks))
    return progress


def _keep(config: Config, watch: CheatWatch) -> Callable[[Finished], None]:
    kept = Progress(home(config).finished, kept_bytes(config))

    def keep(finished: Finished) -> None:
        kept.append(finished.line())
        watch.take(finished)

    return keep


async def _work(rollouts: Rollouts, context: WorkerContext, log: Log | None, watch: CheatWatch) -> None:
    reporting = asyncio.create_task(_report(rollouts, context, log, watch))
    try:
        await unless(context.stopping, _run(rollouts, context))
    finally:
        reporting.cancel()


async def _run(rollouts: Rollouts, context: WorkerContext) -> None:
    await rollouts.run()
    logger.info("every task was drawn as often as it may be, and the trainer took all: worlds.epochs")
    rollouts.doing = "done: every task was drawn as often as it may be (worlds.epochs)"
    await context.stopping.wait()


async def _report(rollouts: Rollouts, context: WorkerContext, log: Log | None, watch: CheatWatch) -> None:
    """Until cancelled, report the current activity and, if there is a log, the alarm about cheats, whenever they change."""
    shown, raised = "", None
    while True:
        if log is not None and watch.raised is not raised:
            try:
                await note_cheats(log, watch)
                raised = watch.raised
            except OstinatoError as error:
                logger.warning("the alarm about cheats is not written yet: %s", error)
        if rollouts.doing != shown:
            shown = rollouts.doing
            context.pulse.begin(shown)
            context.pulse.ready = True
        await asyncio.sleep(0.5)
