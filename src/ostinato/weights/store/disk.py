"""Durable, atomic file writes in a directory that many processes share: temporary file, fsync, rename, fsync of the directory.

A process killed at any instant leaves whole files. Locks (flock) are held by open files, so a killed process releases them.

New files and directories grant no more permissions than their parent directory. Only their owner may open lock files, because whoever can
open one can hold it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

from ostinato.core.errors import Corrupt, StorageFull, Unavailable
from ostinato.core.files import EXHAUSTED, REFUSALS

LOCK_WAIT_S: Final = 10.0
"""How long a call waits for a lock before it raises Unavailable."""

_RETRY_S: Final = 0.01


class Disk:
    """The system calls of a durable write, one method each, so that a test can make any of them fail."""

    def create(self, path: Path) -> int:
        """Create a file, which must not exist. Returns a descriptor open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _mode(path.parent) & 0o666)

    def write(self, fd: int, data: memoryview) -> int:
        """Write some of `data`. Returns the number of bytes written."""
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """Force a file or directory to the device."""
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` by `source`, atomically."""
        os.replace(source, target)

    def mkdir(self, path: Path) -> None:
        """Create a directory, which may exist already."""
        path.mkdir(mode=_mode(path.parent), exist_ok=True)

    def touch(self, path: Path) -> None:
        """Set the file's mtime to now, on the clock of its file system."""
        os.utime(path)

    def unlink(self, path: Path) -> None:
        """Remove a file, which must exist."""
        path.unlink()


def write_new(disk: Disk, path: Path, data: bytes | memoryview) -> None:
    """Write a file, which must not exist, and fsync it."""
    fd = disk.create(path)
    try:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[disk.write(fd, rest) :]
        disk.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(disk: Disk, path: Path) -> None:
    """Make renames and removals in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        disk.fsync(fd)
    finally:
        os.close(fd)


class AtomicFiles:
    """Atomic writes of files under `root`, which must hold the directory `tmp/`.

    Raises (all methods that write): Unavailable if another process holds a lock for longer than `lock_wait_s` seconds.
    """

    def __init__(self, root: Path, disk: Disk, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._root = root
        self._lock_wait_s = lock_wait_s
        self.disk = disk
        self._serial = itertools.count()

    def write(self, path: Path, data: bytes | memoryview) -> None:
        """Write a file atomically: temporary file, fsync, rename. The caller must sync the directory."""
        with self.locked("tmp.lock", fcntl.LOCK_SH):
            temporary = self._temporary()
            try:
                write_new(self.disk, temporary, data)
                with self.locked("ages.lock", fcntl.LOCK_SH):
                    self.disk.rename(temporary, path)
            except (OSError, Unavailable):
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise

    def renew(self, path: Path) -> bool:
        """Reset a file's age, so that a collector that saw its old age does not remove it. Returns False if it is missing or not
        writable.
        """
        try:
            with self.locked("ages.lock", fcntl.LOCK_SH):
                self.disk.touch(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False
        return True

    def remove(self, path: Path, stamp: str | None) -> bool:
        """Remove a file durably; with `stamp`, only if it was neither written nor renewed since. Returns False if it stays or is
        missing.
        """
        try:
            with self.locked("ages.lock", fcntl.LOCK_EX):
                if stamp is not None and stamp_of(path.stat()) != stamp:
                    return False
                self.disk.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        self.sync_directory(path.parent)
        return True

    def now(self) -> int:
        """Return the time in nanoseconds on the file system's clock, read from a file created for this purpose, or from the lock file if
        the disk takes no new file.
        """
        lock = self._root / "tmp.lock"
        with self.locked(lock.name, fcntl.LOCK_SH):
            probe = self._temporary()
            try:
                os.close(self.disk.create(probe))
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                self.disk.touch(lock)
                return lock.stat().st_mtime_ns
            try:
                return probe.stat().st_mtime_ns
            finally:
                probe.unlink()

    def directory(self, path: Path) -> None:
        """Create `path` and its missing parents, each durable in its parent."""
        if path.is_dir():
            return
        if not path.parent.exists():
            self.directory(path.parent)
        self.disk.mkdir(path)
        self.sync_directory(path.parent)

    def sync_directory(self, path: Path) -> None:
        """Make renames and removals in a directory durable."""
        sync_directory(self.disk, path)

    @contextlib.contextmanager
    def locked(self, name: str, how: int) -> Generator[None]:
        """Hold a lock between processes. `how` is LOCK_SH or LOCK_EX, combined with LOCK_NB to not wait.

        Raises Unavailable, naming the holder, if the lock stays taken; with LOCK_NB, BlockingIOError at once.
        """
        path = self._root / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _make_private(fd)
            self._acquire(fd, path, how)
            yield
        finally:
            os.close(fd)  # releases the lock

    def _acquire(self, fd: int, path: Path, how: int) -> None:
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if how & fcntl.LOCK_NB:
                    raise
                if time.monotonic() >= deadline:
                    raise Unavailable(
                        f"{path} was locked for {self._lock_wait_s:g} s by {_holder(fd)}; nothing was changed. End that process if "
                        "it hangs, and try again"
                    ) from error
            time.sleep(_RETRY_S)

    def clear_leftovers(self) -> None:
        """Delete files that killed writers left in tmp/, if no writer is active in any process."""
        with contextlib.suppress(BlockingIOError), self.locked("tmp.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in (self._root / "tmp").iterdir():
                path.unlink(missing_ok=True)

    def _temporary(self) -> Path:
        return self._root / "tmp" / f"{os.getpid()}-{id(self):x}-{next(self._serial)}"


def _mode(directory: Path) -> int:
    return stat.S_IMODE(directory.stat().st_mode) & 0o777


def _make_private(fd: int) -> None:
    """Remove other users' access to a lock file that an earlier version created."""
    status = os.fstat(fd)
    if status.st_mode & 0o077 and status.st_uid == os.getuid():
        os.fchmod(fd, 0o600)


def _holder(fd: int) -> str:
    """Return who holds a lock on this open file, for people."""
    status = os.fstat(fd)
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:  # not Linux, or a system that hides it
        lines = []
    # "1: FLOCK  ADVISORY  WRITE 4711 fe:00:5694139 0 EOF"; a waiting process has "->" as its second word
    locks = (line.split() for line in lines)
    pids = sorted({int(words[4]) for words in locks if len(words) > 5 and words[1] == "FLOCK" and words[5] == name})
    known = [str(pid) for pid in pids if pid > 0]  # processes outside this container have no pid here
    return f"process {' and '.join(known)}" if known else "another process"


def stamp_of(stat: os.stat_result) -> str:
    """Return a stamp that changes whenever the file is written or renewed."""
    return f"{stat.st_mtime_ns}.{stat.st_ino}"


@contextlib.contextmanager
def storage_refusals(doing: str) -> Generator[None]:
    """Map a disk's `REFUSALS` to StorageFull. Other OS errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS or isinstance(error, StorageFull):
            raise
        raise StorageFull(
            f"{doing}: {os.strerror(error.errno or 0)}. Nothing was acknowledged; free some space and try again"
        ) from error


def unread(name: str, error: OSError) -> Corrupt | Unavailable:
    """Return the error for an object that cannot be read: Unavailable if this process's resources are exhausted, else Corrupt."""
    if error.errno in EXHAUSTED:
        return Unavailable(f"object {name} cannot be read now: {error}. Raise the limit (ulimit -n), or free memory")
    return Corrupt(f"object {name} cannot be read: {error}. Restore it from a copy, or publish the version again")
