"""Memory that this process may still allocate: the smallest of the limits set by the machine, a container and a shell."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
_UNLIMITED = 1 << 60  # cgroup v1 reports no limit as a number above this
_OUT_OF_MEMORY = re.compile(
    r"(can't|cannot|failed to|unable to) allocate|not enough memory|out of memory|bad_alloc", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that may still be allocated, and the limit behind that number.

    Example: ``Room(size=3 << 30, bound="the control group's memory.max")``
    """

    size: int
    bound: str


def free_memory(root: Path = Path("/")) -> Room | None:
    """Return the memory that the machine and this process's control groups (v1 and v2) have left for all processes; None if unknown.

    `root`: the directory that contains `proc` and `sys`.
    """
    return min([*_machine_room(root), *_cgroup_rooms(root, whole=False)], key=_size, default=None)


def process_limit(root: Path = Path("/")) -> Room | None:
    """Return the memory that this process can get if others take little: its address space limit, or its control groups' whole memory.

    None if it has no limit. `root` as for `free_memory`.
    """
    return min([*_address_space_room(root), *_cgroup_rooms(root, whole=True)], key=_size, default=None)


def address_space_limited() -> bool:
    """Return True under `ulimit -v`: an allocation that failed once fails at the next start, too."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def is_short(error: BaseException) -> bool:
    """Return True for the errors that Python, torch, numba and the kernel raise when memory is short."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError | RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))
    )


def in_gib(size: float) -> str:
    """Format a number of bytes for people. Example: ``in_gib(3 << 29) == "1.5 GiB"``"""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.0f} MiB"


def _size(room: Room) -> int:
    return room.size


def _machine_room(root: Path) -> Iterable[Room]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield Room(size=int(line.split()[1]) << 10, bound="what the machine has available")


def _address_space_room(root: Path) -> Iterable[Room]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _lines(root / "proc/self/statm")
    if limit != resource.RLIM_INFINITY and taken:
        used = int(taken[0].split()[0]) * resource.getpagesize()
        yield Room(
            size=max(0, limit - used), bound=f"the address space limit (ulimit -v) of {in_gib(limit)} per process"
        )


def _cgroup_rooms(root: Path, *, whole: bool) -> Iterable[Room]:
    """Yield the room of this process's control groups and their parents: what is left, or with `whole` their whole limits."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = top / path.strip("/")
        for group in (own, *(each for each in own.parents if each.is_relative_to(top))):
            limit, used = _number(group / names[0]), _number(group / names[1])
            if limit is not None and used is not None and limit < _UNLIMITED:
                freed = next(
                    (int(each.split()[1]) for each in _lines(group / "memory.stat") if each.startswith(f"{names[2]} ")),
                    0,
                )
                size = limit if whole else max(0, limit - max(0, used - freed))
                yield Room(size=size, bound=f"the control group's limit of {in_gib(limit)}")


def _number(file: Path) -> int | None:
    with contextlib.suppress(ValueError, IndexError):
        return int(_lines(file)[0])
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
