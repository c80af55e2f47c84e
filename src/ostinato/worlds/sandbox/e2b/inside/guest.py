"""Pid 1 of an E2B sandbox: does what pid 1 of a gVisor sandbox does, with namespaces and control groups of the virtual machine.

Programs run as a user of their own, who owns the workspace and nothing else. Their only network is their own loopback, whatever the
machine has, and the machine's files are read-only for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import socket
import struct
from typing import Any

import kernel as k
from programs import ProcessGroup, Programs, end, look
from rootfs import BOX, GROUPS, OWN, PROC, SandboxSettings, lay_out
from serve import SandboxServer

ALL_GROUPS, PORTS = f"{BOX}/groups", f"{BOX}/ports"
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
QUIET = k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC
RLIMITS = ((resource.RLIMIT_NOFILE, 4096), (resource.RLIMIT_CORE, 0))


class Herd(ProcessGroup):
    """A cgroup v2 group, whose processes are all killed at once."""

    def join(self) -> None:
        with open(f"{PROC}/self/oom_score_adj", "w") as score:
            score.write("500")  # to be killed before pid 1, whose score is negative
        super().join()

    def close(self) -> None:
        with open(f"{self._path}/cgroup.kill", "wb", buffering=0) as kill:
            kill.write(b"1")


class GuestPrograms(Programs):
    """All programs of the sandbox. No watch is needed if the kernel counts their memory."""

    group = Herd

    def __init__(self, *given: Any, counts: bool) -> None:
        self._counts = counts
        super().__init__(*given)

    def look(self) -> float | None:
        if self._counts:
            self._kills = ended_for_memory()
        return super().look()

    def _keep_memory(self) -> None:
        """Kill the largest processes while the memory of all, plus what the sandbox's file system holds, exceeds the limit."""
        if self._counts:
            return
        groups = [*(program.group for program in self._running.values()), *self._left]
        most = self.settings.memory - self._in_use()
        sizes = sorted((held(pid), pid) for group in groups for pid in group.members())
        if sum(size for size, _ in sizes) > most:  # what programs share was counted for each of them
            sizes = sorted((min(size, held(pid, shared=False) or held(pid)), pid) for size, pid in sizes)
        over = sum(size for size, _ in sizes) - most
        while over > 0 and sizes:
            size, pid = sizes.pop()
            end(pid)
            self._kills += 1
            over -= size

    def _in_use(self) -> int:
        space = os.statvfs(OWN)
        return (space.f_blocks - space.f_bfree) * space.f_frsize


def held(pid: int, *, shared: bool = True) -> int:
    """Memory of a process in bytes. Shared memory counts in full, or else as the process's part of it, which takes longer to find out."""
    file, names = ("status", ("RssAnon:", "RssShmem:")) if shared else ("smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
    with contextlib.suppress(OSError), open(f"{PROC}/{pid}/{file}") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))
    return 0


def ended_for_memory() -> int:
    """How many processes of the sandbox the kernel has killed for lack of memory."""
    fd = os.open(f"{GROUPS}/memory.events", os.O_RDONLY)
    try:
        found = dict(line.split() for line in look(fd).splitlines())
    finally:
        os.close(fd)
    return int(found[b"oom_kill"])


class Guest(SandboxServer):
    """Answers the host. `place` is the directory where the host put the sandbox's layers, mounts and files."""

    def __init__(self, line: socket.socket, place: str) -> None:
        super().__init__(line)
        self._place = place

    def _prepared(
        self, settings: SandboxSettings, told: dict[str, Any], data: bytes
    ) -> tuple[Programs, dict[str, Any]]:
        seclude()
        show(settings, self._place, told["mounts"])
        files = b""
        with contextlib.suppress(FileNotFoundError), open(f"{self._place}/files", "rb") as file:
            files = file.read()
        lay_out(settings, files)
        with k.step("name the programs' user"):
            name_user(settings.owner)
        counts = make_groups(settings)
        os.umask(0o077)
        for what, most in RLIMITS:
            resource.setrlimit(what, (most, most))
        programs = GuestPrograms(settings, self._selector, self._say, counts=counts)
        if settings.alone:
            with k.step("hide /proc"):
                k.mount("none", "/proc", "tmpfs", QUIET | k.MS_RDONLY)
        return programs, {"counts": counts}

    def _listen(self, port: int) -> None:
        self._serve_port(port, lambda: reached(f"{PORTS}/{port}"))


