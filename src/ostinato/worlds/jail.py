"""The fork server behind `sandbox.py`: a clean process that builds an empty root once and forks every run out of it.

Run as a script by path (``python -I -S jail.py <control fd>``), standard library only, so that it starts fast and holds nothing
worth stealing. In the data flow: `SingleRuns.run` sends a request and three pipes over the control socket; this process forks a
supervisor, which makes new namespaces, starts the program under a tiny init, waits for its end or for the deadline, and writes
one line of JSON into the status pipe. Killing the init kills every process of the run, whatever it did to its signals.

    sandbox.py ──control──▶ jail.py (pid 1 of its own pid namespace, root = a read-only tmpfs, not root)
                              └─ supervisor (fresh user, mount, pid, net, ipc, uts namespaces)
                                   └─ init (pid 1, no capabilities) ── program (pid 2, rlimits, no_new_privs)
"""

from __future__ import annotations

import ast  # noqa: F401 # pyright: ignore[reportUnusedImport] - graded programs want it: warm it up
import builtins
import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Generator
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000  # the same number on every architecture; Linux 5.12
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
NOBODY = 65534  # what a jail started by root becomes before any user namespace exists: no outer uid 0 is ever mapped
INSIDE = 1000  # the uid and gid that a program sees
DEVICES = ("null", "zero", "urandom")
REQUEST_BYTES = 64 << 20

libc = ctypes.CDLL(None, use_errno=True)


class StepError(Exception):
    """A system call that isolates failed: which step, and the kernel's reason."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(f"{step}: {error}")
        where = f" ({error.filename})" if error.filename else ""
        self.report = {"step": step, "error": f"{error.strerror or error}{where}"}


@contextlib.contextmanager
def step(name: str) -> Generator[None]:
    """Name the step that an OSError came from."""
    try:
        yield
    except OSError as error:
        raise StepError(name, error) from error


def call(name: str, *args: Any) -> int:
    """One libc call; a negative result becomes an OSError."""
    result: int = getattr(libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system, or bind one place to another."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    call("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


def lock_down(path: str, attributes: int) -> None:
    """Set mount attributes on a mount and all mounts below it, keeping those that it has."""
    attr = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    empty = ctypes.c_char_p(path.encode())
    call("syscall", SYS_MOUNT_SETATTR, ctypes.c_int(-100), empty, AT_RECURSIVE, ctypes.byref(attr), ctypes.c_size_t(32))


def write_at(directory: int, path: str, text: str) -> None:
    """Write a small kernel file below an open directory."""
    fd = os.open(path, os.O_WRONLY, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def map_user(proc: int, uid: int, gid: int) -> None:
    """In a fresh user namespace: be INSIDE, who is `uid` outside. Nobody else exists."""
    write_at(proc, "self/setgroups", "deny")
    write_at(proc, "self/uid_map", f"{INSIDE} {uid} 1")
    write_at(proc, "self/gid_map", f"{INSIDE} {gid} 1")


def drop_capabilities() -> None:
    """Give up every capability and the ways to get one back."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


# ---------------------------------------------------------------- once: the empty root


def bind(fd: int, target: str, directory: bool) -> None:
    """Bind what an O_PATH descriptor names; works although the source's own path may be hidden by now."""
    if directory:
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    mount(f"/proc/self/fd/{fd}", target, None, MS_BIND | (MS_REC if directory else 0))


def build_root(prefix: str) -> None:
    """A tmpfs with the runtime read-only, three devices and an empty /tmp; then make it the root and forget the host's."""
    with step("make mounts private"):
        mount("none", "/", None, MS_REC | MS_PRIVATE)
    with step("open the runtime"):
        sources, links = sources_of(prefix)
        devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    with step("mount the root tmpfs"):
        mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID, "size=1m,mode=755")
    with step("bind the runtime"):
        for target, fd in sources.items():
            bind(fd, f"/tmp{target}", directory=True)
            lock_down(f"/tmp{target}", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
        for target, destination in links.items():
            os.symlink(destination, f"/tmp{target}")
        os.mkdir("/tmp/tmp", 0o755)
        os.mkdir("/tmp/dev", 0o755)
        for name, fd in devices.items():
            bind(fd, f"/tmp/dev/{name}", directory=False)
    with step("change the root"):
        os.chdir("/tmp")
        call("pivot_root", b".", b".")
        call("umount2", b".", MNT_DETACH)
        os.chdir("/")
        attr = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
        call("syscall", SYS_MOUNT_SETATTR, ctypes.c_int(-100), b"/", 0, ctypes.byref(attr), ctypes.c_size_t(32))
    for fd in (*sources.values(), *devices.values()):
        os.close(fd)


def sources_of(prefix: str) -> tuple[dict[str, int], dict[str, str]]:
    """Open what the program may see: the system libraries and the Python installation, each at its own path.

    An installation below somebody's home makes that path exist inside, with nothing but the installation in it.
    """
    fds: dict[str, int] = {}
    links: dict[str, str] = {}
    for path in ("/usr", "/lib", "/lib64", "/lib32", "/bin"):
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.isdir(path):
            fds[path] = os.open(path, os.O_PATH)
    if prefix != "/usr" and not prefix.startswith("/usr/"):
        fds[prefix] = os.open(prefix, os.O_PATH)
    return fds, links


def become_jail(control: socket.socket, prefix: str) -> int:
    """Leave the host: own pid namespace, own root, not root. Returns an open /proc for writing the maps of later namespaces."""
    if prefix.startswith("/tmp/"):
        raise StepError(
            "show the Python installation", OSError(errno.EINVAL, "it lies below /tmp, which every run replaces")
        )
    with step("open /proc"):
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    uid, gid, root = os.getuid(), os.getgid(), os.geteuid() == 0
    if root:
        with step("unshare mount and pid namespaces as root"):
            call("unshare", CLONE_NEWNS | CLONE_NEWPID)
    else:
        with step("unshare the user namespace"):
            call("unshare", CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID)
        with step("map the user"):
            map_user(proc, uid, gid)
    child = os.fork()
    if child:  # only waits, so that whoever started this script has one process to kill
        control.close()
        os.waitpid(child, 0)
        os._exit(0)
    build_root(prefix)
    if root:
        with step(f"become uid {NOBODY}"):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # changing uid made /proc/self root's, and the maps unwritable
    call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return proc


# ---------------------------------------------------------------- once per run


def isolate(proc: int, disk_bytes: int) -> None:
    """Fresh namespaces around this process, with an empty /tmp; no further user namespace can be made inside."""
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    with step("unshare the user namespace"):
        call("unshare", flags)
    with step("map the user"):
        map_user(proc, uid, gid)
        write_at(proc, "sys/user/max_user_namespaces", "0")
        write_at(proc, "self/oom_score_adj", "1000")  # short of memory, the kernel shall take this first
    with step("mount /tmp"):
        mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},nr_inodes=4096,mode=700")
        call("sethostname", b"sandbox", 7)


