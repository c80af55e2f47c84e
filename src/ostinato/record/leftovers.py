"""The directories beside a log in which a restoration of it works, and their removal once it was killed."""

from __future__ import annotations

import shutil
from pathlib import Path


def restoring(log: Path) -> Path:
    """Where the log that will lie in the directory `log` is assembled."""
    return log.with_name(f".{log.name}.restoring")


def replaced(log: Path) -> Path:
    """Where the empty log goes that the restored one replaces."""
    return log.with_name(f".{log.name}.replaced")


def remove_tree(path: Path) -> None:
    """Remove a directory, if it is there. Raises OSError."""
    if path.exists():
        shutil.rmtree(path)


def sweep(log: Path, before: float) -> list[str]:
    """Remove what killed restorations of a log left, if it was last written before the time `before`.

    Returns the names of the removed directories. Raises OSError.
    """
    gone: list[str] = []
    for path in (restoring(log), replaced(log)):
        if path.is_dir() and max(each.stat().st_mtime for each in (path, *path.iterdir())) < before:
            remove_tree(path)
            gone.append(path.name)
    return gone
