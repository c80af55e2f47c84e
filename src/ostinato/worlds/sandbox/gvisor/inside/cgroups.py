"""gVisor's own control groups: which processes belong to which program. Neither a process nor its descendants can leave its group.

There is one hierarchy only: gVisor of 2022 charges a task in several of them to one at random, so limits would not hold. Busy programs
delay every system call of pid 1, so files that are read often stay open.
"""

from __future__ import annotations

import contextlib
import os
import signal

from rootfs import GROUPS


def look(fd: int) -> bytes:
    """The current content of an open kernel file."""
    return os.pread(fd, 65536, 0)


def end(pid: int) -> None:
    """Kill a process if it still exists, or a process group if the number is negative."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class ProcessGroup:
    """The processes of one program. Raises OSError if there can be no more groups."""

    def __init__(self, number: int) -> None:
        self._path = f"{GROUPS}/{number}"
        os.mkdir(self._path, 0o700)  # private, since processes in groups made inside it would escape us
        self._members = os.open(f"{self._path}/cgroup.procs", os.O_RDWR)
        self._closed = False

    def join(self) -> None:
        """Move this process into the group."""
        os.pwrite(self._members, str(os.getpid()).encode(), 0)

    def members(self) -> list[int]:
        """The live processes in the group."""
        return [int(pid) for pid in look(self._members).split()]

    def close(self) -> None:
        """Forbid the members to start further processes."""
        if not self._closed:
            self._closed = True
            with open(f"{self._path}/pids.max", "wb", buffering=0) as most:
                most.write(b"0")

    def removed(self) -> bool:
        """Try to remove the group. False while it has members."""
        if self.members():
            return False
        os.close(self._members)
        with contextlib.suppress(OSError):
            os.rmdir(self._path)
        return True
