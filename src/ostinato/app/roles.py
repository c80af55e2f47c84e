"""The roles that one process of a run has at a time, on however many machines: who takes one over makes its refs its own first."""

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
    """Locks in the run's directory, or leases where its log lies in Postgres. Raises BadConfig, Unavailable."""
    if not config.record.url:
        return FileRoles(home(config).root)
    from ostinato.record.postgres.leases import PostgresRoles

    return PostgresRoles(config.record)


async def wait_for(roles: Roles, role: str, on_wait: Callable[[str], None]) -> Tenure:
    """The role, once no other process has it; `on_wait` is told who has. Raises BadConfig, Unavailable."""
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
    """Write each ref that the role moves again, as it is: what an earlier holder read before is no longer the condition of a write.

    To be done by who took a role over, before anything else.
    """
    refs = {"train": ("candidate", Arm.WORLD.value), "release": (*served_refs(run.config), BEST_REF)}
    for ref in refs.get(role, ()):
        held = await run.store.read_ref(ref)
        if held is not None:
            with suppress(Conflict, BadConfig):  # it was just moved; or it lies in a store that is for reading only
                await run.store.move_ref(ref, held, held)
