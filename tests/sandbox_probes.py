# ruff: noqa: E501, BLE001, T201 - a table, in which one probe is one entry; a probe that dies has not fired
"""What a hostile program tries, as a script: ``python sandbox_probes.py`` prints a JSON list of the probes that fired.

Each probe runs in a process of its own and fires by returning something true. None destroys anything where nothing holds it: a call that would is
made with arguments that the kernel refuses after it has let the caller in, writability is asked and not tried. Numbers are those of x86_64.
"""

import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
BAD = ctypes.c_void_p(8)  # an address that is never mapped: EFAULT says that the kernel looked at it
MARK = "OSTINATO_PROBE"


def call(number, *args):
    """A system call's result, or minus its error."""
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    return -ctypes.get_errno() if result < 0 else result


def reached(number, *args):
    """True if kernel code beyond the filter answered."""
    return call(number, *args) not in (-errno.ENOSYS, -errno.EPERM, -errno.EACCES)


CALLS = {
    "io_uring_setup": (425, 1, BAD), "io_uring_enter": (426, -1, 0, 0, 0, 0, 0), "io_uring_register": (427, -1, 0, 0, 0),
    "io_setup": (206, 1, BAD), "io_destroy": (207, 0), "userfaultfd": (323, 0x80801), "memfd_create": (319, b"x", 0),
    "memfd_secret": (447, 0), "bpf": (321, 0, BAD, 8), "perf_event_open": (298, BAD, 0, -1, -1, 0), "clone3": (435, BAD, 64),
    "setns": (308, -1, 0), "unshare_user": (272, 0x10000000), "ptrace_traceme": (101, 0, 0, 0, 0), "process_vm_readv": (310, 0, 0, 0, 0, 0, 0),
    "process_vm_writev": (311, 0, 0, 0, 0, 0, 0), "process_madvise": (440, -1, 0, 0, 0, 0), "process_mrelease": (448, -1, 0),
    "pidfd_getfd": (438, -1, 0, 0), "kcmp": (312, 1, 1, 99, 0, 0), "name_to_handle_at": (303, -100, BAD, BAD, BAD, 0),
    "open_by_handle_at": (304, -1, BAD, 0), "fanotify_mark": (301, -1, 0, 0, 0, 0), "inotify_init": (253,), "inotify_init1": (294, 0),
    "quotactl": (179, 0x80000100, BAD, 0, BAD), "quotactl_fd": (443, -1, 0x800001, 0, 0), "modify_ldt": (154, 0, BAD, 0),
    "vmsplice": (278, -1, BAD, 1, 0), "tee": (276, -1, -1, 1, 0), "mincore": (27, 1, 1, BAD), "move_pages": (279, 0, 1, BAD, BAD, BAD, 0),
    "migrate_pages": (256, 0, 64, BAD, BAD), "mbind": (237, 1, 1, 0, 0, 0, 0), "set_mempolicy": (238, 99, 0, 0), "get_mempolicy": (239, BAD, 0, 0, 0, 0),
    "set_mempolicy_home_node": (450, 1, 1, 0, 0), "remap_file_pages": (216, 1, 1, 1, 0, 0), "seccomp_installs": (317, 1, 0, BAD), "landlock": (444, BAD, 8, 0),
    "keyctl": (250, 0, -3, 0), "add_key": (248, b"user", b"ostinato-probe", b"x", 1, -2), "request_key": (249, b"user", b"ostinato-none", 0, -2),
    "shmget": (29, 0x0571, 0, 0), "shmat": (30, -1, 0, 0), "shmctl": (31, -1, 99, 0), "semget": (64, 0x0571, 0, 0), "semop": (65, -1, BAD, 1),
    "semctl": (66, -1, 0, 99, 0), "msgget": (68, 0x0571, 0), "msgsnd": (69, -1, BAD, 1, 0), "msgrcv": (70, -1, BAD, 1, 0, 0), "msgctl": (71, -1, 99, 0),
    "mq_open": (240, b"ostinato-none", 0, 0, 0), "mq_unlink": (241, b"ostinato-none"), "fsopen": (430, BAD, 0), "fsmount": (432, -1, 0, 0), "fspick": (433, -1, BAD, 0),
    "open_tree": (428, -1, BAD, 0), "move_mount": (429, -1, BAD, -1, BAD, 0), "mount_setattr": (442, -1, BAD, 0, BAD, 32), "statmount": (457, BAD, BAD, 0, 0),
    "listmount": (458, BAD, BAD, 0, 0), "umount2": (166, BAD, 0), "chroot": (161, BAD), "swapon": (167, BAD, 0), "swapoff": (168, BAD), "sysfs": (139, 3),
    "syslog": (103, 10, 0, 0), "ustat": (136, 0, BAD), "lookup_dcookie": (212, 0, BAD, 0), "uselib": (134, BAD), "init_module": (175, BAD, 0, BAD),
    "finit_module": (313, -1, BAD, 0), "delete_module": (176, BAD, 0), "iopl": (172, 0), "ioperm": (173, 0, 0, 0), "clock_settime": (227, 0, BAD),
    "settimeofday": (164, BAD, 0), "clock_adjtime": (305, 0, BAD), "adjtimex": (159, BAD), "sethostname": (170, BAD, 1), "setdomainname": (171, BAD, 1),
    "vhangup_by_number": (280, -1, 0, 0, 0) , "ioprio_set": (251, 1, 0, 0x4007), "cachestat": (451, -1, 0, 0, 0), "openat2": (437, -1, BAD, BAD, 24),
    "pkey_alloc": (330, 0, 0), "map_shadow_stack": (453, 0, 4096, 0), "rseq_slice": (471, 0), "lsm_list_modules": (461, BAD, BAD, 0), "lsm_get_self_attr": (459, 0, BAD, BAD, 0),
}  # fmt: skip
for gone in (
    "kcmp",
    "init_module",
    "finit_module",
    "delete_module",
    "iopl",
    "ioperm",
    "rseq_slice",
    "lookup_dcookie",
    "uselib",
    "sysfs",
    "ustat",
    "vhangup_by_number",
    "pkey_alloc",
    "map_shadow_stack",
):
    del CALLS[gone]  # not in every kernel, or in none of today's, so that the control could not fire


