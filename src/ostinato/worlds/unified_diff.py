"""Applies a unified diff to a task's files. It is applied strictly: each hunk must fit exactly at the line that it states."""

from __future__ import annotations

import re
from collections.abc import Callable

from ostinato.core.errors import BadRequest
from ostinato.core.sandbox import Change, ChangeKind

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"


def patched(diff: str, original: Callable[[str], bytes | None]) -> tuple[Change, ...]:
    """The changes that a diff describes, as `git diff` or `diff -u` writes it, with or without the prefixes a/ and b/.

    `original` gives a file's bytes, None if there is no such file. Raises BadRequest with the file and line where the diff does not fit.
    """
    lines, at, found = diff.split("\n"), 0, list[Change]()
    while at < len(lines):
        if not (lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")):
            at += 1
            continue
        old, new = _name(lines[at]), _name(lines[at + 1])
        path = old if new is None else new
        if path is None or (new is not None and old not in (None, new)):
            raise BadRequest(f"the diff says {lines[at]!r} and {lines[at + 1]!r}: a file is renamed; write it as two")
        before = None if old is None else original(path)
        if old is not None and before is None:
            raise BadRequest(f"{path}: the diff changes it, and the task has no such file")
        text, at = _applied(path, (before or b"").decode("utf-8", "surrogateescape"), lines, at + 2)
        kind = ChangeKind.DELETED if new is None else ChangeKind.WRITTEN
        data = b"" if new is None else text.encode("utf-8", "surrogateescape")
        found.append(Change(path=path, kind=kind, data=data))
    if not found:
        raise BadRequest("there is no unified diff in it: no lines --- and +++")
    return tuple(found)


def _name(line: str) -> str | None:
    name = line[4:].split("\t")[0].strip()
    return None if name == "/dev/null" else re.sub(r"^[ab]/", "", name)


def _applied(path: str, text: str, lines: list[str], at: int) -> tuple[str, int]:
    """A file after its hunks, and the index of the diff's next line. Of a hunk, only the lines that its header counts are read."""
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
                raise BadRequest(f"{path}: {line!r} stands in a hunk of the diff")
            if sign != "+":
                if taken >= len(before) or before[taken] != rest:
                    raise BadRequest(f"{path}, line {taken + 1}: the diff does not fit; it has {rest!r}")
                taken, olds = taken + 1, olds - 1
            if sign != "-":
                made.append(rest)
                news -= 1
            at += 1
            if at < len(lines) and lines[at] == _NO_NEWLINE:
                bare |= {"-", "+"} if sign == " " else {sign}
                at += 1
    whole = "\n".join([*made, *before[taken:]])
    if bare == {"-"}:  # the old file ended without a line break, and the new one does not
        whole += "\n"
    return whole.removesuffix("\n") if bare == {"+"} else whole, at
