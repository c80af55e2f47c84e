"""A run's disk use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def disk_use(path: Path) -> int:
    """Bytes on disk of a file, or of everything below a directory. A file deleted during the scan counts 0 bytes."""
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
