"""Roles of a run, such as its trainer: each is held by one process at a time, on one machine or on many.

Two implementations: operating-system locks in the run's directory (here), and leases in Postgres (`postgres/leases.py`). With file locks a
store has at most one server and one trainer; the operating system releases a lock when its process dies.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID

from ostinato.core.errors import BadConfig, Conflict, StorageFull

# ---------------------------------------------------------------- file locks


@contextmanager
def hold(directory: Path, role: str, *, wait_s: float = 0.0) -> Generator[Path]:
    """Hold the lock `<directory>/.<role>.lock` while the block runs; yields its path.

    The lock belongs to the open file; programs started while it is held do not inherit it. The file is not removed afterwards, because
    two processes could then lock two files of the same name. A symbolic link in its place is not followed: writing the pid would
    overwrite whatever it points to.

    Raises:
        Conflict: another process holds the lock after `wait_s` seconds of trying; the message names its pid.
        BadConfig: `role` is not a plain name.
        StorageFull: the directory or the file could not be written; the message names the owner of another user's file.

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
        if isinstance(error, PermissionError) and (owner := _other_owner(path)) is not None:
            raise StorageFull(
                f"cannot open {path}: {error}; it belongs to user {owner}: give it and their other files in {directory} to user "
                f"{os.geteuid()} (chown)"
            ) from error
        raise StorageFull(f"cannot create {path}: {error}; make the directory writable") from error
    try:
        _acquire(descriptor, path, role, wait_s)
        yield path
    finally:
        os.close(descriptor)


def _other_owner(path: Path) -> int | None:
    """Return the uid of a file's owner; None if it is this process's own user, or the file is missing or cannot be inspected."""
    try:
        owner = path.lstat().st_uid
    except OSError:
        return None
    return owner if owner != os.geteuid() else None


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


# ---------------------------------------------------------------- roles


@dataclass(frozen=True, slots=True, kw_only=True)
class FencingToken:
    """A token that every write of a role carries; only writes with the newest holder's token are accepted.

    `number` rises with each holder. `mark` is unique to the holder, because a database failover may lose a number and assign it again.

    Example: ``FencingToken(role="train", number=7, mark=uuid4())``
    """

    role: str
    number: int
    mark: UUID


class Tenure(Protocol):
    """One process's right to act in a role, until `close`."""

    @property
    def token(self) -> FencingToken | None:
        """The token that its writes carry; None where no other process can take the role while this one lives."""
        ...

    @property
    def lost(self) -> bool:
        """True once this process has learnt that another has the role. Makes no request."""
        ...

    def check(self) -> None:
        """Ask whether the role is still held. Raises LeaseLost if another process has it, Unavailable if there is no answer."""
        ...

    def close(self) -> None:
        """Release the role, so that another process can take it at once."""
        ...


class Roles(Protocol):
    """The roles of one run."""

    @property
    def pass_on(self) -> bool:
        """True if a waiting process takes over a role whose holder dies or pauses, so that a second process can be a standby."""
        ...

    def take(self, role: str) -> Tenure:
        """Take a role. Raises Conflict, naming the holder, if another process has it; BadConfig unless it is a plain lower-case name."""
        ...


class FileRoles:
    """Roles in a run's directory, for the processes of one machine. A holder that pauses keeps its role.

    Example: ``with closing(FileRoles(run).take("train")): ...``
    """

    pass_on = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def take(self, role: str) -> FileTenure:
        """Take a role. Raises like `hold`."""
        return FileTenure(self._directory, role)


class FileTenure:
    """A role held by an operating-system lock, which no other process can get while this one lives."""

    token = None
    lost = False

    def __init__(self, directory: Path, role: str) -> None:
        self._held = ExitStack()
        self._held.enter_context(hold(directory, role))

    def check(self) -> None:
        """Always passes, because the role cannot be lost."""

    def close(self) -> None:
        """Release the lock. May be called twice."""
        self._held.close()
