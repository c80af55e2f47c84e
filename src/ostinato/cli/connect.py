"""`ostinato connect`: coding agents on the gateway. `ostinato watch`: follows the lines that an agent wrote."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators
from rich.console import Console

from ostinato.cli.options import Common

connect = App(name="connect")
Flag = Annotated[bool, Parameter(negative="")]


@connect.default
def run_connect(
    agent: Literal["claude-code", "codex", "opencode", "qwen-code", "mini-swe-agent", "aider", "cursor"] | None = None,
    *,
    test: Flag = False,
    undo: Flag = False,
    dialect: Literal["chat", "messages", "responses"] | None = None,
    url: str | None = None,
    key: str | None = None,
    model: str | None = None,
    session: str | None = None,
    scope: Literal["user", "project"] = "user",
    telemetry: Flag = False,
    yes: Flag = False,
    common: Common | None = None,
) -> None:
    """Connect an unmodified coding agent to a running gateway: show the change to its settings, ask, and write it.

    Parameters
    ----------
    agent
        The agent whose settings are changed.
    test
        Write nothing; make one small call and show what the gateway captured of it.
    undo
        Restore the settings exactly as they were before.
    dialect
        API dialect of --test. Default: the agent's own, or chat if no agent is named.
    url
        The gateway's address. Default: the gateway that runs for `run.directory`.
    key
        The gateway's key. Prefer the variable OSTINATO_API_KEY, which other users of this machine cannot see.
    model
        The model's name. Default: the first that the gateway lists.
    session
        Name of a session that all the agent's calls are to belong to.
    scope
        user: your settings, for every directory. project: the current directory only, if the agent supports it.
    telemetry
        Have the agent send its log events to the gateway as well (claude-code, codex).
    yes
        Do not ask for confirmation.
    """
    from ostinato.core.errors import BadConfig
    from ostinato.launch.commands import connect as command
    from ostinato.launch.commands.agent_settings import AGENTS

    wishes = command.Wishes(url=url, key=key, model=model, session=session, scope=scope, telemetry=telemetry, yes=yes)
    at, out = command.surroundings(), Console()
    _check(test=test, undo=undo, dialect=dialect)
    if test:
        spoken = dialect or (AGENTS[agent].dialect if agent else "chat")
        asyncio.run(command.check_capture((common or Common()).load(), spoken, wishes, at, out))
    elif agent is None:
        raise BadConfig(f"name an agent ({', '.join(AGENTS)}), or give --test")
    elif undo:
        command.undo(agent, wishes, at, out)
    else:
        asyncio.run(command.connect((common or Common()).load(), agent, wishes, at, out))


def _check(*, test: bool, undo: bool, dialect: str | None) -> None:
    """Raise BadConfig for options that do not go together."""
    from ostinato.core.errors import BadConfig

    if test and undo:
        raise BadConfig("--test and --undo: give one of them")
    if dialect is not None and not test:
        raise BadConfig("--dialect is of --test; an agent's own is known. Leave it out, or add --test")


# ---------------------------------------------------------------- watch


watch = App(name="watch")
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
