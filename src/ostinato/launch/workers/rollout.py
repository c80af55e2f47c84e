"""The rollout worker: the newest weights at work in simulated worlds, for the trainer to learn from."""

from __future__ import annotations

import asyncio
import logging

from ostinato.app.storage import home, open_run
from ostinato.app.worlds_notices import note_cheats
from ostinato.app.worlds_rollouts import open_rollouts, open_taskset
from ostinato.config import Config
from ostinato.core.errors import StorageFull, Unavailable
from ostinato.core.seams import Log
from ostinato.launch.views.progress import Progress, kept_bytes
from ostinato.launch.workers.life import Life
from ostinato.launch.workers.prepare import prepared
from ostinato.launch.workers.release import gateway
from ostinato.launch.workers.stopping import unless
from ostinato.record.lock import hold
from ostinato.worlds.rollout.cheats import CheatWatch
from ostinato.worlds.rollout.finished import Finished
from ostinato.worlds.rollout.working import Rollouts

logger = logging.getLogger(__name__)


async def rollout(config: Config, life: Life) -> None:
    """Make rollouts until told to stop. Raises BadConfig for a taskset that cannot be used, Conflict if another worker makes them."""
    with hold(home(config).root, "rollout"), open_run(config) as run:
        life.starting(config)("reading the tasks")
        tasks = await asyncio.to_thread(open_taskset, config)
        life.pulse.begin("waiting for the gateway")
        await unless(life.stopping, prepared(run))
        url = await unless(life.stopping, gateway(run.home))
        progress = Progress(run.home.progress("rollout"), kept_bytes(config))
        progress.write("tasks", name=tasks.name, hash=tasks.hash, count=len(tasks.tasks))
        kept = Progress(run.home.finished, kept_bytes(config))
        watch = CheatWatch(config.worlds.cheat_quiet)

        def keep(finished: Finished) -> None:
            kept.append(finished.line())
            watch.take(finished)

        async with open_rollouts(run, url, tasks, progress.write, keep) as rollouts:
            telling = asyncio.create_task(_tell(rollouts, life, run.log, watch))
            try:
                await unless(life.stopping, _run(rollouts, life))
            finally:
                telling.cancel()


async def _run(rollouts: Rollouts, life: Life) -> None:
    await rollouts.run()
    logger.info("every task was drawn as often as it may be, and the trainer took all: worlds.epochs")
    rollouts.doing = "done: every task was drawn as often as it may be (worlds.epochs)"
    await life.stopping.wait()


async def _tell(rollouts: Rollouts, life: Life, log: Log, watch: CheatWatch) -> None:
    """Say what is done, and whether somebody cheats, whenever that changes. Until cancelled."""
    shown, raised = "", None
    while True:
        if watch.raised is not raised:
            try:
                await note_cheats(log, watch)
                raised = watch.raised
            except (StorageFull, Unavailable) as error:
                logger.warning("the alarm about cheats is not written yet: %s", error)
        if rollouts.doing != shown:
            shown = rollouts.doing
            life.pulse.begin(shown)
            life.pulse.ready = True
        await asyncio.sleep(0.5)
