"""The watcher as a program."""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from ostinato_client.sending import Sender
from ostinato_client.watch.delivery import DEFAULT_URL, KEY_VARIABLE, Delivery, known_url
from ostinato_client.watch.git import GitError, Repository
from ostinato_client.watch.state import Held, State
from ostinato_client.watch.watcher import Watcher, spool_directory

_HELP = f"""\
Follow the lines that an agent wrote in this working tree, and tell the gateway how many of each tool call's are kept
after 5 minutes, an hour, a day and at the commit (lines_kept_5m, _1h, _24h, _commit). Only counts are sent.
The agent's hooks say which lines a call wrote: `ostinato watch --install claude-code` once, and opencode likewise.
The key is read from {KEY_VARIABLE}.
"""


def watch(
    repository: Path,
    url: str,
    key: str | None,
    *,
    once: bool,
    interval_s: float,
    out: IO[str],
    say: Callable[[str], None],
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
            trouble = ""
            try:
                watcher.look()
            except (GitError, OSError, sqlite3.OperationalError) as error:
                if once:
                    raise
                trouble = str(error).splitlines()[0] if str(error) else type(error).__name__
            done = delivery.send()
            line = _line(state, url, trouble or delivery.trouble)
            if once:
                say(line)
                return 0 if done else 1
            if line != said:
                _show(out, line, say)
                said = line
            time.sleep(interval_s)


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


def _show(out: IO[str], line: str, say: Callable[[str], None]) -> None:
    if not out.isatty():
        say(line)
        return
    width = os.get_terminal_size(out.fileno()).columns
    out.write(f"\r\x1b[K{line[: max(width - 1, 1)]}")
    out.flush()


def main(words: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ostinato_client.watch", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repository", type=Path, default=Path(), help="a directory in it (default: the current one)")
    parser.add_argument(
        "--url", help=f"the gateway (default: OSTINATO_URL, else what your agents are connected to, else {DEFAULT_URL})"
    )
    parser.add_argument("--once", action="store_true", help="look once, send what is due, and end; for CI and cron")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (default: 2)")
    given = parser.parse_args(words)
    if not 0.05 <= given.interval <= 60:
        parser.error("--interval: give 0.05 to 60 seconds")
    url, key = given.url or known_url(os.environ), os.environ.get(KEY_VARIABLE)

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    try:
        return watch(given.repository, url, key, once=given.once, interval_s=given.interval, out=sys.stdout, say=say)
    except (GitError, Held, ValueError, OSError, sqlite3.Error) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 0
