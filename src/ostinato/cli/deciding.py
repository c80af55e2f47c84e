"""A person's decisions about releases: ship, approve, refuse, roll back."""

from __future__ import annotations

import asyncio

from rich.console import Console

from ostinato.cli.options import Common


def ship(
    version: str = "candidate", *, reason: str = "by hand", actor: str | None = None, common: Common | None = None
) -> None:
    """Put a version before users without asking the gate; `ostinato rollback` takes it back.

    Parameters
    ----------
    version
        A ref, a number such as v12, or the first digits of a root.
    reason
        Kept in the ledger.
    actor
        Who decides, kept in the ledger as well; none: the login name.
    """
    from ostinato.launch.commands.release import ship as run

    asyncio.run(run((common or Common()).of_run(), version, reason, actor, Console()))


def approve(
    version: str | None = None, *, reason: str = "by hand", actor: str | None = None, common: Common | None = None
) -> None:
    """Put before users what has passed and waits for that (`release.approval = "manual"`); `ostinato status` names it.

    Parameters
    ----------
    version
        It must be this one: a ref, a number such as v12, or the first digits of a root. None: whichever waits.
    reason
        Kept in the ledger.
    actor
        Who decides, kept in the ledger as well; none: the login name.
    """
    from ostinato.launch.commands.release import approve as run

    asyncio.run(run((common or Common()).of_run(), version, reason, actor, Console()))


def refuse(
    version: str | None = None, *, reason: str = "by hand", actor: str | None = None, common: Common | None = None
) -> None:
    """Block what waits for approval: it never ships by itself.

    Parameters
    ----------
    version
        It must be this one; none: whichever waits.
    reason
        Kept in the ledger.
    actor
        Who decides, kept in the ledger as well; none: the login name.
    """
    from ostinato.launch.commands.release import refuse as run

    asyncio.run(run((common or Common()).of_run(), version, reason, actor, Console()))


def rollback(
    version: str | None = None, *, reason: str = "by hand", actor: str | None = None, common: Common | None = None
) -> None:
    """Put an earlier release before users again; engines follow within seconds.

    Parameters
    ----------
    version
        The release to go back to: its number, such as v12, or the first digits of its root; none: the one before the live one.
    reason
        Kept in the ledger.
    actor
        Who decides, kept in the ledger as well; none: the login name.
    """
    from ostinato.launch.commands.release import roll_back

    asyncio.run(roll_back((common or Common()).of_run(), version, reason, actor, Console()))
