"""The sandbox's native launcher (this package's C sources, compiled once per machine and user) and its seccomp system call filter.

The filter is an allow-list of what CPython, git, bash, compilers and coreutils call; every other call fails with ENOSYS. Left out on
purpose: mount, namespaces, modules, kexec, bpf, perf, keyrings, io_uring, userfaultfd, ptrace and other processes' memory, System V and
POSIX message queues, memfd, clone3 (a filter cannot inspect its arguments; libc falls back to clone), inotify, fanotify, quotas, setting
clocks.

The list is compiled into classic BPF as a binary search over call numbers, so that each call costs about eight comparisons; a linear list
would cost 2.5 times as much to install and up to 200 comparisons per call. Instructions are `struct sock_filter` {u16 code, u8 jt, u8 jf,
u32 k} over `struct seccomp_data` {nr, arch, instruction pointer, args[6]}.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import platform
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ostinato.core.errors import BadConfig, SandboxRefused
from ostinato.core.files import write_atomic
from ostinato.core.places import cache_directory

# ---------------------------------------------------------------- the allow-list


_NAMED = """
access alarm arch_prctl bind brk capget capset chdir chmod chown clock_getres clock_gettime clock_nanosleep close close_range
connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd
eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat
fdatasync fgetxattr flistxattr flock fork fstat fstatfs fsync ftruncate futex futex_waitv futimesat get_robust_list getcpu getcwd
getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom
getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr kill lchown lgetxattr
link linkat listen listxattr llistxattr lseek lstat membarrier mkdir mkdirat mknod mknodat mlock mprotect mremap msync munlock
munmap nanosleep newfstatat open openat pause pidfd_open pidfd_send_signal pipe pipe2 poll ppoll pread64 preadv preadv2 pselect6
pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg rename renameat renameat2
restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
sched_rr_get_interval sched_setaffinity sched_setscheduler sched_yield select sendfile sendmmsg sendmsg sendto set_robust_list
set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit
setsid setuid shutdown sigaltstack signalfd signalfd4 splice stat statfs statx symlink symlinkat sysinfo tgkill time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate
umask uname unlink unlinkat utime utimensat utimes vfork wait4 waitid write writev accept accept4
"""
PLAIN = tuple(_NAMED.split())
"""Calls that are allowed with any arguments."""

ANSWERED = {
    "sync": 0,  # would flush all of the host's disks; the box has nothing on disk to flush
    "syncfs": 0,
    **dict.fromkeys(
        ("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"), errno.ENOTSUP
    ),
}
"""Calls that are not executed: the filter returns this errno, where 0 is success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A condition on a call's argument: its low 32 bits, masked, must be in `values` (or not in them, if `among` is False).

    Example: ``Argument(index=0, values=(1, 2, 10), error=errno.EAFNOSUPPORT)`` allows three socket families.
    """

    index: int
    values: tuple[int, ...]
    error: int = errno.EPERM
    mask: int = 0xFFFFFFFF
    among: bool = True


UNIX, INET, INET6 = 1, 2, 10
STREAM, DATAGRAM, SEQPACKET = 1, 2, 5
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET

RULES: dict[str, tuple[Argument, ...]] = {
    "clone": (Argument(index=0, mask=NEW_NAMESPACES, values=(0,)),),
    "socket": (
        Argument(index=0, values=(UNIX, INET, INET6), error=errno.EAFNOSUPPORT),
        Argument(index=1, mask=0xF, values=(STREAM, DATAGRAM, SEQPACKET), error=errno.EPROTONOSUPPORT),
        Argument(index=2, values=(0, 1, 6, 17), error=errno.EPROTONOSUPPORT),
    ),
    "socketpair": (Argument(index=0, values=(UNIX,), error=errno.EAFNOSUPPORT),),
    "ioctl": (Argument(index=1, values=(0x5412, 0x541C, 0x5423), among=False),),  # TIOCSTI, TIOCLINUX, TIOCSETD
    "personality": (Argument(index=0, values=(0, 0xFFFFFFFF)),),
    "fcntl": (Argument(index=1, values=(1024, 1026, 1031), among=False),),  # F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
    "prlimit64": (Argument(index=0, values=(0,)),),  # only the caller's own limits, since pid 1 has the same user
    "madvise": (Argument(index=2, values=(12, 100, 101), among=False, error=errno.EINVAL),),  # merging pages is a side channel
    "mmap": (Argument(index=3, mask=0x40000, values=(0,), error=errno.ENOMEM),),  # MAP_HUGETLB
    "prctl": (
        # parent-death signal, dumpable, name, its own capabilities, timer slack, no_new_privs, huge pages, names of mappings
        Argument(index=0, values=(1, 2, 3, 4, 15, 16, 21, 23, 29, 30, 37, 38, 39, 41, 42, 47, 0x53564D41), error=errno.EINVAL),
    ),
}  # fmt: skip
"""Calls that are allowed if all their conditions hold. `setsockopt` is handled apart, since its two arguments depend on each other."""

SOCKET_LEVEL, TCP_LEVEL = 1, 6
# filters in classic and extended BPF, their lock, forced buffer sizes
SOCKET_OPTIONS = (26, 27, 32, 33, 44, 50, 51, 52)
SOCKET_HINTS = (7, 8)
"""Socket buffer sizes: answered with success but left unchanged. The buffers are kernel memory, and the limit assumes the default size."""
TCP_OPTIONS = (13, 19, 31)  # congestion control by name (loads modules), repair, upper-layer protocol

NAMES = sorted({*PLAIN, *ANSWERED, *RULES, "setsockopt"})
"""Every call whose number the filter needs."""


# ---------------------------------------------------------------- compiling the filter to BPF


Instruction = tuple[int, int, int, int]
LOAD, MASK, EQUAL, AT_LEAST, JUMP, RETURN = 0x20, 0x54, 0x15, 0x35, 0x05, 0x06
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _argument(index: int) -> Instruction:
    return LOAD, 0, 0, 16 + 8 * index  # the low half, on little-endian machines


def _answer(error: int) -> Instruction:
    return RETURN, 0, 0, ERROR | error


def _condition(argument: Argument) -> list[Instruction]:
    """Return code that falls through if the condition holds, and otherwise answers the call with its error."""
    values, count = argument.values, len(argument.values)
    code = [_argument(argument.index)]
    if argument.mask != 0xFFFFFFFF:
        code.append((MASK, 0, 0, argument.mask))
    code += [(EQUAL, count - place, 0, value) for place, value in enumerate(values)]
    if not argument.among:
        code.append((JUMP, 0, 0, 1))
    return [*code, _answer(argument.error)]


def _socket_options() -> list[Instruction]:
    """Return the code for `setsockopt`, by level and name: 26 attaches a filter at the socket level but is harmless at the IPv6 level."""
    code: list[Instruction] = []
    refused = [
        (SOCKET_LEVEL, SOCKET_OPTIONS, errno.EPERM),
        (SOCKET_LEVEL, SOCKET_HINTS, 0),
        (TCP_LEVEL, TCP_OPTIONS, errno.EPERM),
    ]
    for level, options, error in refused:
        names = _condition(Argument(index=2, values=options, among=False, error=error))
        code += [_argument(1), (EQUAL, 0, len(names), level), *names]
    return [*code, (RETURN, 0, 0, ALLOW)]


def _leaf(name: str) -> list[Instruction]:
    if name in ANSWERED:
        return [_answer(ANSWERED[name])]
    if name == "setsockopt":
        return _socket_options()
    code = [instruction for argument in RULES.get(name, ()) for instruction in _condition(argument)]
    return [*code, (RETURN, 0, 0, ALLOW)]


def _bisect(pieces: Sequence[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Return code that finds a call's piece by binary search.

    `pieces` are (first number, code), ascending; each applies up to the next one's first number.
    """
    if len(pieces) == 1:
        return pieces[0][1]
    middle = len(pieces) // 2
    low, high = _bisect(pieces[:middle]), _bisect(pieces[middle:])
    first = pieces[middle][0]
    if len(low) <= 255:
        return [(AT_LEAST, len(low), 0, first), *low, *high]
    return [(AT_LEAST, 0, 1, first), (JUMP, 0, 0, len(low)), *low, *high]


