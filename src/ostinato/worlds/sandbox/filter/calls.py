"""The allow-list: what CPython, git, bash, compilers and coreutils call; everything unnamed fails with ENOSYS.

Left out on purpose: mount, namespaces, modules, kexec, bpf, perf, keyrings, io_uring, userfaultfd, ptrace and other processes'
memory, System V and POSIX message queues, memfd, clone3 (a filter cannot inspect its arguments; libc falls back to clone), inotify,
fanotify, quotas, setting clocks.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

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
"""Allowed with any argument."""

ANSWERED = {
    "sync": 0,  # would write out all of the host's disks; the box has nothing on disk to write out
    "syncfs": 0,
    **dict.fromkeys(
        ("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"), errno.ENOTSUP
    ),
}
"""Not executed; the filter returns this error, where 0 is success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A call is allowed if the low 32 bits of argument `index`, masked, are in `values` (or not in them, if `among` is False).

    Example: ``Argument(index=0, values=(1, 2, 10), error=errno.EAFNOSUPPORT)`` is the families that a socket may have.
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
"""Allowed by argument: all of a call's conditions must hold. `setsockopt` is in bpf.py, because its two arguments depend on each other."""

SOCKET_LEVEL, TCP_LEVEL = 1, 6
# filters in classic and extended BPF, their lock, forced buffer sizes
SOCKET_OPTIONS = (
    26,
    27,
    32,
    33,
    44,
    50,
    51,
    52,
)
SOCKET_HINTS = (7, 8)
"""Sizes of a socket's buffers: answered with success and not changed, because what lies in them is the kernel's memory, not the box's."""
TCP_OPTIONS = (13, 19, 31)  # congestion control by name (loads modules), repair, upper-layer protocol

NAMES = sorted({*PLAIN, *ANSWERED, *RULES, "setsockopt"})
"""Every call whose number the filter needs."""
