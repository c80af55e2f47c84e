"""Wrappers of system calls that Python lacks, and errors that name the isolation step that failed."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Generator
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
# the same numbers on every architecture, since Linux 5.2 and 5.12
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_IDMAP = 1, 2, 4, 0x100000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
INSIDE = 1000  # the uid and gid that a program sees

libc = ctypes.CDLL(None, use_errno=True)


class StepError(Exception):
    """An isolation step failed. `report` has the step's name and the kernel's error, as JSON fields."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(f"{step}: {error}")
        where = f" ({error.filename})" if error.filename else ""
        self.report = {"step": step, "error": f"{error.strerror or error}{where}"}


@contextlib.contextmanager
def step(name: str) -> Generator[None]:
    """Turn an OSError in the block into a StepError with the step's name."""
    try:
        yield
    except OSError as error:
        raise StepError(name, error) from error


def call(name: str, *args: Any) -> int:
    """Call a libc function and return its result. Raises OSError for a negative one."""
    result: int = getattr(libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system, or bind-mount a path."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    call("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


def set_attributes(directory: int, path: str, attributes: int, *, users: int = 0, deep: bool = True) -> None:
    """Add attributes to a mount and, if `deep`, to all below it. `users` is a user namespace's descriptor for `ATTR_IDMAP`."""
    attr = (ctypes.c_uint64 * 4)(attributes, 0, 0, users)
    flags = (AT_RECURSIVE if deep else 0) | (0 if path else AT_EMPTY_PATH)
    call(
        "syscall",
        SYS_MOUNT_SETATTR,
        ctypes.c_int(directory),
        path.encode(),
        flags,
        ctypes.byref(attr),
        ctypes.c_size_t(32),
    )


def open_tree(directory: int, path: str) -> int:
    """Return a descriptor of a detached copy of the mount at this path (`OPEN_TREE_CLONE`)."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE | (0 if path else AT_EMPTY_PATH)
    return call("syscall", SYS_OPEN_TREE, ctypes.c_int(directory), path.encode(), flags)


def attach(tree: int, target: str) -> None:
    """Attach a detached mount (from `open_tree`) at `target`."""
    call("syscall", SYS_MOVE_MOUNT, ctypes.c_int(tree), b"", ctypes.c_int(AT_FDCWD), target.encode(), 4)


def write_at(directory: int, path: str, text: str) -> None:
    """Write a small kernel file below an open directory."""
    fd = os.open(path, os.O_WRONLY, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def map_user(proc: int, uid: int, gid: int) -> None:
    """In a fresh user namespace, map INSIDE to `uid` and `gid` outside, and no other user."""
    write_at(proc, "self/setgroups", "deny")
    write_at(proc, "self/uid_map", f"{INSIDE} {uid} 1")
    write_at(proc, "self/gid_map", f"{INSIDE} {gid} 1")