def compile_filter(numbers: Mapping[str, int], architecture: str) -> bytes:
    """Compile the filter program for the calls in `numbers` (name -> number); calls without one do not exist on this architecture.

    Example: ``compile_filter({"read": 0, "write": 1}, "x86_64")`` allows two calls and answers all others with ENOSYS.
    Raises KeyError for an architecture that has no entry in `ARCHITECTURES`.
    """
    names = {number: name for name, number in numbers.items() if name in NAMES}
    unknown = [_answer(errno.ENOSYS)]
    pieces: list[tuple[int, list[Instruction]]] = [(0, unknown)]
    for number in range(max(names, default=0) + 2):
        code = _leaf(names[number]) if number in names else unknown
        if code != pieces[-1][1]:
            pieces.append((number, code))
    if pieces[1:] and pieces[1][0] == 0:
        pieces.pop(0)
    head: list[Instruction] = [
        (LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURES[architecture]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0),
    ]  # fmt: skip
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in [*head, *_bisect(pieces)])


# ---------------------------------------------------------------- compiling the launcher


_SOURCES = Path(__file__).with_name("native")
_FLAGS = (
    "-std=gnu11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-fstack-protector-strong", "-Wl,-z,relro,-z,now",
)  # fmt: skip
_COMPILER = (
    "the sandbox's launcher is compiled at first use, and there is no C compiler here ('cc' is not on the PATH). To get one: "
    "apt-get install gcc libc6-dev (Debian, Ubuntu), dnf install gcc (Fedora), apk add gcc musl-dev linux-headers (Alpine); or set CC."
)


