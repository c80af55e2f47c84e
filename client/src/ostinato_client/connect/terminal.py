"""The terminal: plain lines, a coloured diff and a yes-or-no question, in which keys and other secrets are masked."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from ostinato_client.connect.agent_settings import PLACEHOLDER
from ostinato_client.connect.errors import BadConfig

_COLORS = {"+": "32", "-": "31", "@": "36"}  # ANSI's green, red and cyan


class Terminal:
    """Where lines are printed and questions are asked.

    Args:
        out: where lines go. Colours are used if it is a terminal.
        env: the environment; `NO_COLOR`, or a `TERM` that is dumb, switches colours off.

    Example: ``Terminal(sys.stdout).say(["done"])``
    """

    def __init__(self, out: IO[str], env: Mapping[str, str] = os.environ) -> None:
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="backslashreplace")  # an ASCII locale prints what it can
        self.out = out
        self._colored = out.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"

    def say(self, lines: Sequence[str]) -> None:
        """Print lines as they are, with control characters escaped."""
        for line in lines:
            self.out.write(f"{plain(line)}\n")
        self.out.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Print the lines of a diff."""
        for line in lines:
            color = _COLORS.get(line[:1]) if self._colored else None
            self.out.write(f"\x1b[{color}m{line}\x1b[0m\n" if color else f"{line}\n")
        self.out.flush()

    def agreed(self, question: str, *, yes: bool) -> bool:
        """True if a person agrees, or did so beforehand (`yes`). Raises BadConfig if there is no terminal to ask at."""
        if yes:
            return True
        if not sys.stdin.isatty():
            raise BadConfig("nothing was written: there is no terminal to ask at; add --yes to agree")
        self.out.write(f"{question} (y/N) ")
        self.out.flush()
        try:
            answer = input()
        except EOFError:
            answer = ""
        if answer.strip().lower() in ("y", "yes"):
            return True
        self.say(["nothing was written"])
        return False


def plain(text: str) -> str:
    """Escapes control characters as Python writes them, so that a terminal does not obey them."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


# ---------------------------------------------------------------- masking secrets


_LEAST = 12  # the shortest key, in characters, of which the last four may be shown
_NAMES = "key|token|secret|passw|auth|credential|cookie|bearer|header"
# a line's masking takes time in proportion to its length: what may begin anywhere is bounded
_NAMED = re.compile(
    rf"""((?:{_NAMES})[\w.-]{{0,64}}['"]?\s*[:=]\s*)("(?:\\.|[^"\\])*"|'[^']*'|"[^"…]*\Z|'[^'…]*\Z|(?:bearer|basic)\s+[^\s'"]+|[^\s,'"{{\[][^\s,]*)""",
    re.IGNORECASE,
)
_BARE = re.compile(
    r"(?<![\w-])(?:(?:sk|pk|rk|ghp|gho|github_pat|glpat|xox[a-z]|hf)[-_]|AKIA)[A-Za-z0-9_-]{8,}"
    r"|(?<=bearer )[^\s\"']+|(?<=://)[^\s/@:\"']*:[^\s/@\"']+(?=@)|(?<![\w-])(?=\w*\d)(?=\w*[A-Za-z])\w{24,}(?![\w-])",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"""['"]?(?:true|false|null|[\d.]+|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|)['"]?,?""")


def masked(key: str) -> str:
    """A key as it may be shown. Example: ``masked("sk-0123456789abcdef") == "sk-…cdef"``"""
    kind = "sk-" if key.startswith("sk-") else ""
    return f"{kind}…{key[-4:]}" if len(key) >= _LEAST else "…"


def hidden(text: str, key: str | None) -> str:
    """A line in which the key is masked, and any other value that is named like a secret or looks like one."""
    if key:
        text = text.replace(key, masked(key))
    text = _NAMED.sub(lambda found: found[1] + _value(found[2]), text)
    return _BARE.sub(lambda found: masked(found[0]), text)


def _value(value: str) -> str:
    quote = value[0] if value[0] in "\"'" else ""
    bare = value.strip(quote) if quote else value
    if "…" in bare or bare == PLACEHOLDER or _NO_SECRET.fullmatch(value):
        return value
    return f"{quote}{masked(bare)}{quote}"
