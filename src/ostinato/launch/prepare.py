"""What must stand before the workers start: the model on disk, version 0 in the weight store, the refs that name it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ostinato import app
from ostinato.config import Config
from ostinato.publish.publisher import Publisher
from ostinato.record.lock import hold


def run_name(config: Config) -> str:
    """The name under which this run publishes: its directory's."""
    return config.run.directory.resolve().name


async def prepare(config: Config, say: Callable[[str], None]) -> Path:
    """Make the run ready and return the model's directory. Does nothing the second time; safe in several processes at once."""
    directory = app.home(config).root
    with hold(directory, "prepare", wait_s=300.0):
        path = await asyncio.to_thread(app.model_path, config, say)
        store = app.open_store(config)
        with app.open_log(config) as log:
            if await store.read_ref("live") is None:
                await _publish_base(config, path, say)
            follower = app.Follower(store, config.follow)
            base = await follower.resolve("base") or await follower.resolve("live")  # a copied store has no base
            assert base is not None
            await app.open_releases(config, log).bootstrap(base)
    return path


async def _publish_base(config: Config, path: Path, say: Callable[[str], None]) -> None:
    from ostinato.model.load import load_model, weights_of
    from ostinato.model.settings import served_dtype

    say("publishing version 0: the model as it came")
    model = await asyncio.to_thread(load_model, path, served_dtype(config.model))
    publisher = Publisher(app.open_store(config), config.publish)
    await publisher.publish(0, weights_of(model), run=run_name(config), base=None, meta={"step": 0}, ref="base")
