"""Preparation of a run: downloads the model, publishes it as version 0 and sets the refs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from ostinato.app.branches import begin_branch
from ostinato.app.evaluation import open_releases
from ostinato.app.roles import open_roles, wait_for
from ostinato.app.storage import Run, model_path
from ostinato.core.errors import BadConfig
from ostinato.core.records import ReleaseEvent
from ostinato.weights.publish.publisher import VersionPublisher

_POLL_S = 0.2


async def prepare(run: Run, say: Callable[[str], None]) -> Path:
    """Prepare the run and return the model's directory. Idempotent. One process does it at a time; the others wait without a limit."""
    waiting = "waiting for another worker to make the run ready"
    with contextlib.closing(await wait_for(open_roles(run.config), "prepare", lambda _: say(waiting))):
        path = await asyncio.to_thread(model_path, run.config, say)
        if await run.store.read_ref("live") is None:
            await _check_unreleased(run)
            await (begin_branch(run, say) if run.config.run.tenant else _publish_base(run, path, say))
        # a copied store has no ref `base`
        base = await run.follower.resolve("base") or await run.follower.resolve("live")
        assert base is not None
        await open_releases(run).bootstrap(base)
    return path


async def await_prepared(run: Run) -> None:
    """Wait until another worker has prepared the run. For workers that load no model."""
    while await run.store.read_ref("live") is None:
        await asyncio.sleep(_POLL_S)


async def _check_unreleased(run: Run) -> None:
    """Raise BadConfig if the log has releases: without their weights the run would go back to the starting model."""
    async for _ in run.log.read(0, {ReleaseEvent}):
        where = run.config.weights.url or run.home.weights
        raise BadConfig(
            f"the run's log has releases, and the weight store {where} has no version that is live; name the run's store in weights.url, "
            "or move its weights there"
        )


async def _publish_base(run: Run, path: Path, say: Callable[[str], None]) -> None:
    from ostinato.model.config import backend, stored_dtype
    from ostinato.model.load import load_model, weights_of

    say("publishing version 0: the model as it came")
    # keep the configured kernels, so that no others are compiled for a trial
    on_host = backend(run.config.model.model_copy(update={"device": "cpu"}))
    model = await asyncio.to_thread(load_model, path, stored_dtype(run.config.model), backend=on_host)
    publisher = VersionPublisher(run.store, run.config.publish)
    await publisher.publish(0, weights_of(model), run=run.home.name, base=None, meta={"step": 0}, ref="base")
