"""Pid 1 of an E2B sandbox: the gVisor sandbox's pid 1, adapted to namespaces and control groups of the virtual machine.

Programs run as a separate user, who owns the workspace and nothing else. Their only network is their own loopback, whatever network the
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
from programs import ProcessGroup, Programs, kill, read_open
from rootfs import BOX, GROUPS, OWN, PROC, SandboxSettings, lay_out
from serve import SandboxServer

ALL_GROUPS, PORTS = f"{BOX}/groups", f"{BOX}/ports"
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
QUIET = k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC
RLIMITS = ((resource.RLIMIT_NOFILE, 4096), (resource.RLIMIT_CORE, 0))


class KillableGroup(ProcessGroup):
    """A cgroup v2 group, whose processes can be killed all at once."""

    def join(self) -> None:
        with open(f"{PROC}/self/oom_score_adj", "w") as score:
            score.write("500")  # the OOM killer must prefer programs to pid 1, whose score is negative
        super().join()

    def close(self) -> None:
        with open(f"{self._path}/cgroup.kill", "wb", buffering=0) as kill:
            kill.write(b"1")


class GuestPrograms(Programs):
    """The programs of the sandbox. If the kernel counts their memory (`counts`), no polling is needed to enforce the limit."""

    group = KillableGroup

    def __init__(self, *given: Any, counts: bool) -> None:
        self._counts = counts
        super().__init__(*given)

    def poll(self) -> float | None:
        if self._counts:
            self._kills = oom_kills()
        return super().poll()

    def _enforce_memory_limit(self) -> None:
        """Kill the largest processes while all processes and the sandbox's tmpfs together exceed the memory limit."""
        if self._counts:
            return
        groups = [*(program.group for program in self._running.values()), *self._left]
        most = self.settings.memory - self._in_use()
        sizes = sorted((process_memory(pid), pid) for group in groups for pid in group.members())
        if sum(size for size, _ in sizes) > most:  # shared memory was counted once per process
            sizes = sorted(
                (min(size, process_memory(pid, shared=False) or process_memory(pid)), pid) for size, pid in sizes
            )
        over = sum(size for size, _ in sizes) - most
        while over > 0 and sizes:
            size, pid = sizes.pop()
            kill(pid)
            self._kills += 1
            over -= size

    def _in_use(self) -> int:
        space = os.statvfs(OWN)
        return (space.f_blocks - space.f_bfree) * space.f_frsize


def process_memory(pid: int, *, shared: bool = True) -> int:
    """Return a process's memory in bytes. Shared memory counts in full, or else in proportion (PSS), which is slower to read."""
    file, names = ("status", ("RssAnon:", "RssShmem:")) if shared else ("smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
    with contextlib.suppress(OSError), open(f"{PROC}/{pid}/{file}") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))
    return 0


def oom_kills() -> int:
    """Return how many processes of the sandbox the kernel's OOM killer has killed."""
    fd = os.open(f"{GROUPS}/memory.events", os.O_RDONLY)
    try:
        events = dict(line.split() for line in read_open(fd).splitlines())
    finally:
        os.close(fd)
    return int(events[b"oom_kill"])


class Guest(SandboxServer):
    """Answers the host's requests. `place` is the directory with the sandbox's unpacked layers, mounts and files."""

    def __init__(self, line: socket.socket, place: str) -> None:
        super().__init__(line)
        self._place = place

    def _build_sandbox(
        self, settings: SandboxSettings, request: dict[str, Any], data: bytes
    ) -> tuple[Programs, dict[str, Any]]:
        unshare_namespaces()
        mount_files(settings, self._place, request["mounts"])
        files = b""
        with contextlib.suppress(FileNotFoundError), open(f"{self._place}/files", "rb") as file:
            files = file.read()
        lay_out(settings, files)
        with k.step("name the programs' user"):
            add_user_name(settings.owner)
        counts = make_groups(settings)
        os.umask(0o077)
        for what, most in RLIMITS:
            resource.setrlimit(what, (most, most))
        programs = GuestPrograms(settings, self._selector, self._answer, counts=counts)
        if settings.alone:
            with k.step("hide /proc"):
                k.mount("none", "/proc", "tmpfs", QUIET | k.MS_RDONLY)
        return programs, {"counts": counts}

    def _listen(self, port: int) -> None:
        self._serve_port(port, lambda: connect_unix(f"{PORTS}/{port}"))


def connect_unix(path: str) -> socket.socket | None:
    """Return a connection to the socket at `path`, or None if nothing listens there."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.connect(path)
    except OSError:
        made.close()
        return None
    return made


def unshare_namespaces() -> None:
    """Leave the machine's mount, network, IPC and host name namespaces. Raises StepError."""
    with k.step("make the namespaces"):
        k.call("unshare", k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS)
        k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
        socket.sethostname("workspace")
    with k.step("open the loopback"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def mount_files(settings: SandboxSettings, place: str, mounts: list[str]) -> None:
    """Make the machine's files read-only, and mount the layers and mounts from the host. Raises StepError."""
    os.umask(0o022)
    with k.step("make the directories of the workspace and the mounts"):
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


def add_user_name(number: int) -> None:
    """Give the programs' user (uid `number`) a name in the /etc/passwd and /etc/group that programs see."""
    for name, line in (("passwd", f"user:x:{number}:{number}::/tmp:/bin/sh\n"), ("group", f"user:x:{number}:\n")):
        kept: list[str] = []
        with contextlib.suppress(FileNotFoundError), open(f"/etc/{name}") as file:
            kept = [each for each in file if not each.startswith("user:")]
        with open(f"{BOX}/{name}", "w") as file:
            file.write("".join(kept) + line)
        os.chmod(f"{BOX}/{name}", 0o644)
        k.mount(f"{BOX}/{name}", f"/etc/{name}", None, k.MS_BIND)


def make_groups(settings: SandboxSettings) -> bool:
    """Make the control group of all programs, in which each gets its own. Return True if it counts memory. Raises StepError."""
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
