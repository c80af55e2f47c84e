"""Directories for caches and temporary files, also where the home directory is not writable.

Everything kept for the next start (converted models, compiled code, measurements) is in `cache_directory()`: `$XDG_CACHE_HOME/ostinato`,
by default `~/.cache/ostinato`. If that is not writable, as on a read-only file system or for a user without a home, `ensure_writable`
moves it into the run's directory, for this process and its children.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from ostinato.core.errors import BadConfig

DEFAULT_CACHE = Path("~/.cache")
INSIDE_RUN = ".cache"
_NAME = "ostinato"


def expanded(path: Path) -> Path:
    """Return `path` with `~` replaced; a path below `~/.cache` is below XDG_CACHE_HOME, if that is set.

    For a user without a home the path is returned unchanged.

    Example: ``expanded(Path("~/.cache/ostinato"))`` is ``Path("/home/ada/.cache/ostinato")``
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base) and path.is_relative_to(DEFAULT_CACHE):
        return Path(base) / path.relative_to(DEFAULT_CACHE)
    return Path(os.path.expanduser(path))


def cache_directory(*others: Path) -> Path:
    """Return the user's cache directory of Ostinato, created if missing: one that nobody but this user and root can have written to.

    `others` are tried next, then a directory of this user's in the directory for temporary files. Raises BadConfig if there is none.
    """
    usual = expanded(DEFAULT_CACHE / _NAME)
    for place in (usual, *others):
        if place.is_absolute() and _trusted(place, links=True):
            return place
    shared = _user_temporary()
    if shared is not None and _trusted(shared, links=False):
        return shared
    tried = [str(place) for place in (usual, *others, shared) if place is not None]
    raise BadConfig(
        f"no directory for caches: {' and '.join(tried)} cannot be written or belong to somebody else; set XDG_CACHE_HOME or TMPDIR "
        "to a directory of yours"
    )


def ensure_writable(run: Path) -> list[str]:
    """Keep caches and temporary files of this process and its children in the directory `run` if their usual places are not writable.

    Models that are already in the usual place, as in a read-only image, are found there. Returns a line for people for each place that
    was moved; none on a second call, or in a child. Changes XDG_CACHE_HOME and TMPDIR.
    """
    said: list[str] = []
    inside = run.absolute() / INSIDE_RUN
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        if _trusted(inside / "tmp", links=True):
            os.environ["TMPDIR"] = tempfile.tempdir = str(inside / "tmp")
            said.append(
                f"no directory for temporary files can be written: they go to {inside / 'tmp'}; set TMPDIR to choose"
            )
    usual = expanded(DEFAULT_CACHE / _NAME)
    with contextlib.suppress(BadConfig):  # whichever code needs the cache reports it
        found = cache_directory(inside / _NAME)
        if found != usual:
            os.environ["XDG_CACHE_HOME"] = str(found.parent if found.name == _NAME else found)
            found = cache_directory()
            _link_models(usual, found)
            said.append(
                f"{usual} cannot be written: converted models and compiled code go to {found}; set XDG_CACHE_HOME to choose"
            )
    return said


def private_directory(path: Path) -> bool:
    """Create a directory with mode 0700 unless it exists. Return False if it cannot be created, is a link, belongs to somebody else, or is
    open to others.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        seen = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not stat.S_IMODE(seen.st_mode) & 0o077


def _link_models(usual: Path, found: Path) -> None:
    """Link the models of a read-only cache into another one."""
    with contextlib.suppress(OSError):
        if usual.is_absolute() and usual.stat().st_uid in (os.getuid(), 0):
            for each in usual.iterdir():
                if (each / "config.json").is_file() and not (found / each.name).exists():
                    (found / each.name).symlink_to(each)


def _user_temporary() -> Path | None:
    """Return this user's directory in the shared directory for temporary files."""
    try:
        return Path(tempfile.gettempdir()).absolute() / f"{_NAME}-{os.getuid()}"
    except FileNotFoundError:
        return None


def _trusted(place: Path, *, links: bool) -> bool:
    """Return True if `place` is, or can be made, a directory writable by us but not by other users. `links`: it may be a symbolic link."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = place.stat() if links else place.lstat()
        if not stat.S_ISDIR(seen.st_mode) or not os.access(place, os.W_OK | os.X_OK):
            return False
        if seen.st_uid == os.getuid():
            place.chmod(stat.S_IMODE(seen.st_mode) & (0o755 if links else 0o700))
            return True
        return links and seen.st_uid == 0 and not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    except OSError:
        return False
