"""Files of a run: written atomically with a stated durability, and private whatever the umask; and their disk usage."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

REFUSALS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""Errors of a disk that is full, fails or has become read-only: this may pass, and is not the process's own fault."""
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors when files or memory have run out: they say nothing about the file that was to be opened."""


def private(path: str, flags: int) -> int:
    """Open a new file with mode 0600, as an opener for `open`. An existing file keeps its mode.

    Example: ``open(path, "a", opener=private)``
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def write_atomic(path: Path, data: str | bytes, *, durable: bool, mode: int = 0o600) -> None:
    """Replace a file by one with `data`: a reader sees the old file or the new one, never a part.

    Args:
        path: the file, in a directory that exists.
        data: its new content; text as UTF-8.
        durable: the new file survives a crash of the machine once this returns: it and its directory are synced. Otherwise a crash of
            the machine may leave the old file, the new one, or an empty one, which suits files that the next start writes again.
        mode: the file's mode, which the umask narrows.

    Raises OSError; then the old file is still there, or, if only the directory could not be synced, the new one.

    Example: ``write_atomic(home / "admin.key", key, durable=True)``
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    partial.unlink(missing_ok=True)  # left by an earlier process with the same ids
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode & 0o777), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def install_directory(partial: Path, target: Path) -> None:
    """Rename a directory to `target`, which is missing or empty, so that all its files survive a crash of the machine. Raises OSError."""
    for folder, _, names in os.walk(partial):
        for name in names:
            _sync(Path(folder) / name, os.O_RDONLY)
        sync_directory(Path(folder))
    partial.replace(target)
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a crash of the machine. Raises OSError."""
    _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(directory: Path, shut: Callable[[], bool] = lambda: True) -> str:
    """Create a directory with mode 0700. An existing one that other users can enter is closed to them if it is ours and `shut()` is true.

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


def older(path: Path) -> Path:
    """Return the path of the rotated file. Example: train.jsonl -> train.1.jsonl"""
    return path.with_suffix(f".1{path.suffix}")


def disk_use(path: Path) -> int:
    """Return the bytes on disk of a file, or of everything below a directory. A file deleted during the scan counts 0 bytes."""
    with contextlib.suppress(FileNotFoundError):
        if not path.is_dir():
            return path.stat().st_blocks * 512
        with os.scandir(path) as entries:
            return sum(
                disk_use(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else _blocks(entry)
                for entry in entries
            )
    return 0


def _blocks(entry: os.DirEntry[str]) -> int:
    with contextlib.suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False).st_blocks * 512
    return 0
