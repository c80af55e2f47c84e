"""What must stand before the workers start: the model on disk, version 0 in the weight store, the refs that name it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ostinato.app.proving import open_releases
from ostinato.app.storage import Run, model_path
from ostinato.record.lock import hold
from ostinato.weights.publish.publisher import VersionPublisher


async def prepare(run: Run, say: Callable[[str], None]) -> Path:
    """Make the run ready and return the model's directory. Does nothing the second time; safe in several processes at once."""
    with hold(run.home.root, "prepare", wait_s=300.0):
        path = await asyncio.to_thread(model_path, run.config, say)
        if await run.store.read_ref("live") is None:
            await _publish_base(run, path, say)
        base = await run.follower.resolve("base") or await run.follower.resolve("live")  # a copied store has no base
        assert base is not None
        await open_releases(run).bootstrap(base)
    return path


async def _publish_base(run: Run, path: Path, say: Callable[[str], None]) -> None:
    from ostinato.model.config import stored_dtype
    from ostinato.model.load import load_model, weights_of

    say("publishing version 0: the model as it came")
    model = await asyncio.to_thread(load_model, path, stored_dtype(run.config.model))
    publisher = VersionPublisher(run.store, run.config.publish)
    await publisher.publish(0, weights_of(model), run=run.home.name, base=None, meta={"step": 0}, ref="base")
