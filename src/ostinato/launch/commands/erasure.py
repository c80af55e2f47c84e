"""`ostinato forget` and the trainer: a checkpoint of every step taken, before the turns that a crash would repeat become unreadable."""

from __future__ import annotations

import asyncio
import contextlib

from ostinato.app.roles import open_roles
from ostinato.app.storage import Home, open_log
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import Conflict
from ostinato.core.files import write_atomic
from ostinato.core.records import Batch

CHECKPOINT_WAIT_S = 120.0
"""How long `ostinato forget` waits for the trainer's checkpoint by default: a trainer looks for the request between two steps."""
_LOOK_S = 0.1


async def await_checkpoint(config: Config, wait_s: float) -> str:
    """Ask the run's trainer for a checkpoint of every recorded step, and wait for it. Returns what to tell people; "" if all is well.

    Without one, a trainer that crashes cannot repeat the steps since its last checkpoint, and goes on from the newest published version.
    """
    from ostinato.train.checkpoint import newest_step

    place = Home(config.run.directory)
    with open_log(config) as log:
        rows = [row for _, row in log.tail(1, {Batch}) if isinstance(row, Batch)]
    last = rows[0].step if rows else 0
    if newest_step(place.checkpoints) >= last:
        return ""
    after = f"steps {newest_step(place.checkpoints) + 1} to {last} are in no checkpoint"
    then = "if they hold erased turns, the trainer goes on from the newest published version when it starts again"
    if not await _training(config):
        return f"no trainer is up, and {after}: {then}"
    write_atomic(place.checkpoint_wanted, f"{last} {wall_clock():.0f}\n", durable=False)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while place.checkpoint_wanted.exists() and newest_step(place.checkpoints) < last:
                await asyncio.sleep(_LOOK_S)
    place.checkpoint_wanted.unlink(missing_ok=True)
    if newest_step(place.checkpoints) >= last:
        return ""
    return f"the trainer wrote no checkpoint within {wait_s:g} s, and {after}: {then}"


async def _training(config: Config) -> bool:
    """True if a process has the trainer's role now."""
    try:
        tenure = await asyncio.to_thread(open_roles(config).take, "train")
    except Conflict:
        return True
    tenure.close()
    return False