def by_argument(number, args):
    """A call that is allowed, with an argument that is not."""
    return lambda: call(number, *args) >= 0


def open_for_writing(*paths):
    return lambda: [path for path in paths if os.access(path, os.W_OK)]


def seen(*paths):
    return lambda: [path for path in paths if os.path.exists(path)]


def family(domain, kind=socket.SOCK_DGRAM, protocol=0):
    def probe():
        socket.socket(domain, kind, protocol).close()
        return True

    return probe


def option(level, name, value):
    def probe():
        with socket.socket() as end:
            end.setsockopt(level, name, value)
        return True

    return probe


def larger_buffer(name):
    """A socket's buffer becomes larger than the usual one."""

    def probe():
        with socket.socket() as end:
            usual = end.getsockopt(socket.SOL_SOCKET, name)
            # a program may ask for it, and is told that it was done
            end.setsockopt(socket.SOL_SOCKET, name, 1 << 22)
            return end.getsockopt(socket.SOL_SOCKET, name) > usual

    return probe


def connects(address):
    def probe():
        kind = socket.AF_UNIX if isinstance(address, str | bytes) else socket.AF_INET
        with socket.socket(kind) as end:
            end.settimeout(2)
            end.connect(address)
        return True

    return probe


def signals_outside():
    os.kill(int(os.environ[MARK + "_PID"]), 0)
    return True


def reads_outside(kind):
    def probe():
        with open(f"/proc/{os.environ[MARK + '_PID']}/{kind}", "rb") as file:
            return MARK.encode() in file.read()

    return probe


def sees_the_parent_directory_of_its_input():
    return os.readlink("/proc/self/cwd") if os.path.exists(os.environ[MARK + "_FILE"]) else ""


def reads_the_planted_file():
    with open(os.environ[MARK + "_FILE"]) as file:
        return file.read()


def inherited_descriptors():
    return [fd for fd in range(3, 256) if os.environ.get(MARK + "_FD") == str(fd) and os.fstat(fd)]


def enlarges_a_pipe():
    import fcntl

    read, _ = os.pipe()
    return fcntl.fcntl(read, 1031, 1 << 17) >= 1 << 17


def watches_a_directory():
    import fcntl

    return fcntl.fcntl(os.open("/tmp", os.O_RDONLY), 1026, 1) == 0


def pushes_into_a_terminal():
    import fcntl
    import pty

    try:
        _, end = pty.openpty()
    except OSError:
        return False
    try:
        fcntl.ioctl(end, 0x5412, b"x")
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.ENOSYS)
    return True


