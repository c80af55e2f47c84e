"""Reads and writes single files of the workspace. No link leads out of it, unless a program swaps links meanwhile. Therefore this runs
as the programs' own user without privileges (`act_as_owner` in program_exec.py): a swapped link only reaches what the program itself can.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat


def _inside(path: str, workdir: str) -> str:
    """A path with its links resolved. Raises OSError if it lies outside the workspace."""
    found = os.path.realpath(path)
    if found != workdir and not found.startswith(f"{workdir}/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    return found


def read_file(workdir: str, name: str, most: int) -> bytes:
    """At most `most` + 1 bytes of a regular file. Raises OSError."""
    fd = os.open(_inside(f"{workdir}/{name}", workdir), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return file.read(most + 1)


def _parent(workdir: str, parts: list[str]) -> str:
    """The parent directory of a path, with missing directories created."""
    at = workdir
    for part in parts:
        at = f"{at}/{part}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(at, 0o755)
        at = _inside(at, workdir)
    return at


def replace_file(workdir: str, name: str, data: bytes) -> None:
    """Replace a file atomically: written beside it, then renamed over it, so that nobody sees half of it. Raises OSError."""
    *above, last = name.split("/")
    parent = _parent(workdir, above)
    target, partial = f"{parent}/{last}", f"{parent}/.{secrets.token_hex(8)}"
    mode = 0o644
    with contextlib.suppress(FileNotFoundError):
        seen = os.lstat(target)
        if stat.S_ISDIR(seen.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        mode = stat.S_IMODE(seen.st_mode) & 0o777 if stat.S_ISREG(seen.st_mode) else mode
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            os.fchmod(fd, mode)
        os.rename(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
