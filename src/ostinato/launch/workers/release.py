"""The release worker: judges candidates, ships or blocks them, guards what is live."""

from __future__ import annotations

import asyncio
import logging

from ostinato.app.proving import open_evaluation, open_releases
from ostinato.app.storage import Home, home, open_run
from ostinato.config import Config
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.stopping import until_stopped
from ostinato.record.lock import hold

logger = logging.getLogger(__name__)


def gateway_url(place: Home) -> str | None:
    """Where the run's gateway listens, or None before it has said so."""
    return place.address.read_text().strip() if place.address.exists() else None


async def release(config: Config) -> None:
    """Judge candidates until told to stop. Raises Conflict if another release worker holds the run."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with hold(home(config).root, "release"), open_run(config) as run:
        await prepare(run, logger.info)
        stopping = until_stopped()
        while (url := gateway_url(run.home)) is None and not stopping.is_set():
            await asyncio.sleep(0.5)
        await open_releases(run, open_evaluation(config, url or "")).run(stopping)