def many_timers():
    made = 0
    while made < 5000:
        ident = ctypes.c_int()
        if libc.timer_create(0, None, ctypes.byref(ident)):
            break
        made += 1
    return made >= 5000


def many_files():
    fds = []
    try:
        while len(fds) < 900:
            fds.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return False
    return True


def many_processes():
    children = []
    try:
        while len(children) < 64:
            child = os.fork()
            if child == 0:
                time.sleep(20)
                os._exit(0)
            children.append(child)
    except OSError:
        return False
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    return True


def much_memory():
    block = bytearray(300 << 20)
    return len(block)


def much_shared_memory():
    import mmap

    block = mmap.mmap(-1, 300 << 20)
    for at in range(0, len(block), 4096):
        block[at] = 1
    return True


def much_in_sockets():
    """Kernel memory: 660 pairs of sockets whose buffers are filled both ways, and read by nobody. True if 150 MB stay there.

    Not in the table, because the kernel may end any program of the box for it, the one that runs the table among them.
    """
    import resource

    each = min(220, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 16) // 2)

    def fill():
        pairs, held = [], 0
        for _ in range(each):
            pairs.append(socket.socketpair())
            for end in pairs[-1]:
                end.setblocking(False)
                try:
                    while True:
                        held += end.send(bytes(32768))
                except BlockingIOError:
                    pass
        return pairs, held

    told, say = os.pipe()
    children = []
    for _ in range(min(20, -(-660 // each))):
        child = os.fork()
        if child == 0:
            pairs, held = fill()
            os.write(say, b"%12d" % held)
            time.sleep(3)
            os._exit(len(pairs) > 0)
        children.append(child)
    os.close(say)
    try:
        said = [os.read(told, 12) for _ in children]
        time.sleep(0.5)
        children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
        return len(children) == len(said) and sum(int(held or 0) for held in said) > 150_000_000
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def much_in_tcp():
    """Kernel memory: a connection whose buffers grow while its reader takes less than comes. True once it holds 2 MB."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        got, _ = server.accept()
    out.setblocking(False)
    got.setblocking(False)
    held, until = 0, time.monotonic() + 2
    while held < 2_000_000 and time.monotonic() < until:
        try:
            held += out.send(bytes(262144))
        except BlockingIOError:
            held -= len(got.recv(65536))
    return held >= 2_000_000


def much_disk():
    path = f"/tmp/ostinato-probe-{os.getpid()}"
    try:
        with open(path, "wb") as file:
            for _ in range(100):
                file.write(bytes(1 << 20))
        return True
    finally:
        os.unlink(path)


def host_time_up():
    return time.clock_gettime(time.CLOCK_BOOTTIME) > 120


def other_architecture():
    libc.mmap.restype = ctypes.c_void_p
    page = libc.mmap(None, 4096, 7, 0x22 | 0x40, -1, 0)  # below 4 GiB, so that a 32-bit call can name it
    code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20 (getpid of i386); int 0x80; ret
    ctypes.memmove(page, code, len(code))
    return ctypes.CFUNCTYPE(ctypes.c_int)(page)() > 0


PROBES = {name: (lambda args=args: reached(*args)) for name, args in CALLS.items()} | {
    "clone: user namespace": by_argument(56, (0x10000011, 0, 0, 0, 0)),
    "personality: no randomisation": by_argument(135, (0x0040000,)),
    "prlimit: parent's": lambda: call(302, os.getppid(), 7, 0, ctypes.create_string_buffer(16)) == 0,
    "prctl: subreaper": by_argument(157, (36, 0, 0, 0, 0)),
    "prctl: seccomp": lambda: call(157, 22, 99, 0, 0, 0) == -errno.EINVAL and call(157, 22, 2, BAD, 0, 0) == -errno.EFAULT,
    "madvise: merge pages": lambda: call(28, BAD, 0, 12) in (0, -errno.ENOMEM) or call(28, 4096 * 16, 4096, 12) == -errno.ENOMEM,
    "socket: netlink": family(16, socket.SOCK_RAW), "socket: packet": family(17, socket.SOCK_RAW), "socket: vsock": family(40, socket.SOCK_STREAM),
    "socket: mptcp": family(2, socket.SOCK_STREAM, 262), "socket: raw": family(2, socket.SOCK_RAW, 1),
    "socket: udplite": family(2, socket.SOCK_DGRAM, 136), "socket: sctp or refused by number": family(2, socket.SOCK_RAW, 132),
    "setsockopt: congestion control": option(6, 13, b"reno"), "setsockopt: buffer by force": option(1, 33, 1 << 20),
    "setsockopt: a larger buffer to send": larger_buffer(socket.SO_SNDBUF),
    "setsockopt: a larger buffer to receive": larger_buffer(socket.SO_RCVBUF),
    "network: the host's loopback": lambda: connects(("127.0.0.1", int(os.environ[MARK + "_PORT"])))(),
    "network: an abstract socket": lambda: connects("\0" + os.environ[MARK + "_ABSTRACT"])(),
    "network: a socket in the file system": lambda: connects(os.environ[MARK + "_SOCKET"])(),
    "network: an interface beside lo": lambda: [name for _, name in socket.if_nameindex() if name != "lo"],
    "process: signals one outside": signals_outside, "process: environment outside": reads_outside("environ"),
    "process: command line outside": reads_outside("cmdline"), "process: more than its own": lambda: sum(n.isdigit() for n in os.listdir("/proc")) > 12,
    "file: planted on the host": reads_the_planted_file, "file: its place": sees_the_parent_directory_of_its_input,
    "view: the planted directory": lambda: os.listdir(os.path.dirname(os.environ[MARK + "_FILE"])),
    "view: kernel messages": seen("/dev/kmsg", "/proc/kmsg"), "view: sys": seen("/sys/kernel", "/sys/fs/cgroup"), "view: disks": seen("/proc/partitions", "/dev/vda", "/dev/sda"),
    "view: host's shadow": seen("/etc/shadow", "/etc/machine-id"), "view: var": seen("/var/log", "/var/lib"), "view: run": seen("/run", "/var/run"),
    "view: proc of the kernel": seen("/proc/meminfo", "/proc/cpuinfo"), "view: key lists": seen("/proc/keys", "/proc/key-users"),
    "view: sysctl": seen("/proc/sys/kernel"), "view: memory devices": seen("/dev/mem", "/dev/kmem", "/dev/port", "/dev/fuse", "/dev/ptmx"),
    "view: packages": seen(*(p for v in range(9, 16) for p in ("/usr/lib/python3/dist-packages/apt_pkg.so", f"{sys.base_prefix}/lib/python3.{v}/site-packages/pip"))),
    "view: host's name": lambda: socket.gethostname() == os.environ[MARK + "_HOST"],
    "write: system": open_for_writing("/", "/usr", "/usr/bin", "/lib", "/bin", "/etc", "/dev", "/root"), "write: interpreter": open_for_writing(sys.base_prefix + "/lib", os.__file__),
    "write: own oom score": open_for_writing("/proc/self/oom_score_adj"), "write: core pattern": open_for_writing("/proc/sys/kernel/core_pattern"),
    "write: own maps": open_for_writing("/proc/self/uid_map"), "write: autogroup": open_for_writing("/proc/self/autogroup"),
    "descriptor: inherited": inherited_descriptors, "pipe: larger": enlarges_a_pipe, "fcntl: notify": watches_a_directory, "terminal: input": pushes_into_a_terminal,
    "limit: timers": many_timers, "limit: files": many_files, "limit: processes": many_processes, "limit: memory": much_memory,
    "limit: shared memory": much_shared_memory, "limit: disk": much_disk, 
    "limit: priority": lambda: os.nice(0) < 5, "limit: core files": lambda: __import__("resource").getrlimit(4)[1] != 0,
    "clock: host's": host_time_up, "call: of 32 bits": other_architecture, 
    "root: is it": lambda: os.getuid() == 0, "root: may become": lambda: libc.setuid(0) == 0,
    "privileges: may be gained": lambda: call(157, 39, 0, 0, 0, 0) == 0, "capabilities: bounding set": lambda: call(157, 23, 0, 0, 0, 0) == 1,
    "environment: host's": lambda: [name for name in os.environ if name == MARK + "_SECRET"],
}  # fmt: skip


def fires(probe):
    """True if it fired within a few seconds, in a process that may die of it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fired = bool(probe())
        except BaseException:
            fired = False
        os.write(write, b"1" if fired else b"0")
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], 15)
    answer = os.read(read, 1) if ready else b"0"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    return answer == b"1"


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(PROBES)
    print(json.dumps([name for name in chosen if fires(PROBES[name])]))
