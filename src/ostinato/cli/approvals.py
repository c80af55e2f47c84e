"""`ostinato ship`, `approve`, `refuse` and `rollback`: manual decisions about releases. `ostinato alarms`: the active alarms."""

from __future__ import annotations

import asyncio
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from ostinato.cli.options import DEFAULTS, Common


def ship(
    version: str = "candidate",
    *,
    tenant: Annotated[str | None, Parameter(name="--for")] = None,
    reason: str = "by hand",
    actor: str | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Release a version to users without asking the gate; `ostinato rollback` takes it back.

    With `--for acme` it answers acme's calls alone (`serve.branches`), and live stays what it is. Shipping an earlier version there
    takes it back.

    Parameters
    ----------
    version
        A ref, a version number such as v12, or the first digits of a root hash.
    tenant
        The tenant whose branch it becomes. Default: everybody's live version.
    reason
        Why; recorded in the ledger.
    actor
        Name recorded in the ledger. Default: the login name.
    """
    from ostinato.launch.commands.release import ship as run
    from ostinato.launch.commands.release import ship_branch

    config = common.of_run()
    if tenant is not None:
        asyncio.run(ship_branch(config, version, tenant, actor, Console()))
    else:
        asyncio.run(run(config, version, reason, actor, Console()))


def approve(
    version: str | None = None, *, reason: str = "by hand", actor: str | None = None, common: Common = DEFAULTS
) -> None:
    """Release the version that has passed and waits for approval (`release.approval = "manual"`); `ostinato status` names it.

    Parameters
    ----------
    version
        The version that must be waiting: a ref, a number such as v12, or the first digits of a root hash. Default: the one that waits.
    reason
        Why; recorded in the ledger.
    actor
        Name recorded in the ledger. Default: the login name.
    """
    from ostinato.launch.commands.release import approve as run

    asyncio.run(run(common.of_run(), version, reason, actor, Console()))


def refuse(
    version: str | None = None, *, reason: str = "by hand", actor: str | None = None, common: Common = DEFAULTS
) -> None:
    """Block the version that waits for approval, so that it never ships by itself.

    Parameters
    ----------
    version
        The version that must be waiting, named as for `approve`. Default: the one that waits.
    reason
        Why; recorded in the ledger.
    actor
        Name recorded in the ledger. Default: the login name.
    """
    from ostinato.launch.commands.release import refuse as run

    asyncio.run(run(common.of_run(), version, reason, actor, Console()))


def rollback(
    version: str | None = None, *, reason: str = "by hand", actor: str | None = None, common: Common = DEFAULTS
) -> None:
    """Make an earlier release live again; engines follow within seconds.

    Parameters
    ----------
    version
        The release to go back to: a number such as v12, or the first digits of its root hash. Default: the release before the live one,
        unless another rollback was less than a minute ago.
    reason
        Why; recorded in the ledger.
    actor
        Name recorded in the ledger. Default: the login name.
    """
    from ostinato.launch.commands.release import roll_back

    asyncio.run(roll_back(common.of_run(), version, reason, actor, Console()))


# ---------------------------------------------------------------- alarms


alarms = App(
    name="alarms", help="The active alarms, with the turns that raised them; `ostinato alarms accept` ends one."
)


@alarms.default
def show(*, common: Common = DEFAULTS) -> None:
    """Show the active alarms: what was found, since when, and the newest turns that show it."""
    from ostinato.launch.commands.release import show_alarms

    asyncio.run(show_alarms(common.of_run(), Console()))


@alarms.command
def accept(name: str, *, reason: str = "by hand", actor: str | None = None, common: Common = DEFAULTS) -> None:
    """Accept a change that a monitor found: its alarm ends, and is not raised again for a shift of the same size.

    Parameters
    ----------
    name
        The alarm's name as `ostinato alarms` shows it, such as monitor:edit.
    reason
        Why the change is accepted; recorded in the log.
    actor
        Name recorded in the log. Default: the login name.
    """
    from ostinato.launch.commands.release import accept_alarm

    asyncio.run(accept_alarm(common.of_run(), name, reason, actor, Console()))
