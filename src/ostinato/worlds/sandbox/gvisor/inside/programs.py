"""The programs of a gVisor sandbox: how pid 1 starts them, tracks their processes, enforces deadlines and memory, and kills them.

gVisor has no subreaper, so parentage is lost when a program's child outlives it. gVisor's own control groups record which program a process
belongs to: neither a process nor its descendants can leave its group. Only one cgroup hierarchy is used, since gVisor of 2022 charges a
task in several hierarchies to one of them at random, and limits would not hold. Busy programs delay every system call of pid 1, so files
that are read often stay open.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kernel import call
from rootfs import GROUPS, PROC, SandboxSettings

# ---------------------------------------------------------------- a program's processes


def read_open(fd: int) -> bytes:
    """Return the current content of an open kernel file."""
    return os.pread(fd, 65536, 0)


def kill(pid: int) -> None:
    """Kill a process if it still exists; a negative number kills a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class ProcessGroup:
    """The control group with the processes of one program. Raises OSError if no further group can be created."""

    def __init__(self, number: int) -> None:
        self._path = f"{GROUPS}/{number}"
        os.mkdir(self._path, 0o700)  # private: programs could hide processes in subgroups
        self._members = os.open(f"{self._path}/cgroup.procs", os.O_RDWR)
        self._closed = False

    def join(self) -> None:
        """Move this process into the group."""
        os.pwrite(self._members, str(os.getpid()).encode(), 0)

    def members(self) -> list[int]:
        """Return the pids of the live processes in the group."""
        return [int(pid) for pid in read_open(self._members).split()]

    def close(self) -> None:
        """Forbid the members to start further processes. Idempotent."""
        if not self._closed:
            self._closed = True
            with open(f"{self._path}/pids.max", "wb", buffering=0) as most:
                most.write(b"0")

    def removed(self) -> bool:
        """Try to remove the group. Return False while it has members."""
        if self.members():
            return False
        os.close(self._members)
        with contextlib.suppress(OSError):
            os.rmdir(self._path)
        return True


# ---------------------------------------------------------------- how a fork of pid 1 drops privileges and becomes a program


PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_FILTER = 24, 38, 22, 2
CAPABILITIES_VERSION = 0x20080522


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """A request to run a program. An empty `cwd` means the workspace."""

    argv: list[bytes]
    env: dict[bytes, bytes]
    cwd: bytes
    stdin: bytes

    @classmethod
    def read(cls, data: bytes, text: int, count: int) -> ProgramRequest:
        """Parse a packed program: the first `text` bytes and the number `count` come from `pack_program`; stdin follows."""
        arguments, variables = count & 0xFFFF, count >> 16
        texts = data[:text].split(b"\0")
        pairs = (each.partition(b"=") for each in texts[1 + arguments : 1 + arguments + variables])
        return cls(
            argv=texts[1 : 1 + arguments],
            env={name: value for name, _, value in pairs},
            cwd=texts[0],
            stdin=data[text:],
        )


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def _fail(name: bytes, error: OSError) -> NoReturn:
    os.write(2, name[:400] + b": " + (error.strerror or "").encode() + b"\n")
    os._exit(126 if error.errno in (errno.EACCES, errno.ENOEXEC) else 127)


def _limit(settings: SandboxSettings) -> None:
    for what, most in (
        # per user, so for all programs together; each program's first process counts as pid 1's
        (resource.RLIMIT_NPROC, settings.processes - 1),
        (resource.RLIMIT_NOFILE, settings.open_files),
        (resource.RLIMIT_FSIZE, settings.disk),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def _give_up_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, none)


def act_as_owner(settings: SandboxSettings) -> None:
    """Reduce this fork's file access to that of programs. Its real and saved uid stay pid 1's, so that no program can kill it."""
    own = os.getuid()
    os.umask(0o022)
    os.setgroups([])
    os.setresgid(settings.owner, settings.owner, settings.owner)
    os.setresuid(own, settings.owner, own)
    _give_up_capabilities()


