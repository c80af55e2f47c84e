"""The user's cache directory for compiled code: nobody but this user can have written what lies there."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def cache_places() -> list[Path]:
    """Where the directory may lie, best first: the user's cache (XDG_CACHE_HOME, else ~/.cache), then the directory for temporary files."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [Path(base) / "ostinato"]
    with contextlib.suppress(FileNotFoundError):  # no directory for temporary files can be written
        places.append(Path(tempfile.gettempdir()) / f"ostinato-{os.getuid()}")
    return [place for place in places if place.is_absolute()]


def cache_directory() -> Path | None:
    """The first of `cache_places` that this user owns and can write, made with mode 0700 if need be; None if there is none."""
    for place in cache_places():
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _owned(place) and os.access(place, os.W_OK | os.X_OK):
                place.chmod(0o700)
                return place
    return None


def private_directory(path: Path) -> bool:
    """Make a directory with mode 0700 unless it exists. False if it cannot be made, is a link, belongs to somebody else, or is open to
    others.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        return _owned(path) and not stat.S_IMODE(path.lstat().st_mode) & 0o077
    except OSError:
        return False


def _owned(path: Path) -> bool:
    seen = path.lstat()
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid()
