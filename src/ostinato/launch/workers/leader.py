"""How a worker gets a role that only one process of a run may have, keeps it while it works, and ends when another process takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any

from ostinato.app.roles import claim_refs, open_roles, wait_for
from ostinato.app.storage import Run, open_run
from ostinato.config import Config
from ostinato.launch.workers.shutdown import unless
from ostinato.launch.workers.worker_main import Life
from ostinato.record.retry import Patience
from ostinato.record.roles import Roles, Tenure

_LOOK_S = 0.2
_CLEANING_S = 5.0  # how long cancelled work may take to clean up


async def act(
    config: Config,
    life: Life,
    role: str,
    work: Callable[[Run], Coroutine[Any, Any, None]],
    *,
    patient: bool = True,
) -> None:
    """Do `work` on the run as the one process that has the role, until it is done. In a run on several hosts the others wait in reserve.

    `patient`: calls to a log whose server is unavailable wait, `record.away_s` at most, so that nothing is left half done. Otherwise they
    raise Unavailable, and `work` handles that and goes on.

    Raises Conflict if another process of this machine has the role; LeaseLost once a process of another host took it over; Stopped.
    """
    tenure = await _taken(open_roles(config), role, life)
    with closing(tenure), open_run(config, tenure, patience_of(config, life) if patient else None) as run:
        await _unless_lost(tenure, _claiming(run, role, tenure, work))


def patience_of(config: Config, life: Life) -> Patience:
    """The patience of a log, `record.away_s`; while it waits, the pulse says what it waits for instead of what the worker does."""
    return Patience(config.record.away_s, life.pulse.during)


async def _taken(roles: Roles, role: str, life: Life) -> Tenure:
    if not roles.pass_on:
        return roles.take(role)
    return await unless(life.stopping, wait_for(roles, role, lambda who: life.pulse.begin(f"in reserve: {who}")))


async def _claiming(run: Run, role: str, tenure: Tenure, work: Callable[[Run], Coroutine[Any, Any, None]]) -> None:
    if tenure.token is not None:
        await claim_refs(run, role)
    await work(run)


async def _unless_lost(tenure: Tenure, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; raises what it raises. Raises LeaseLost once the role is lost: `work` is then cancelled and has time to clean up."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done() and not tenure.lost:
            await asyncio.wait({task}, timeout=_LOOK_S)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CLEANING_S)
    if tenure.lost:
        tenure.check()
    await task
