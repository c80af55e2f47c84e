"""The file systems that pid 1 of a gVisor sandbox mounts: one size-limited tmpfs for everything that programs write, and the workspace.

`/.box` belongs to pid 1, and no program can enter it. It contains the host's mounts (`code`, `layers`) and:

    own/    the size-limited tmpfs: f (the initial files), up and work (the workspace's writable layer), tmp, shm
    base/   the workspace as it was at the start, for comparison
    proc/   pid 1's own /proc, whether or not programs have one
    pids/   gVisor's control groups, one for each program (`programs.py`)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from dataclasses import dataclass, fields
from typing import Any

from kernel import AT_FDCWD, MS_BIND, MS_RDONLY, call, mount, step

BOX = "/.box"
OWN, BASE = f"{BOX}/own", f"{BOX}/base"
GROUPS, PROC = f"{BOX}/pids", f"{BOX}/proc"
# header of a file packed by `pack_files` in ../../spec_validation.py: length of the name, mode, length of the content
FILE = struct.Struct("<IIQ")
NO_AUTOMOUNT, STATX = 0x800, {"x86_64": 332, "aarch64": 291}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """The host's settings for the sandbox. `memory` and `disk` are in bytes; `layers` is the number of layers.

    `owner` is the uid that programs run as. With `alone`, /proc is empty, so programs see no processes, not even their own.
    """

    workdir: str
    layers: int
    owner: int
    memory: int
    disk: int
    processes: int
    open_files: int
    alone: bool
    filter: bytes

    @classmethod
    def read(cls, request: dict[str, Any]) -> SandboxSettings:
        """Parse the settings from a message."""
        given: dict[str, Any] = {each.name: request[each.name] for each in fields(cls)}
        given["filter"] = bytes.fromhex(request["filter"])
        return cls(**given)


def unpack_files(blob: bytes, below: str, owner: int) -> None:
    """Unpack files into `below`, a directory that nobody else can reach yet."""
    at = 0
    while at < len(blob):
        length, mode, size = FILE.unpack_from(blob, at)
        at += FILE.size
        path = os.fsdecode(blob[at : at + length])
        at += length + 1
        parent = below
        for part in path.split("/")[:-1]:
            parent = f"{parent}/{part}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, 0o755)
                os.chown(parent, owner, owner)
        with open(f"{below}/{path}", "wb", opener=lambda name, flags, mode=mode: os.open(name, flags, mode)) as file:
            file.write(blob[at : at + size])
            os.fchown(file.fileno(), owner, owner)
        at += size


def _make(name: str, mode: int, owner: int) -> None:
    os.mkdir(f"{OWN}/{name}")
    os.chown(f"{OWN}/{name}", owner, owner)
    os.chmod(f"{OWN}/{name}", mode)


def lay_out(settings: SandboxSettings, files: bytes) -> None:
    """Mount the workspace and everything else that programs may write to. Raises StepError, which names the step."""
    os.umask(0)
    with step("mount the tmpfs"):
        os.mkdir(OWN)
        mount("tmpfs", OWN, "tmpfs", 0, f"size={settings.disk},mode=755")
        for name, mode in (("f", 0o755), ("up", 0o755), ("work", 0o700), ("tmp", 0o1777), ("shm", 0o1777)):
            _make(name, mode, settings.owner)
    with step("write the files"):
        unpack_files(files, f"{OWN}/f", settings.owner)
    lowers = ":".join([f"{OWN}/f", *(f"{BOX}/layers/{number}" for number in reversed(range(settings.layers)))])
    with step("mount the workspace"):
        data = f"lowerdir={lowers},upperdir={OWN}/up,workdir={OWN}/work"
        mount("overlay", settings.workdir, "overlay", 0, data)
    with step("mount the workspace's original state"):
        os.mkdir(BASE)
        if settings.layers:
            mount("overlay", BASE, "overlay", 0, f"lowerdir={lowers}")
        else:
            mount(f"{OWN}/f", BASE, None, MS_BIND)
    with step("mount /tmp and /dev/shm"):
        mount(f"{OWN}/tmp", "/tmp", None, MS_BIND)
        mount(f"{OWN}/shm", "/dev/shm", None, MS_BIND)


def build(settings: SandboxSettings, files: bytes) -> None:
    """Mount all file systems. Raises StepError, which names the step."""
    lay_out(settings, files)
    with step("give /dev to nobody"):
        os.chown("/dev", os.getuid(), os.getgid())
    with step("mount /proc"):
        os.mkdir(PROC)
        mount("proc", PROC, "proc", 0)
        if settings.alone:
            mount("none", "/proc", "tmpfs", MS_RDONLY, "mode=555")
    with step("mount the control groups"):
        os.mkdir(GROUPS)
        mount("none", GROUPS, "cgroup", 0, "pids")


def has_statx() -> bool:
    """Return False if `statx` refuses a flag that coreutils' `ls` and `stat` use, as in releases of gVisor before 2023."""
    room = ctypes.create_string_buffer(256)
    try:
        call("syscall", ctypes.c_long(STATX[os.uname().machine]), AT_FDCWD, b"/", NO_AUTOMOUNT, 0x7FF, room)
    except (OSError, KeyError):
        return False
    return True
