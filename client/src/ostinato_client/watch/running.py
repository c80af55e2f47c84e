"""The watcher as a program."""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ostinato_client.connect.agent_settings import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE
from ostinato_client.connect.command import surroundings
from ostinato_client.connect.errors import ConnectError
from ostinato_client.connect.terminal import Terminal
from ostinato_client.sending import Sender
from ostinato_client.watch.delivery import Delivery, known_url
from ostinato_client.watch.git import GitError, Repository
from ostinato_client.watch.installation import change_hook
from ostinato_client.watch.state import Held, State
from ostinato_client.watch.watcher import Watcher, spool_directory

_PROGRAM = "python -m ostinato_client.watch"
_HELP = f"""\
Follow the lines that an agent wrote in this working tree, and tell the gateway how many of each tool call's are kept
after 5 minutes, an hour, a day and at the commit (lines_kept_5m, _1h, _24h, _commit). Only counts are sent.
The agent's hook says which lines a call wrote: --install claude-code once, or opencode; --undo removes it.
The key is read from {KEY_VARIABLE}.
"""


def watch(
    repository: Path,
    url: str,
    key: str | None,
    *,
    once: bool,
    interval_s: float,
    terminal: Terminal,
) -> int:
    """Watch until interrupted; returns 0, or 1 if `once` could not send all waiting signals.

    Raises:
        GitError: there is no working tree, or git cannot be run.
        Held: another watcher has the working tree.
        ValueError: the URL is not valid.
    """
    found = Repository.at(repository)
    clock = time.time  # noqa: TID251 (a package of its own: no Clock here)
    with State(spool_directory(found)) as state:
        watcher, delivery = Watcher(found, state, clock), Delivery(state, Sender(url, key), time.monotonic)
        said = ""
        while True:
            trouble = _trouble(watcher.look, raises=once) or watcher.trouble
            trouble = _trouble(delivery.send, raises=once) or trouble
            line = _line(state, url, trouble or delivery.trouble)
            if once:
                terminal.say([line])
                return 1 if state.waiting(1) else 0
            if line != said:
                _show(terminal, line)
                said = line
            time.sleep(interval_s)


def _trouble(act: Callable[[], object], *, raises: bool) -> str:
    """Do it; returns what went wrong, as on a full disk, in one line, or "". With `raises`, that is raised."""
    try:
        act()
    except (GitError, OSError, sqlite3.OperationalError) as error:
        if raises:
            raise
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def _line(state: State, url: str, trouble: str) -> str:
    """The status line for people."""
    counts = state.counts()
    parts = [
        f"following {counts['lines']} lines of {counts['calls']} calls in {counts['files']} files",
        f"{counts['sent']} signals sent",
        *([f"{counts['waiting']} wait for {url}"] if counts["waiting"] else []),
        *([f"{counts['refused']} refused"] if counts["refused"] else []),
        *([f"{counts['passed_over']} edits passed over"] if counts["passed_over"] else []),
        *([f"{counts['spoiled']} spoiled lines in the spool"] if counts["spoiled"] else []),
        *([trouble] if trouble else []),
    ]
    return "".join(char if char.isprintable() else "?" for char in " · ".join(parts))


def _show(terminal: Terminal, line: str) -> None:
    if not terminal.out.isatty():
        terminal.say([line])
        return
    width = os.get_terminal_size(terminal.out.fileno()).columns
    terminal.out.write(f"\r\x1b[K{line[: max(width - 1, 1)]}")
    terminal.out.flush()


def main(words: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(words)
    if not 0.05 <= given.interval <= 60:
        parser.error("--interval: give 0.05 to 60 seconds")
    if given.undo and given.install is None:
        parser.error("--undo: say whose hook, with --install")
    terminal = Terminal(sys.stdout)
    try:
        if given.install is not None:
            at = surroundings()
            change_hook(given.install, given.scope, at, terminal, undone=given.undo, yes=given.yes, program=_PROGRAM)
            return 0
        url, key = given.url or known_url(os.environ), os.environ.get(KEY_VARIABLE)
        return watch(given.repository, url, key, once=given.once, interval_s=given.interval, terminal=terminal)
    except (ConnectError, GitError, Held, ValueError, OSError, sqlite3.Error) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--repository", type=Path, default=Path(), help="a directory in it (default: the current one)")
    add(
        "--url",
        help=f"the gateway (default: {URL_VARIABLE}, else what your agents are connected to, else {DEFAULT_URL})",
    )
    add("--once", action="store_true", help="look once, send what is due, and end; for CI and cron")
    add("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (default: 2)")
    agents = ["claude-code", "opencode", "cursor"]
    add("--install", choices=agents, help="add the hook to this agent's settings, after showing the change and asking")
    add("--undo", action="store_true", help="with --install: remove the hook again")
    scope_help = "with --install: the hook for every directory (user, default), or for the current one only (project)"
    add("--scope", choices=["user", "project"], default="user", help=scope_help)
    add("--yes", action="store_true", help="with --install: do not ask for confirmation")
    return parser
