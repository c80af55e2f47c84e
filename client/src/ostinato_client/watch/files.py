"""Files of the working tree as lines, within bounds."""

from __future__ import annotations

import errno
import os
from pathlib import Path

LONGEST = 1024 * 1024  # bytes
_MOST_LINES = 20_000
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG})


def lines_of(data: bytes) -> list[str] | None:
    """The lines of a file; None if it is binary or too large to be followed."""
    return None if len(data) > LONGEST else lines_of_text(data.decode(errors="replace"))


def lines_of_text(text: str) -> list[str] | None:
    """As `lines_of`, for a file's text."""
    if len(text) > LONGEST or "\0" in text:
        return None
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.rstrip("\r") for line in lines] if len(lines) <= _MOST_LINES else None


def count_lines(text: str) -> int:
    r"""How many lines a text has; the last may lack its end. Example: ``count_lines("a\nb") == 2``"""
    return text.count("\n") + (not text.endswith("\n") and bool(text))


def within(root: Path, file: str) -> str | None:
    """A file's path relative to a working tree, with links resolved; None if it is outside the tree, or in its git directory."""
    try:
        path = os.path.relpath(os.path.realpath(file), root)
    except (OSError, ValueError):
        return None
    parts = Path(path).parts
    return None if not parts or parts[0] in ("..", ".git") or "\0" in path else path


def signature(root: Path, path: str) -> str | None:
    """A signature of a file's state, made without reading it; None if there is no plain file. Raises OSError if that cannot be told."""
    try:
        status = os.stat(root / path, follow_symlinks=False)
    except ValueError:
        return None
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
    if not _is_plain(status.st_mode):
        return None
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def read(root: Path, path: str) -> list[str] | None:
    """A file's lines; None if it is not there, leads outside the working tree by a link, is binary or too large. Raises OSError if it is
    there and cannot be read.
    """
    if within(root, str(root / path)) != path:
        return None
    try:
        fd = os.open(root / path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
    with os.fdopen(fd, "rb") as file:
        if not _is_plain(os.fstat(fd).st_mode):
            return None
        return lines_of(file.read(LONGEST + 1))


def _is_plain(mode: int) -> bool:
    return (mode & 0o170000) == 0o100000
