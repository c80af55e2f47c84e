"""The serving worker: gateway and engine in one process, following the refs of the weight store."""

from __future__ import annotations

import asyncio
import logging
import os

from ostinato.app.serving import Serving, open_serving
from ostinato.app.storage import SERVED_REFS, Home, Run, home, open_run
from ostinato.config import Config
from ostinato.core.weights import Snapshot
from ostinato.launch.views.progress import Progress
from ostinato.launch.workers.listening import bind, listen
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.stopping import until_stopped
from ostinato.record.lock import hold
from ostinato.serve.auth import check_bind

logger = logging.getLogger(__name__)


async def serve(config: Config) -> None:
    """Serve until told to stop. Raises BadConfig for an open address without keys, Conflict if the run is served already."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    check_bind(config.listen.host, config.serve.api_keys)
    with hold(home(config).root, "serve"), open_run(config) as run:
        path = await prepare(run, logger.info)
        stopping = until_stopped()
        serving = await open_serving(run, path)
        await _run(run, serving, stopping)


async def _run(run: Run, serving: Serving, stopping: asyncio.Event) -> None:
    engine = serving.engine
    contract = engine.contract()
    if contract is not None:
        logger.info("numerics contract %s (%s)", contract.id, contract.mode)
    await engine.start()
    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow(serving, Progress(run.home.progress("serve"))))
        try:
            await _listen(run.config, run.home, serving, stopping)
        finally:
            following.cancel()
            await engine.close()


async def follow(serving: Serving, progress: Progress) -> None:
    """Load whatever the refs point to, now and whenever they move."""

    async def load(slot: str, snapshot: Snapshot) -> None:
        swap = await serving.engine.load(slot, snapshot)
        serving.gateway.state.metrics.swapped(swap)
        progress.swapped(swap)

    await serving.follower.watch(SERVED_REFS, load)


async def _listen(config: Config, place: Home, serving: Serving, stopping: asyncio.Event) -> None:
    address = place.address

    def say(url: str) -> None:
        partial = address.with_suffix(f".{os.getpid()}")
        partial.write_text(url)
        partial.replace(address)
        logger.info("serving on %s", url)

    await listen(serving.gateway, bind(config.listen.host, config.listen.port), stopping, say)
