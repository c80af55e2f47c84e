"""File locks that allow one server and one trainer per store. The operating system releases a lock when its process dies."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ostinato.core.errors import BadConfig, Conflict, StorageFull


@contextmanager
def hold(directory: Path, role: str, *, wait_s: float = 0.0) -> Generator[Path]:
    """Hold the lock `<directory>/.<role>.lock` while the block runs; yields its path.

    The lock belongs to the open file and is not inherited by programs that are started while it is held. The file is not removed
    afterwards, because two processes could then lock two files of the same name. A symbolic link in its place is not followed: the pid
    would overwrite whatever it points to.

    Raises:
        Conflict: another process holds it (after `wait_s` seconds of trying); the message names its pid.
        BadConfig: `role` is not a plain name.
        StorageFull: the directory or the file could not be written.

    Example::

        with hold(store, "serve"):
            run_server()
    """
    check_role(role)
    path = directory / f".{role}.lock"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StorageFull(f"cannot create {path}: {error}; make the directory writable") from error
    try:
        _acquire(descriptor, path, role, wait_s)
        yield path
    finally:
        os.close(descriptor)


def check_role(role: str) -> None:
    """Raise BadConfig unless `role` is a plain lower-case name."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", role):
        raise BadConfig(f"lock role {role!r} must be a plain lower-case name")


def _acquire(descriptor: int, path: Path, role: str, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise Conflict(
                    f"another {role} process (pid {holder}) already uses {path.parent}; "
                    f"stop it (kill {holder}) or use another directory"
                ) from error
            time.sleep(0.01)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise StorageFull(f"cannot write {path}: {error}; free space") from error
