"""The serving worker: gateway and engine in one process, following the refs of the weight store."""

from __future__ import annotations

import asyncio
import logging
import os

from pydantic import SecretStr
from starlette.applications import Starlette

from ostinato import app
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.records import Snapshot
from ostinato.launch.listening import bind, listen
from ostinato.launch.prepare import prepare
from ostinato.launch.progress import Progress
from ostinato.launch.stopping import until_stopped
from ostinato.publish.journal import Journal
from ostinato.record.lock import hold
from ostinato.serve.auth import check_bind
from ostinato.serve.engine import TorchEngine
from ostinato.serve.gateway import create_app

logger = logging.getLogger(__name__)


async def serve(config: Config) -> None:
    """Serve until told to stop. Raises BadConfig for an open address without keys, Conflict if the run is served already."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    check_bind(config.listen.host, config.serve.api_keys)
    place = app.home(config)
    with hold(place.root, "serve"):
        path = await prepare(config, logger.info)
        stopping = until_stopped()
        with app.open_log(config) as log:
            await _run(config, path, log, stopping)


async def _run(config: Config, path: app.Path, log: app.SqlLog, stopping: asyncio.Event) -> None:
    from ostinato.model.load import build
    from ostinato.model.renderer import HFRenderer

    place = app.home(config)
    renderer = HFRenderer(path)
    contract = app.engine_contract(config)
    await app.stamp(log, contract)
    logger.info("numerics contract %s (%s)", contract.id, contract.mode)
    engine = TorchEngine(build(path), renderer, config.engine, contract=contract)
    await engine.start()
    settings = config.serve.model_copy(update={"admin_key": SecretStr(place.admin_key())})
    gateway = create_app(
        engine=engine, renderer=renderer, log=log, config=settings, clock=wall_clock, model_name=config.model.served_as
    )
    follower = app.Follower(app.open_cached_store(config), config.follow, Journal(place.root / "follow.json"))
    async with asyncio.TaskGroup() as group:
        progress = Progress(place.root / "serve.jsonl")
        following = group.create_task(follow(engine, follower, gateway, progress))
        try:
            await _listen(config, gateway, stopping)
        finally:
            following.cancel()
            await engine.close()


async def follow(engine: TorchEngine, follower: app.Follower, gateway: Starlette, progress: Progress) -> None:
    """Load whatever the refs point to, now and whenever they move."""

    async def load(slot: str, snapshot: Snapshot) -> None:
        swap = await engine.load(slot, snapshot)
        gateway.state.metrics.swapped(swap)
        progress.swapped(swap)

    await follower.watch(app.SERVED_REFS, load)


async def _listen(config: Config, gateway: Starlette, stopping: asyncio.Event) -> None:
    address = app.home(config).address

    def say(url: str) -> None:
        partial = address.with_suffix(f".{os.getpid()}")
        partial.write_text(url)
        partial.replace(address)
        logger.info("serving on %s", url)

    await listen(gateway, bind(config.listen.host, config.listen.port), stopping, say)
