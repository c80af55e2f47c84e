"""Control groups (cgroups): where permitted, the kernel limits each box's memory and gives all boxes a small share of the processor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

TREE = Path("/sys/fs/cgroup")
SHARES, WEIGHT = 102, 10  # a tenth of an ordinary group's share: 1024 in version 1, 100 in version 2


def own_groups() -> dict[str, str]:
    """Return {controller: path of this process's group}; "" is version 2's single tree. Example: ``{"memory": "/job", "": "/"}``"""
    found: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _parents(paths: dict[str, str]) -> Iterator[Path]:
    """Yield the directories in which a keeper may make its group."""
    for controller in ("cpu", "memory"):
        if controller in paths:
            yield TREE / controller / paths[controller].lstrip("/")
    if "" in paths:
        place = TREE / paths[""].lstrip("/")
        yield from (place, place.parent)


def _removed(group: Path) -> bool:
    """Try to remove a group and its boxes' groups. Return False while the kernel still uses one of them."""
    try:
        for box in group.iterdir():
            if re.fullmatch(r"b\d+", box.name):
                box.rmdir()
        group.rmdir()
    except FileNotFoundError:
        return not group.exists()
    except OSError:
        return False
    return True


def sweep_groups(*, tries: int = 1) -> None:
    """Remove the groups that killed keepers left behind. A live keeper holds a lock on each of its groups."""
    for place in _parents(own_groups()):
        for group in place.glob("ostinato-*"):
            with contextlib.suppress(OSError):
                lock = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    for left in reversed(range(tries)):
                        if _removed(group):
                            break
                        time.sleep(0.01 if left else 0.0)
                finally:
                    os.close(lock)


class ControlGroups:
    """A keeper's groups: one for all boxes in each writable tree, below this process's group (in version 2 also beside it).

    Creating them first removes groups left by killed keepers; `close` removes them. `memory` is the directory in which every box gets its
    own group, and `version` is 1 or 2; they are None and 0 if memory cannot be counted.
    """

    def __init__(self, *, gives_way: bool = True) -> None:
        self._gives_way = gives_way
        self.memory: Path | None = None
        self.version = 0
        self.shares = False
        self._made: dict[Path, int] = {}  # group -> descriptor that holds its lock
        self._previous: Path | None = None
        self._name = f"ostinato-{os.getpid()}"
        paths = own_groups()
        sweep_groups()
        with contextlib.suppress(OSError):
            self._make_version_1(paths)
        with contextlib.suppress(OSError):
            self._make_version_2(paths)

    def _make(self, parent: Path) -> Path:
        made = parent / self._name
        while True:
            made.mkdir()
            with contextlib.suppress(FileNotFoundError):  # another keeper swept it before it was locked
                lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if made.exists():
                    self._made[made] = lock
                    return made
                os.close(lock)

    def _make_version_1(self, paths: dict[str, str]) -> None:
        if "cpu" in paths and self._gives_way:
            with contextlib.suppress(OSError):
                group = self._make(TREE / "cpu" / paths["cpu"].lstrip("/"))
                (group / "cpu.shares").write_text(str(SHARES))
                (group / "cgroup.procs").write_text("0")
                self._previous, self.shares = group.parent, True
        if "memory" in paths:
            self.memory = self._make(TREE / "memory" / paths["memory"].lstrip("/"))
            self.version = 1

    def _make_version_2(self, paths: dict[str, str]) -> None:
        """Make the version 2 group. Such a group holds processes or groups, not both, so the parent must delegate memory to its groups."""
        if self.version or "" not in paths:
            return
        parent = TREE / paths[""].lstrip("/")
        for place in (parent, parent.parent):
            control = place / "cgroup.subtree_control"
            if place == TREE.parent or not control.exists():
                continue
            with contextlib.suppress(OSError):
                if "memory" not in control.read_text().split():
                    control.write_text("+memory")
                group = self._make(place)
                (group / "cgroup.subtree_control").write_text("+memory")
                with contextlib.suppress(OSError):
                    if self._gives_way:
                        (group / "cpu.weight").write_text(str(WEIGHT))
                        self.shares = True
                self.memory, self.version = group, 2
                return

    def give(self, uid: int) -> None:
        """Let another user create groups in the memory group."""
        if self.memory is not None:
            for path in (self.memory, self.memory / "cgroup.procs"):
                os.chown(path, uid, uid)

    def close(self) -> None:
        """Remove the groups, with retries: the kernel releases a group only a while after its last process ended, seconds if busy."""
        if self._previous is not None:
            with contextlib.suppress(OSError):
                (self._previous / "cgroup.procs").write_text("0")
        for made, lock in reversed(self._made.items()):
            for _ in range(800):
                if _removed(made):
                    break
                time.sleep(0.01)
            os.close(lock)
        self._made.clear()

    def release_locks(self) -> None:
        """Close the locks' descriptors in a fork, so that only the keeper holds the locks."""
        for lock in self._made.values():
            os.close(lock)
        self._made.clear()
