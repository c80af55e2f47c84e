"""`ostinato alarms`: shows the active alarms and the turns behind them, and lets a person accept what an alarm found."""

from __future__ import annotations

from typing import cast

from rich.console import Console
from rich.text import Text

from ostinato.app.storage import open_run
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.launch.commands.log import existing
from ostinato.launch.views.audit import audited, login
from ostinato.launch.views.plain import plain
from ostinato.launch.views.spans import ago
from ostinato.release.monitors.watcher import accept, acceptable, standing

_TURNS = 5
"""How many of an alarm's newest turns are named."""


async def show_alarms(config: Config, console: Console) -> None:
    """Print every active alarm, the newest last. Raises NotFound if the run does not exist."""
    existing(config)
    with open_run(config) as run:
        found = await standing(run.log)
    if not found:
        console.print("no active alarms", style="green")
    for name, alarm in found.items():
        since = f"  since {ago(wall_clock() - alarm.at)}"
        console.print(Text.assemble(("◷ ", "yellow"), (plain(name), "bold"), (since, "dim")))
        console.print(Text(f"  {plain(alarm.reason)}"), soft_wrap=True)
        turns = alarm.detail.get("turns")
        if isinstance(turns, list) and turns:
            named = ", ".join(plain(str(turn)) for turn in cast("list[object]", turns)[-_TURNS:])
            console.print(Text(f"  example turns: {named}", "dim"), soft_wrap=True)
        ends = f"ostinato alarms accept {name}" if acceptable(name) else "it ends when its cause does"
        console.print(Text(f"  {plain(ends)}", "dim"), soft_wrap=True)


async def accept_alarm(config: Config, name: str, reason: str, actor: str | None, console: Console) -> None:
    """Accept what an alarm found as intended, which ends the alarm. Raises NotFound and BadRequest as `accept` does."""
    place = existing(config)
    with audited(place, "accept alarm", name=name, actor=actor or login()), open_run(config) as run:
        row = await accept(run.log, name, reason, actor or login(), wall_clock())
    console.print(Text(f"{row.name} ended; it is not raised again for a finding of this size"))