def write_files(files: dict[str, str]) -> None:
    """Put the run's files below /tmp. Names were checked by the sender; contents are Latin-1 text standing for bytes."""
    os.chdir("/tmp")
    with step("write the files (larger than the disk limit?)"):
        for name, content in files.items():
            if "/" in name:
                os.makedirs(os.path.dirname(name), exist_ok=True)
            with open(name, "wb") as file:
                file.write(content.encode("latin-1"))


def limit(limits: dict[str, int]) -> None:
    """Rlimits by name, soft and hard alike."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def interpret(path: str) -> int:
    """Run a Python file as ``__main__`` in this interpreter, which is warm: several times faster than starting another."""
    sys.argv = [path]
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, {"__name__": "__main__", "__builtins__": builtins})
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - what an interpreter's own top level does
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
    return status & 255


def program(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Become the program: an argv, or a Python file in this interpreter. A failed exec is exit code 127 as in a shell."""
    os.setsid()
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    os.closerange(3, 1024)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    limit(request["limits"])
    os.environ.clear()
    os.environ.update(request["env"])
    argv = request["argv"]
    if request["python"]:
        os._exit(interpret(argv[0]))
    try:
        os.execv(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def init(request: dict[str, Any], fds: list[int], report: int) -> NoReturn:
    """Pid 1 of the run: start the program, reap orphans, report the program's status, and end, which ends all the rest."""
    call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    drop_capabilities()
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program has the same uid and must not trace its init
    child = os.fork()
    if child == 0:
        try:
            program(request, fds)
        finally:
            os._exit(126)
    for fd in fds:
        os.close(fd)
    while True:
        pid, status = os.wait()
        if pid == child:
            os.write(report, b"%d" % os.waitstatus_to_exitcode(status))
            os._exit(0)


def supervise(request: dict[str, Any], fds: list[int], status: int, proc: int) -> dict[str, Any]:
    """One run from the outside: isolate, start the init, wait for its end, the deadline, or a caller who is gone."""
    isolate(proc, request["disk_bytes"])
    write_files(request["files"])
    os.close(proc)
    read, write = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            init(request, fds, write)
        finally:
            os._exit(126)
    for fd in (*fds, write):
        os.close(fd)
    poll = select.poll()
    poll.register(read, select.POLLIN)
    poll.register(status, 0)  # reports POLLERR once nobody reads the status any more: the run was cancelled
    ready = dict(poll.poll(1000 * request["timeout"]))
    reason = "" if read in ready else ("cancelled" if ready else "timeout")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # returns only after the kernel has ended every process of the pid namespace
    code = os.read(read, 16) if not reason else b""
    return {"code": int(code) if code else -9, "reason": reason, "seconds": time.monotonic() - started}


def supervisor(message: bytes, fds: list[int], proc: int) -> NoReturn:
    """The forked child that serves one request; its last act is one JSON line in the status pipe."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request_fd, *standard, status = fds
    answer: dict[str, Any]
    try:
        request = json.loads(os.pread(request_fd, REQUEST_BYTES, 0))
        os.close(request_fd)
        answer = supervise(request, standard, status, proc)
    except StepError as error:
        answer = error.report
    except Exception as error:  # noqa: BLE001 - the sender must hear of anything that went wrong here
        answer = {"step": f"supervise ({message.decode()})", "error": repr(error)}
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(answer).encode())
    os._exit(0)


def serve(control: socket.socket, proc: int) -> None:
    """Fork one supervisor per message until the other side is gone; then end, and every run with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 64, 5)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            supervisor(message, fds, proc)
        for fd in fds:
            os.close(fd)


def main() -> None:
    """``jail.py <control fd> <python prefix>``: says hello, or which step the kernel refused."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the caller, who then closes the socket
    try:
        proc = become_jail(control, sys.argv[2])
    except StepError as error:
        control.send(json.dumps(error.report).encode())
        return
    control.send(b"{}")
    serve(control, proc)


if __name__ == "__main__":
    main()
