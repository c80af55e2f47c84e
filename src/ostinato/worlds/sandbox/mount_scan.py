"""Searches host directories that programs are shown for what programs must not reach."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator

from ostinato.core.errors import BadRequest


def entries(directory: str, enter: Callable[[os.DirEntry[str]], bool] = lambda _: True) -> Iterator[os.DirEntry[str]]:
    """All entries below a directory that `enter` accepts. Links are not followed, and directories that cannot be listed are skipped."""
    left = [directory]
    while left:
        try:
            with os.scandir(left.pop()) as found:
                for entry in filter(enter, found):
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
        except OSError:
            continue


def roots_own(directory: str) -> list[str]:
    """Files below a directory that belong to root or its group and that others may not read, and such directories that others may not
    read and enter. The contents of those are left out, and `directory` itself is not checked.
    """
    found = list[str]()

    def is_open(entry: os.DirEntry[str]) -> bool:
        if entry.is_symlink():
            return True
        try:
            seen = entry.stat(follow_symlinks=False)
        except OSError:
            return True
        wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(seen.st_mode) else 0)
        if (seen.st_uid and seen.st_gid) or seen.st_mode & wanted == wanted:
            return True
        found.append(entry.path)
        return False

    for _ in entries(directory, is_open):
        pass
    return found


def check_no_socket(directory: str) -> None:
    """Raise BadRequest for a directory with a socket in it: a read-only file system does not keep programs from connecting to it, and
    programs may run as the host user who owns it.
    """
    for entry in entries(directory):
        if entry.is_symlink() or entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
            continue
        try:
            socket = stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
        except OSError:
            continue
        if socket:
            raise BadRequest(
                f"mounts: {directory!r} holds the socket {entry.path!r}, which programs could connect to; show a directory without it",
                field="mounts",
            )
