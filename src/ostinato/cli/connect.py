"""`ostinato connect`: connects coding agents to the gateway. `ostinato watch`: tracks which of an agent's lines are kept.

Both run the client package's code, which also works without this package. Here the gateway of `run.directory` is found automatically.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter, validators

from ostinato import __version__
from ostinato.cli.options import DEFAULTS, Common, Flag
from ostinato.core import errors

if TYPE_CHECKING:
    from ostinato.config import Config
    from ostinato_client.connect.terminal import Terminal


@contextlib.contextmanager
def client_errors() -> Generator[None]:
    """Convert the client package's errors to this package's errors of the same name. Raises BadConfig if it is not installed."""
    try:
        import ostinato_client.connect.errors as client
    except ImportError as error:
        remedy = f"pip install ostinato-client=={__version__}"
        raise errors.BadConfig(f"this needs the client's package beside this one ({error}): {remedy}") from error
    try:
        yield
    except client.ConnectError as error:
        raise getattr(errors, type(error).__name__)(str(error)) from error


def running_gateway(config: Config) -> str:
    """Return the URL at which this machine reaches the gateway of `run.directory`. Raises NotFound if none is running."""
    from ostinato.app.storage import Home
    from ostinato.status.gateway_address import read_address

    url = read_address(Home(config.run.directory).address)
    if url is None:
        raise errors.NotFound(
            f"no gateway runs for {config.run.directory}; start it with `ostinato up`, or name one with --url"
        )
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


# ---------------------------------------------------------------- connect


connect = App(name="connect")


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
    common: Common = DEFAULTS,
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
    config = None if undo else common.load()
    with client_errors():
        from ostinato_client.connect.command import Options, run, surroundings
        from ostinato_client.connect.terminal import Terminal

        options = Options(
            url=url,
            key=key,
            model=model,
            session=session,
            scope=scope,
            telemetry=telemetry,
            yes=yes,
            program="ostinato connect",
        )
        at = surroundings() if config is None else replace(surroundings(), find_gateway=lambda: running_gateway(config))
        run(agent, options, at, Terminal(sys.stdout), test=test, undone=undo, dialect=dialect)


# ---------------------------------------------------------------- watch


watch = App(name="watch")


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
    if undo and install is None:
        raise errors.BadConfig("--undo: say whose hook, with --install")
    with client_errors():
        from ostinato_client.connect.command import surroundings
        from ostinato_client.connect.terminal import Terminal
        from ostinato_client.watch.installation import change_hook

        terminal = Terminal(sys.stdout)
        if install is not None:
            change_hook(install, scope, surroundings(), terminal, undone=undo, yes=yes, program="ostinato watch")
            return
        try:
            sys.exit(_follow(repository, url, terminal, once=once, interval_s=interval))
        except KeyboardInterrupt:
            sys.exit(0)


def _follow(directory: Path, url: str | None, terminal: Terminal, *, once: bool, interval_s: float) -> int:
    """Follow the working tree that contains a directory until interrupted. Returns 0, or 1 if `once` could not send all that waits.

    Raises:
        BadConfig: there is no working tree, it cannot be read or written, or the URL is invalid.
        Conflict: another watcher has the working tree.
    """
    import sqlite3

    from ostinato_client.connect.agent_settings import KEY_VARIABLE
    from ostinato_client.watch.delivery import known_url
    from ostinato_client.watch.git import GitError
    from ostinato_client.watch.running import watch as run
    from ostinato_client.watch.state import Held

    key = os.environ.get(KEY_VARIABLE)
    try:
        return run(directory, url or known_url(os.environ), key, once=once, interval_s=interval_s, terminal=terminal)
    except Held as error:
        raise errors.Conflict(str(error)) from error
    except (GitError, ValueError, OSError, sqlite3.Error) as error:
        raise errors.BadConfig(str(error)) from error
