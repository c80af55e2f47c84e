"""gVisor's own control groups: which processes belong to which program. A process cannot leave its group, nor can what it starts.

There is one hierarchy only: a task in several is charged in one of them, at random, so that limits would not hold (gVisor of 2022).
Beside busy programs each system call of pid 1 waits its turn: files that are read often stay open.
"""

from __future__ import annotations

import contextlib
import os
import signal

from place import GROUPS


def look(fd: int) -> bytes:
    """What a file of the kernel's says now."""
    return os.pread(fd, 65536, 0)


def end(pid: int) -> None:
    """Kill a process, if it is still there; a process group, if the number is negative."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Group:
    """The processes of one program. Raises OSError if there can be no more groups."""

    def __init__(self, number: int) -> None:
        self._path = f"{GROUPS}/{number}"
        os.mkdir(self._path, 0o700)  # who makes groups in it takes processes out of our sight
        self._members = os.open(f"{self._path}/cgroup.procs", os.O_RDWR)
        self._closed = False

    def join(self) -> None:
        """Take this process in."""
        os.pwrite(self._members, str(os.getpid()).encode(), 0)

    def members(self) -> list[int]:
        """Those that live."""
        return [int(pid) for pid in look(self._members).split()]

    def close(self) -> None:
        """From now on none of them can start another."""
        if not self._closed:
            self._closed = True
            with open(f"{self._path}/pids.max", "wb", buffering=0) as most:
                most.write(b"0")

    def removed(self) -> bool:
        """True once it is gone; it cannot be while there are members."""
        if self.members():
            return False
        os.close(self._members)
        with contextlib.suppress(OSError):
            os.rmdir(self._path)
        return True
