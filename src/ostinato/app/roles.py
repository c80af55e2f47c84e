"""The roles of a run, each held by one process at a time across all machines. A process that takes a role over first claims its refs."""

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

_AGAIN_S = 0.2


def open_roles(config: Config) -> Roles:
    """Locks in the run's directory, or leases if its log is in Postgres. Raises BadConfig, Unavailable."""
    if not config.record.url:
        return FileRoles(home(config).root)
    from ostinato.record.postgres.leases import PostgresRoles

    return PostgresRoles(config.record)


async def wait_for(roles: Roles, role: str, on_wait: Callable[[str], None]) -> Tenure:
    """Take the role once no other process holds it; `on_wait` is told once who does. Raises BadConfig, Unavailable."""
    said = False
    while True:
        taking = asyncio.ensure_future(asyncio.to_thread(roles.take, role))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_let_go)
            raise
        except Conflict as error:
            if not said:
                on_wait(str(error))
            said = True
        await asyncio.sleep(_AGAIN_S)


def _let_go(taking: asyncio.Future[Tenure]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result().close()


async def claim_refs(run: Run, role: str) -> None:
    """Rewrite each ref that the role moves, unchanged, so that a conditional write on what an earlier holder read fails.

    A process that took a role over must call this before anything else.
    """
    refs = {"train": ("candidate", Arm.WORLD.value), "release": (*served_refs(run.config), BEST_REF)}
    for ref in refs.get(role, ()):
        held = await run.store.read_ref(ref)
        if held is not None:
            with suppress(Conflict, BadConfig):  # it was just moved, or the store is read-only
                await run.store.move_ref(ref, held, held)
