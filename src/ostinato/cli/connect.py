"""`ostinato connect`: coding agents on the gateway."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from cyclopts import App, Parameter
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
    from ostinato.launch.commands.connecting.agents import AGENTS

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
