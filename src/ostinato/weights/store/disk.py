"""Durable files in a directory that many processes share: temporary file, fsync, rename, fsync of the directory.

A process killed at any instant leaves whole files. Locks are held by open files, so a killed process releases them.

A new file or directory gives nobody more than the directory that it is made in. Lock files are their owner's alone, because whoever can
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
    """The system calls of a durable change, one method each, so that a test can make any of them fail."""

    def create(self, path: Path) -> int:
        """A new file, open for writing; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _mode(path.parent) & 0o666)

    def write(self, fd: int, data: memoryview) -> int:
        """Write some of `data`; returns how much."""
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """Force a file or directory to the device."""
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Put `source` in the place of `target`, atomically."""
        os.replace(source, target)

    def mkdir(self, path: Path) -> None:
        """Make one directory; it may exist."""
        path.mkdir(mode=_mode(path.parent), exist_ok=True)

    def touch(self, path: Path) -> None:
        """Set the file's time to now, on the clock of its file system."""
        os.utime(path)

    def unlink(self, path: Path) -> None:
        """Remove a file; it must exist."""
        path.unlink()


def write_new(disk: Disk, path: Path, data: bytes | memoryview) -> None:
    """Write a file that does not exist, and force it to the device."""
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
    """Files under `root` that are written whole or not at all. `root` must hold `tmp/`.

    Raises (all methods that write): Unavailable if another process holds a lock for longer than `lock_wait_s` seconds.
    """

    def __init__(self, root: Path, disk: Disk, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._root = root
        self._lock_wait_s = lock_wait_s
        self.disk = disk
        self._serial = itertools.count()

    def write(self, path: Path, data: bytes | memoryview) -> None:
        """Temporary file, fsync, rename. The caller syncs the directory."""
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
        """Reset a file's age, so that a collector that saw its old age does not remove it. False if it is missing or not writable."""
        try:
            with self.locked("ages.lock", fcntl.LOCK_SH):
                self.disk.touch(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False
        return True

    def remove(self, path: Path, stamp: str | None) -> bool:
        """Remove a file durably; with `stamp`, only if it was neither written nor renewed since. False if it stays or is missing."""
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
        """The time in nanoseconds on the file system's clock, read from a file made for this purpose, or from the lock's if the disk takes
        none.
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
        """Make `path` and the parents that are missing; each is durable in its parent."""
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
        """Hold a lock between processes: `how` is LOCK_SH or LOCK_EX, with LOCK_NB to not wait.

        Raises Unavailable, naming the holder, if the lock stays taken; BlockingIOError at once with LOCK_NB.
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
    """Take a lock file of an earlier version from other users."""
    seen = os.fstat(fd)
    if seen.st_mode & 0o077 and seen.st_uid == os.getuid():
        os.fchmod(fd, 0o600)


def _holder(fd: int) -> str:
    """Who holds a lock on this open file, for people."""
    seen = os.fstat(fd)
    name = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}:{seen.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:  # not Linux, or a system that hides it
        lines = []
    # "1: FLOCK  ADVISORY  WRITE 4711 fe:00:5694139 0 EOF"; one that waits has "->" as its second word
    held = (line.split() for line in lines)
    pids = sorted({int(words[4]) for words in held if len(words) > 5 and words[1] == "FLOCK" and words[5] == name})
    known = [str(pid) for pid in pids if pid > 0]  # others are outside this container
    return f"process {' and '.join(known)}" if known else "another process"


def stamp_of(stat: os.stat_result) -> str:
    """A stamp that changes whenever the file is written or renewed."""
    return f"{stat.st_mtime_ns}.{stat.st_ino}"


@contextlib.contextmanager
def storage_refusals(doing: str) -> Generator[None]:
    """Turn a disk's `REFUSALS` into StorageFull; other OS errors are not changed."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS or isinstance(error, StorageFull):
            raise
        raise StorageFull(
            f"{doing}: {os.strerror(error.errno or 0)}. Nothing was acknowledged; free some space and try again"
        ) from error


def unread(name: str, error: OSError) -> Corrupt | Unavailable:
    """The error for an object that cannot be read: Unavailable if that says nothing about what is stored."""
    if error.errno in EXHAUSTED:
        return Unavailable(f"object {name} cannot be read now: {error}. Raise the limit (ulimit -n), or free memory")
    return Corrupt(f"object {name} cannot be read: {error}. Restore it from a copy, or publish the version again")