def _give_up_rights(settings: SandboxSettings) -> None:
    for capability in range(64):
        try:
            call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:
            break  # the first capability that the kernel does not know
    os.setgroups([])
    os.setresgid(settings.owner, settings.owner, settings.owner)
    os.setresuid(settings.owner, settings.owner, settings.owner)
    _give_up_capabilities()
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not settings.filter:
        return
    code = ctypes.create_string_buffer(settings.filter, len(settings.filter))
    program = _Program(len(settings.filter) // 8, ctypes.addressof(code))
    call("prctl", PR_SET_SECCOMP, SECCOMP_FILTER, ctypes.byref(program), 0, 0)


def _execute(request: ProgramRequest) -> NoReturn:
    """Execute the program, searched on the PATH as a shell does."""
    name, found = request.argv[0], FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    places = [b""] if b"/" in name else request.env.get(b"PATH", b"/usr/bin:/bin").split(b":")
    for place in places:
        try:
            os.execve(place + b"/" + name if place else name, request.argv, request.env)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                found = error
    _fail(name, found)


def execute_program(
    request: ProgramRequest, settings: SandboxSettings, group: ProcessGroup, outputs: tuple[int, int]
) -> NoReturn:
    """Set up descriptors, limits and privileges, and execute the program. Never returns."""
    name = b"isolate the program"
    try:
        os.setpgid(0, 0)
        group.join()
        stdin = os.open("/dev/null", os.O_RDONLY)
        if request.stdin:
            stdin = os.memfd_create("input")
            os.write(stdin, request.stdin)
            os.lseek(stdin, 0, os.SEEK_SET)
        for place, fd in enumerate((stdin, *outputs)):
            os.dup2(fd, place)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        _limit(settings)
        _give_up_rights(settings)
        name = request.cwd or os.fsencode(settings.workdir)
        os.chdir(os.path.join(os.fsencode(settings.workdir), request.cwd))
        _execute(request)
    except OSError as error:
        _fail(name, error)
    finally:
        os._exit(126)


# ---------------------------------------------------------------- all programs


# polling intervals: while programs run, while only background processes run, and while a group is being killed
BUSY_S, QUIET_S, CLOSING_S = 0.02, 0.1, 0.005
Answered = Callable[[int, dict[str, Any], bytes], None]


@dataclass(slots=True)
class Output:
    """One output stream of a program, read up to `cap` bytes. Output after the program's end is read and discarded."""

    fd: int
    cap: int
    data: bytearray = field(default_factory=bytearray)
    open: bool = True

    @property
    def flooded(self) -> bool:
        """True if the output exceeded `cap`."""
        return len(self.data) > self.cap

    def drain(self) -> bool:
        """Read once. Return True if something was available and there may be more."""
        try:
            part = os.read(self.fd, 65536)
        except BlockingIOError:
            return False
        self.data += part[: self.cap + 1 - len(self.data)]
        self.open = bool(part)
        return self.open


@dataclass(slots=True)
class Program:
    """A started program. `code` is None until it ends; `reason` is why pid 1 killed it; `kills` counts OOM kills before its start."""

    number: int
    pid: int
    group: ProcessGroup
    begun: float
    deadline: float
    kills: int
    outputs: tuple[Output, Output]
    code: int | None = None
    reason: str | None = None


class Programs:
    """The programs of the sandbox. `answered` is called with a program's number and result when it ends."""

    group: type[ProcessGroup] = ProcessGroup

    def __init__(self, settings: SandboxSettings, selector: selectors.BaseSelector, answered: Answered) -> None:
        self.settings, self._selector, self._answered = settings, selector, answered
        self._running: dict[int, Program] = {}
        self._left: list[ProcessGroup] = []  # groups of programs that have ended, with background processes
        # pid -> function to call with the exit code, for children other than programs
        self.others: dict[int, Callable[[int], None]] = {}
        # processes killed for lack of memory: their number, and those that are not gone yet
        self._kills, self._dying = 0, set[int]()
        self._meminfo = os.open(f"{PROC}/meminfo", os.O_RDONLY)
        self._base = self._in_use()

    def start(self, number: int, request: ProgramRequest, cap: int, timeout: float) -> None:
        """Start a program. Raises OSError."""
        ends = [os.pipe(), os.pipe()]
        try:
            group = self.group(number)
            begun = time.monotonic()
            pid = os.fork()
            if pid == 0:
                execute_program(request, self.settings, group, (ends[0][1], ends[1][1]))
        except OSError:
            for read_end, _ in ends:
                os.close(read_end)
            raise
        finally:
            for _, write_end in ends:
                os.close(write_end)
        outputs = (Output(ends[0][0], cap), Output(ends[1][0], cap))
        self._running[number] = program = Program(number, pid, group, begun, begun + timeout, self._kills, outputs)
        for output in outputs:
            os.set_blocking(output.fd, False)
            self._selector.register(output.fd, selectors.EVENT_READ, lambda output=output: self._read(output, program))

    def kill_program(self, number: int) -> None:
        """Kill a program that nobody waits for any more."""
        if number in self._running:
            self._kill(self._running[number], "killed")

    def _read(self, output: Output, program: Program) -> None:
        output.drain()
        if not output.open:
            self._close(output)
        elif output.flooded and program.number in self._running:
            self._kill(program, "output")
        if program.number not in self._running:
            output.data.clear()

    def _close(self, output: Output) -> None:
        self._selector.unregister(output.fd)
        os.close(output.fd)

    def _kill(self, program: Program, reason: str) -> None:
        """Kill a program and all its descendants: first its process group, then the rest once no process can be added."""
        program.reason = program.reason or reason
        if program.code is None:
            kill(-program.pid)
            kill(program.pid)
        program.group.close()
        for pid in program.group.members():
            kill(pid)

    def poll(self) -> float | None:
        """Reap children and enforce deadlines and the memory limit. Return the seconds until the next poll, or None if none is needed."""
        self._reap()
        now = time.monotonic()
        wait = [QUIET_S] if self._left else []
        for program in list(self._running.values()):
            if program.code is None and now >= program.deadline:
                self._kill(program, "timeout")
            if program.reason is not None and program.group.members():
                self._kill(program, program.reason)
                wait.append(CLOSING_S)
            elif program.code is None or not self._finish(program):
                wait.append(min(BUSY_S, max(CLOSING_S, program.deadline - now)))
        self._left = [group for group in self._left if not group.removed()]
        if self._running or self._left:
            self._enforce_memory_limit()
        return max(0.0, min(wait)) if wait else None

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                if (on_exit := self.others.pop(ended[0], None)) is not None:
                    on_exit(code)
                for program in self._running.values():
                    if program.pid == ended[0] and program.code is None:
                        program.code = code

    def _finish(self, program: Program) -> bool:
        """Send the result of a program that ended. Return False if it printed too much, so that its processes must be killed first."""
        for output in program.outputs:
            while output.open and not output.flooded and output.drain():
                continue
        reason, code = program.reason, program.code
        if any(output.flooded for output in program.outputs) and reason is None:
            self._kill(program, "output")
            return False
        if reason is None and code and self._kills > program.kills:
            reason = "memory"
        del self._running[program.number]
        out, err = (bytes(output.data[: output.cap]) for output in program.outputs)
        result = {"code": code, "reason": reason, "seconds": time.monotonic() - program.begun, "out": len(out)}
        for output in program.outputs:
            output.data.clear()
        self._left.append(program.group)
        self._answered(program.number, result, out + err)
        return True

    def _enforce_memory_limit(self) -> None:
        """Kill the largest processes while all together exceed the memory limit, as the OOM killer does."""
        over = self._in_use() - self._base - self.settings.memory
        if over <= 0:
            return
        groups = [program.group for program in self._running.values()] + self._left
        pids = [pid for group in groups for pid in group.members()]
        self._dying.intersection_update(pids)
        if self._dying:
            return  # wait until their memory is freed
        sizes = sorted((_size(pid), pid) for pid in pids)
        while over > 0 and sizes:
            size, pid = sizes.pop()
            kill(pid)
            self._dying.add(pid)
            self._kills += 1
            over -= size

    def _in_use(self) -> int:
        """Return the bytes used by processes and by tmpfs. Shared memory counts once."""
        lines = (line.split() for line in read_open(self._meminfo).splitlines())
        return sum(int(line[1]) for line in lines if line[0] in (b"AnonPages:", b"Shmem:")) << 10


def _size(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"{PROC}/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
