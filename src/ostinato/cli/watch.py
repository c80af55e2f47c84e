"""`ostinato watch`: follows the lines that an agent wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators
from rich.console import Console

watch = App(name="watch")
Flag = Annotated[bool, Parameter(negative="")]
_CURSOR = (
    "--install cursor: Cursor's hooks do not name the call that made an edit, so its lines could be credited by a guess only. "
    "Nothing is installed"
)


@watch.default
def run_watch(
    *,
    install: Literal["claude-code", "opencode", "cursor"] | None = None,
    undo: Flag = False,
    once: Flag = False,
    repository: Path = Path(),
    url: str | None = None,
    interval: Annotated[float, Parameter(validator=validators.Number(gte=0.05, lte=60))] = 2.0,
    scope: Literal["user", "project"] = "user",
    yes: Flag = False,
) -> None:
    """Follow the lines that an agent's tool calls wrote in a git repository, and report to the gateway how many of them are kept.

    Each turn that made such calls gets signals whose value is the share of its lines still there: lines_kept_5m, lines_kept_1h,
    lines_kept_24h, and lines_kept_commit when they are committed. Only counts are sent. Install the agent's hook once,
    then leave `ostinato watch` running beside the repository. The key is read from OSTINATO_API_KEY.

    Parameters
    ----------
    install
        Add the hook that records what a call wrote to this agent's settings, after showing the change and asking.
    undo
        With --install: remove the hook again.
    once
        Look once, send what is due, and exit: for CI and cron.
    repository
        A directory in the repository. Default: the current one.
    url
        The gateway's address. Default: OSTINATO_URL, else the gateway your agents are connected to, else http://127.0.0.1:8321.
    interval
        Seconds between two looks.
    scope
        user: install the hook for every directory. project: for the current directory only. It writes only in watched repositories.
    yes
        Do not ask for confirmation.
    """
    from ostinato.core.errors import BadConfig
    from ostinato.launch.commands import watch as command
    from ostinato.launch.commands.connect import surroundings

    out = Console()
    if undo and install is None:
        raise BadConfig("--undo: say whose hook, with --install")
    if install is None:
        try:
            sys.exit(command.watch(repository, url, once=once, interval_s=interval, console=out))
        except KeyboardInterrupt:
            sys.exit(0)
    if install == "cursor":
        raise BadConfig(_CURSOR)
    act = command.undo if undo else command.install
    act(install, scope, surroundings(), out, yes=yes)
