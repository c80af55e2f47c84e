"""`ostinato alarms`: the standing alarms, and how a person ends one."""

from __future__ import annotations

import asyncio

from cyclopts import App
from rich.console import Console

from ostinato.cli.options import Common

alarms = App(name="alarms", help="The alarms that stand, and by which turns; `ostinato alarms accept` ends one.")


@alarms.default
def show(*, common: Common | None = None) -> None:
    """The alarms that stand: what was found, since when, and the newest turns that show it."""
    from ostinato.launch.commands.alarms import show_alarms

    asyncio.run(show_alarms((common or Common()).of_run(), Console()))


@alarms.command
def accept(name: str, *, reason: str = "by hand", actor: str | None = None, common: Common | None = None) -> None:
    """Say that what a monitor found is what is wanted: the alarm ends, and does not come again for as much.

    Parameters
    ----------
    name
        The alarm, such as monitor:edit, as `ostinato alarms` says it.
    reason
        Why it is wanted; kept in the log.
    actor
        Who says so, kept in the log as well; none: the login name.
    """
    from ostinato.launch.commands.alarms import accept_alarm

    asyncio.run(accept_alarm((common or Common()).of_run(), name, reason, actor, Console()))