def _numbers_source() -> str:
    """Return C source for looking up system call numbers on the machine that it is compiled for."""
    rows = "".join(f'#ifdef SYS_{name}\n{{"{name}", SYS_{name}}},\n#endif\n' for name in NAMES)
    head = "#include <string.h>\n#include <sys/syscall.h>\nstatic const struct { const char *name; int number; } calls[] = {\n"
    body = (
        '__attribute__((visibility("default")))\nint call_number(const char *name) {\n'
        "for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++)\n"
    )
    return f"{head}{rows}}};\n{body}if (!strcmp(calls[i].name, name)) return calls[i].number;\nreturn -1;\n}}\n"


@functools.cache
def build() -> Path:
    """Return the path of the launcher's shared object, compiled if necessary. Raises SandboxRefused as `compiled` does."""
    sources = sorted(path for path in _SOURCES.iterdir() if path.suffix in (".c", ".h"))
    return compiled("launcher", {path.name: path.read_text() for path in sources} | {"numbers.c": _numbers_source()})


def compiled(name: str, sources: Mapping[str, str]) -> Path:
    """Compile C sources (file name -> text) to a shared object and return its path. Identical sources are compiled once per user.

    Raises SandboxRefused if there is no compiler or no cache directory, or if the sources do not compile.
    """
    digest = hashlib.sha256(" ".join((*_FLAGS, platform.machine(), platform.libc_ver()[1])).encode())
    for file, text in sources.items():
        digest.update(f"{file}\0{text}\0".encode())
    try:
        cache = cache_directory()
    except BadConfig as error:
        raise SandboxRefused(f"the sandbox's compiled launcher has no place: {error}") from error
    target = cache / f"{name}-{digest.hexdigest()[:32]}.so"
    with contextlib.suppress(FileNotFoundError):
        seen = target.lstat()
        if stat.S_ISREG(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o022:
            return target
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise SandboxRefused(_COMPILER)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / f"{name}.so"
        for file, text in sources.items():
            (Path(scratch) / file).write_text(text)
        files = [file for file in sources if file.endswith(".c")]
        command = [compiler, *_FLAGS, *files, "-o", str(made)]
        # the compiler finds its linker on the PATH
        environment = {**os.environ, "PATH": os.environ.get("PATH") or os.defpath}
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch, env=environment)
        if result.returncode:
            raise SandboxRefused(f"the sandbox's {name} does not compile with {compiler}: {result.stderr[-1500:]}")
        write_atomic(target, made.read_bytes(), durable=True, mode=0o700)  # an existing file counts as complete
    return target


@functools.cache
def system_call_filter() -> bytes:
    """Return the compiled allow-list for this machine. Raises SandboxRefused for an unknown architecture."""
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())
    if machine not in ARCHITECTURES:
        raise SandboxRefused(f"system calls cannot be filtered on {machine}; known: {', '.join(ARCHITECTURES)}")
    library = ctypes.CDLL(str(build()))
    numbers = {name: int(library.call_number(name.encode())) for name in NAMES}
    return compile_filter({name: number for name, number in numbers.items() if number >= 0}, machine)
