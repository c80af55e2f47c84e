"""Shows a person a change to their settings and asks whether they agree."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ostinato.core.errors import BadConfig
from ostinato.launch.views.plain import plain

_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def agreed(console: Console, question: str, *, yes: bool) -> bool:
    """True if a person agrees, or did so beforehand (`yes`). Raises BadConfig if there is no terminal to ask at."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise BadConfig("nothing was written: there is no terminal to ask at; add --yes to agree")
    try:
        answer = console.input(f"{question} (y/N) ", markup=False)
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    say(console, ["nothing was written"])
    return False


def show(console: Console, lines: Sequence[str]) -> None:
    """Print the lines of a diff."""
    for line in lines:
        console.print(Text(line, _STYLES.get(line[:1], "")), soft_wrap=True)


def say(console: Console, lines: Sequence[str]) -> None:
    """Print lines as they are."""
    for line in lines:
        console.print(Text(plain(line)), soft_wrap=True)
