"""Applies a unified diff to a task's files, without fuzz or offsets: each hunk must match exactly at the line that its header states."""

from __future__ import annotations

import re
from collections.abc import Callable

from ostinato.core.errors import BadRequest
from ostinato.core.sandbox import Change, ChangeKind

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"


def patched(diff: str, original: Callable[[str], bytes | None]) -> tuple[Change, ...]:
    """Return the file changes that a diff makes. The diff is as `git diff` or `diff -u` writes it, with or without the prefixes a/ and b/.

    `original` gives a file's bytes, or None if there is no such file. Raises BadRequest, naming the file and line, if the diff does not
    apply.
    """
    lines, at, changes = diff.split("\n"), 0, list[Change]()
    while at < len(lines):
        if not (lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")):
            at += 1
            continue
        old, new = _name(lines[at]), _name(lines[at + 1])
        path = old if new is None else new
        if path is None or (new is not None and old not in (None, new)):
            raise BadRequest(
                f"the diff says {lines[at]!r} and {lines[at + 1]!r}: it renames a file; write a deletion and a new file instead"
            )
        before = None if old is None else original(path)
        if old is not None and before is None:
            raise BadRequest(f"{path}: the diff changes this file, but the task has no such file")
        text, at = _apply_hunks(path, (before or b"").decode("utf-8", "surrogateescape"), lines, at + 2)
        kind = ChangeKind.DELETED if new is None else ChangeKind.WRITTEN
        data = b"" if new is None else text.encode("utf-8", "surrogateescape")
        changes.append(Change(path=path, kind=kind, data=data))
    if not changes:
        raise BadRequest("the text holds no unified diff: there are no lines that begin with --- and +++")
    return tuple(changes)


def _name(line: str) -> str | None:
    name = line[4:].split("\t")[0].strip()
    return None if name == "/dev/null" else re.sub(r"^[ab]/", "", name)


def _apply_hunks(path: str, text: str, lines: list[str], at: int) -> tuple[str, int]:
    """Return a file's text after its hunks, and the index of the first diff line behind them. A hunk's header says how many lines it has;
    no others are read.
    """
    before, made, taken, bare = text.split("\n"), list[str](), 0, set[str]()
    while at < len(lines) and (hunk := _HUNK.match(lines[at])):
        first, olds, news = int(hunk[1]), int(hunk[2] or 1), int(hunk[3] or 1)
        start = first - 1 if olds else first
        if start < taken:
            raise BadRequest(f"{path}: hunks of the diff overlap at line {first}")
        made, taken, at = [*made, *before[taken:start]], start, at + 1
        while olds > 0 or news > 0:
            line = lines[at] if at < len(lines) else ""
            sign, rest = (line[:1] or " "), line[1:]
            if sign not in " -+":
                raise BadRequest(f"{path}: {line!r} is not a valid line of a hunk; it must begin with ' ', '-' or '+'")
            if sign != "+":
                if taken >= len(before) or before[taken] != rest:
                    raise BadRequest(f"{path}, line {taken + 1}: the diff does not apply; it expects {rest!r} there")
                taken, olds = taken + 1, olds - 1
            if sign != "-":
                made.append(rest)
                news -= 1
            at += 1
            if at < len(lines) and lines[at] == _NO_NEWLINE:
                bare |= {"-", "+"} if sign == " " else {sign}
                at += 1
    whole = "\n".join([*made, *before[taken:]])
    if bare == {"-"}:  # only the old file lacked a final line break
        whole += "\n"
    return whole.removesuffix("\n") if bare == {"+"} else whole, at
