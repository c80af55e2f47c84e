"""The roles of a run, each held by one process at a time on all machines. A process that takes over a role first claims its refs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from ostinato.app.storage import Run, home, served_refs
from ostinato.config import Config
from ostinato.core.errors import BadConfig, Conflict
from ostinato.core.records import Arm
from ostinato.record.roles import FileRoles, Roles, Tenure
from ostinato.release.controller import BEST_REF

_RETRY_S = 0.2


def open_roles(config: Config) -> Roles:
    """Return locks in the run's directory, or leases if its log is in Postgres. Raises BadConfig, Unavailable."""
    if not config.record.url:
        return FileRoles(home(config).root)
    from ostinato.record.postgres.leases import PostgresRoles

    return PostgresRoles(config.record)


async def wait_for(roles: Roles, role: str, on_wait: Callable[[str], None]) -> Tenure:
    """Wait until no other process holds the role, and take it; `on_wait` is told once who holds it. Raises BadConfig, Unavailable."""
    said = False
    while True:
        taking = asyncio.ensure_future(asyncio.to_thread(roles.take, role))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_close_tenure)
            raise
        except Conflict as error:
            if not said:
                on_wait(str(error))
            said = True
        await asyncio.sleep(_RETRY_S)


def _close_tenure(taking: asyncio.Future[Tenure]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result().close()


async def claim_refs(run: Run, role: str) -> None:
    """Rewrite each ref that the role moves, unchanged, so that a compare-and-swap against what an earlier holder read fails.

    A process that took over a role must call this before anything else.
    """
    refs = {"train": ("candidate", Arm.WORLD.value), "release": (*served_refs(run.config), BEST_REF)}
    for ref in refs.get(role, ()):
        held = await run.store.read_ref(ref)
        if held is not None:
            with suppress(Conflict, BadConfig):  # another process has just moved it, or the store is read-only
                await run.store.move_ref(ref, held, held)