def reached(path: str) -> socket.socket | None:
    """A connection to the socket at `path`, or None if nothing listens there."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.connect(path)
    except OSError:
        made.close()
        return None
    return made


def seclude() -> None:
    """Leave the machine's mount, network, IPC and host name namespaces. Raises StepError."""
    with k.step("make the namespaces"):
        k.call("unshare", k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS)
        k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
        socket.sethostname("workspace")
    with k.step("open the loopback"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def show(settings: SandboxSettings, place: str, mounts: list[str]) -> None:
    """Make the machine's files read-only, and mount what the host sent where it belongs. Raises StepError."""
    os.umask(0o022)
    with k.step("make the places of the workspace and the mounts"):
        for path in (BOX, settings.workdir, *mounts):
            os.makedirs(path, exist_ok=True)
        for number, path in enumerate(mounts):
            k.mount(f"{place}/mounts/{number}", path, None, k.MS_BIND)
    with k.step("make all files read-only (Linux 5.12)"):
        k.set_attributes(k.AT_FDCWD, "/", k.ATTR_RDONLY | k.ATTR_NOSUID)
    with k.step("mount the layers"):
        k.mount("tmpfs", BOX, "tmpfs", k.MS_NOSUID | k.MS_NODEV, "size=4m,mode=700")
        os.mkdir(PROC)
        k.mount("proc", PROC, "proc", QUIET)
        k.mount("proc", "/proc", "proc", QUIET)
        for source, target in (
            (f"{place}/ports", PORTS),
            *((f"{place}/layers/{number}", f"{BOX}/layers/{number}") for number in range(settings.layers)),
        ):
            os.makedirs(target)
            k.mount(source, target, None, k.MS_BIND)


def name_user(number: int) -> None:
    """Give the user that programs run as a name in the /etc/passwd and /etc/group that programs see."""
    for name, line in (("passwd", f"user:x:{number}:{number}::/tmp:/bin/sh\n"), ("group", f"user:x:{number}:\n")):
        kept: list[str] = []
        with contextlib.suppress(FileNotFoundError), open(f"/etc/{name}") as file:
            kept = [each for each in file if not each.startswith("user:")]
        with open(f"{BOX}/{name}", "w") as file:
            file.write("".join(kept) + line)
        os.chmod(f"{BOX}/{name}", 0o644)
        k.mount(f"{BOX}/{name}", f"/etc/{name}", None, k.MS_BIND)


def make_groups(settings: SandboxSettings) -> bool:
    """Make a control group for all programs, with one for each in it. True if the kernel counts memory in it. Raises StepError."""
    with k.step("mount the control groups"):
        os.mkdir(ALL_GROUPS)
        k.mount("none", ALL_GROUPS, "cgroup2", QUIET)
        for controller in ("memory", "pids"):
            with contextlib.suppress(OSError):
                k.write_at(k.AT_FDCWD, f"{ALL_GROUPS}/cgroup.subtree_control", f"+{controller}")
        own = f"{ALL_GROUPS}/ostinato-{secrets.token_hex(8)}"
        os.mkdir(own)
        os.mkdir(GROUPS)
        k.mount(own, GROUPS, None, k.MS_BIND)
    with k.step("end programs by their control group (Linux 5.14)"):
        os.close(os.open(f"{GROUPS}/cgroup.kill", os.O_WRONLY))
    with contextlib.suppress(OSError):
        k.write_at(k.AT_FDCWD, f"{GROUPS}/pids.max", str(settings.processes))
    try:
        k.write_at(k.AT_FDCWD, f"{GROUPS}/memory.max", str(settings.memory))
    except OSError:
        return False
    with contextlib.suppress(OSError):
        k.write_at(k.AT_FDCWD, f"{GROUPS}/memory.swap.max", "0")
    return True
