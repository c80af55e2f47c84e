"""Shows a change to settings as a unified diff without secrets, neither ours nor any that were there before."""

from __future__ import annotations

import difflib
import re

from ostinato.core.lines import lines_of
from ostinato.launch.commands.connecting.agents import PLACEHOLDER
from ostinato.launch.views.plain import plain

_LEAST = 12  # the shortest key, in characters, of which the last four may be shown
_NAMES = "key|token|secret|passw|auth|credential|cookie|bearer|header"
_NAMED = re.compile(
    rf"""(['"]?[\w.-]*(?:{_NAMES})[\w.-]*['"]?\s*[:=]\s*)("(?:\\.|[^"\\])*"|'[^']*'|(?:bearer|basic)\s+[^\s'"]+|[^\s,'"{{\[][^\s,]*)""",
    re.IGNORECASE,
)
_BARE = re.compile(
    r"(?<![\w-])(?:(?:sk|pk|rk|ghp|gho|github_pat|glpat|xox[a-z]|hf)[-_]|AKIA)[A-Za-z0-9_-]{8,}"
    r"|(?<=bearer )[^\s\"']+|(?<=://)[^\s/@\"']+:[^\s/@\"']+(?=@)|(?<![\w-])(?=\w*\d)(?=\w*[A-Za-z])\w{24,}(?![\w-])",
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


def diff(name: str, before: str | None, after: str | None, key: str | None) -> list[str]:
    """A unified diff of a file's change, with secrets masked; None: the file does not exist."""
    old, new = ([] if text is None else lines_of(text) for text in (before, after))
    names = ("/dev/null" if before is None else name, "/dev/null" if after is None else name)
    lines = difflib.unified_diff(old, new, *names, lineterm="")
    return [plain(hidden(line, key)) for line in lines]
