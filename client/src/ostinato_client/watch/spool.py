"""The spool, to which the hooks append one JSON line for each edit, and the watcher's reader of it.

It is ``.git/ostinato/spool.jsonl`` in the working tree's own git directory. Its lines begin and end with a line break, so that a truncated
line spoils no other. It holds text of the user's code, is readable by its owner alone, and never leaves the machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPOOL = "spool.jsonl"
_OLD = "spool.old.jsonl"
MOST_BYTES = 64 * 1024 * 1024  # beyond it hooks append no more until the watcher has read
_ROTATED_AT = 4 * 1024 * 1024
_LONGEST_LINE = 16 * 1024 * 1024


@dataclass(frozen=True)
class Edit:
    """One edit of one file by an agent.

    Attributes:
        agent: its name.
        call: the id of the tool call, None if the agent does not say.
        file: absolute path.
        before: the whole file before; None if that is not known.
        after: the whole file as the call left it.
        at: Unix seconds.
        text: the call's argument that holds what it wrote, the line of `after` that the argument begins in, from 0, and how many lines it
            has; None if that is not certain.
    """

    agent: str
    call: str | None
    file: str
    before: str | None
    after: str
    at: float
    text: tuple[str, int, int] | None = None

    def line(self) -> bytes:
        """The edit as a line of the spool."""
        return b"\n" + json.dumps({"v": 1, **vars(self)}).encode() + b"\n"


def append(directory: Path, edit: Edit) -> bool:
    """Put an edit into the spool below ``.git/ostinato``; False if it is full. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(directory / SPOOL, flags, 0o600)
    try:
        if os.fstat(fd).st_size > MOST_BYTES:
            return False
        os.write(fd, edit.line())  # in one write, so that concurrent hooks do not mix their lines
    finally:
        os.close(fd)
    return True


def parse(line: bytes) -> Edit | None:
    """A line parsed as an edit; None if it is truncated or something else."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return _edit(fields) if isinstance(fields, dict) else None


def _edit(fields: Mapping[str, Any]) -> Edit | None:
    agent, call, file = fields.get("agent"), fields.get("call"), fields.get("file")
    before, after, at = fields.get("before"), fields.get("after"), fields.get("at")
    if fields.get("v") != 1 or not isinstance(agent, str) or not isinstance(file, str) or not isinstance(after, str):
        return None
    if not isinstance(before, (str, type(None))) or not isinstance(call, (str, type(None))):
        return None
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < 1e11:
        return None
    return Edit(agent[:64], call, file, before, after, float(at), _text(fields.get("text")))


def _text(told: Any) -> tuple[str, int, int] | None:
    if not isinstance(told, list) or len(told) != 3 or not isinstance(told[0], str):
        return None
    argument, begins, lines = told
    whole = all(type(number) is int and 0 <= number < 1 << 20 for number in (begins, lines))
    return (argument, begins, lines) if whole and len(argument) <= 64 else None


class Spool:
    """The watcher's reader of the spool: it resumes at its last position and reads each line once.

    `positions`: how far each file, by its inode, was read; store it together with the results of the lines.

    Example: ``for edit in Spool(directory, {}).read(): ...``
    """

    def __init__(self, directory: Path, positions: Mapping[str, int]) -> None:
        self._directory = directory
        self.positions = dict(positions)

    def read(self) -> Iterator[Edit | None]:
        """The edits since the last read, in order; None for a line that is no edit."""
        seen: set[str] = set()
        for name in (_OLD, SPOOL):
            yield from self._read(self._directory / name, seen)
        self.positions = {inode: at for inode, at in self.positions.items() if inode in seen}

    def _read(self, path: Path, seen: set[str]) -> Iterator[Edit | None]:
        try:
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except OSError:
            return
        with os.fdopen(fd, "rb") as file:
            inode, size = str(os.fstat(fd).st_ino), os.fstat(fd).st_size
            seen.add(inode)
            at = self.positions.get(inode, 0)
            at = at if at <= size else 0
            file.seek(at)
            while line := file.readline(_LONGEST_LINE):
                if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                    break  # somebody is writing it
                at += len(line)
                if line.strip():
                    yield parse(line)
            self.positions[inode] = at

    def rotate(self) -> None:
        """Make room, once `positions` are stored: a large spool that was read is set aside, and deleted at the next rotation."""
        spool = self._directory / SPOOL
        try:
            status = spool.stat()
            if status.st_size > _ROTATED_AT and self.positions.get(str(status.st_ino)) == status.st_size:
                # a hook that has it open still writes to it, and is read from there
                spool.replace(self._directory / _OLD)
        except OSError:
            return
