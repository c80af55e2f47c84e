"""`ostinato alarms`: the standing alarms, and how a person ends one."""

from __future__ import annotations

import asyncio

from cyclopts import App
from rich.console import Console

from ostinato.cli.options import Common

alarms = App(name="alarms", help="The alarms that stand, and by which turns; `ostinato alarms accept` ends one.")


@alarms.default
def show(*, common: Common | None = None) -> None:
    """Show the active alarms: what was found, since when, and the newest turns that show it."""
    from ostinato.launch.commands.alarms import show_alarms

    asyncio.run(show_alarms((common or Common()).of_run(), Console()))


@alarms.command
def accept(name: str, *, reason: str = "by hand", actor: str | None = None, common: Common | None = None) -> None:
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
    from ostinato.launch.commands.alarms import accept_alarm

    asyncio.run(accept_alarm((common or Common()).of_run(), name, reason, actor, Console()))
