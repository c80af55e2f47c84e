"""Files and directories of a run that no other user of the machine may read, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path


def private(path: str, flags: int) -> int:
    """An opener for `open` that makes a new file with mode 0600. A file that exists keeps its mode.

    Example: ``open(path, "a", opener=private)``
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically by one that only its owner can read. Raises OSError; then the old file is still there."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # an earlier process of this number may have left a wider one
    with open(partial, "w", encoding="utf-8", opener=private) as file:
        file.write(text)
    partial.replace(path)


def make_private(directory: Path, shut: Callable[[], bool] = lambda: True) -> str:
    """Make a directory with mode 0700. One that exists and is open to other users is closed to them if it is ours and `shut()` is true.

    Returns a line for people if it was open to others: that it no longer is, or why it still is. Raises OSError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = directory.stat()
    mode = stat.S_IMODE(seen.st_mode)
    if not mode & 0o077:
        return ""
    who = f"other users of this machine can enter {directory} (mode {mode:03o}) and may read conversations and weights"
    if seen.st_uid != os.getuid():
        return f"{who}; it belongs to user {seen.st_uid}, who can close it: chmod 700 {directory}"
    if not shut():
        return f"{who}; it holds other things too: give the run a directory of its own, or run chmod 700 {directory}"
    try:
        directory.chmod(mode & ~0o077)
    except OSError as error:
        return f"{who}; it cannot be closed: {error.strerror}"
    return f"other users of this machine could enter {directory} (mode {mode:03o}); it is closed to them now"
