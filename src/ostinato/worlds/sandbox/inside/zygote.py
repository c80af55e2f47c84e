"""The processes behind every box: the keeper, a supervisor in the host's namespaces, and the zygote, from which each box is cloned.

Run as a script by path (``python -s -S -P zygote.py <control> <requests> <settings>``), on the standard library alone, so that it starts
fast and holds no secrets. The keeper opens layers for the host and removes the control groups at the end. The zygote has its own user,
pid, mount and network namespaces and a read-only root with the Python runtime; started by root, it becomes nobody. `native/zygote.c` is its
loop.

    ostinato ──requests──▶ keeper (the host's mounts; opens layers)
        │    ──control───▶ └─ zygote (pid 1 of its namespace; compiled filter, empty keyring, warm interpreter)
        └──────box────────────▶ └─ pid 1 of a box (fresh namespaces; starts programs, watches, answers) ── programs
"""

from __future__ import annotations

import ast  # noqa: F401 # pyright: ignore[reportUnusedImport] - warms it up for graded programs
import builtins
import contextlib
import ctypes
import gc
import json
import os
import random  # noqa: F401 # pyright: ignore[reportUnusedImport] - as ast
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import kernel as k
from compare import write_changes
from groups import ControlGroups
from root import build_root

del sys.path[0]

NOBODY = 65534  # what a zygote started by root becomes: no outer uid 0 is ever mapped into a box
KEYCTL = {"x86_64": 250, "aarch64": 219}
SYS_LANDLOCK_CREATE = 444


class BoxSettings(ctypes.Structure):
    """`struct settings` of native/sandbox.h."""

    _fields_ = [
        ("proc", ctypes.c_int), ("memory", ctypes.c_int), ("memory_version", ctypes.c_int), ("landlock", ctypes.c_int),
        ("time_namespace", ctypes.c_int), ("cgroup_namespace", ctypes.c_int), ("filter_instructions", ctypes.c_int),
        ("root", ctypes.c_int), ("filter", ctypes.c_void_p),
    ]  # fmt: skip


# ---------------------------------------------------------------- the keeper


def idmap(owner: int) -> int:
    """Return a user namespace that maps a layer's owner to NOBODY, so that boxes may change their copies of its files."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        k.call("unshare", k.CLONE_NEWUSER)
        os.write(write, b"1")
        signal.pause()
    os.read(read, 1)
    proc = os.open(f"/proc/{child}", os.O_PATH)
    for name in ("uid_map", "gid_map"):
        k.write_at(proc, name, f"{owner} {NOBODY} 1")
    users = os.open("ns/user", os.O_RDONLY, dir_fd=proc)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for fd in (read, write, proc):
        os.close(fd)
    return users


def open_layer(path: str, root: bool) -> int:
    """Return a detached, read-only copy of the mount at a directory of the host. Raises StepError."""
    with k.step("open the layer"):
        place = os.open(path, os.O_PATH | os.O_DIRECTORY)  # a file could not be attached, which would end the zygote
        owner = os.stat(place).st_uid
        tree = k.open_tree(place, "")
        os.close(place)
    with k.step("make the layer read-only"):
        k.set_attributes(tree, "", k.ATTR_RDONLY | k.ATTR_NOSUID | k.ATTR_NODEV)
    if root and owner != NOBODY:
        with k.step("show the layer's owner as nobody (Linux 5.19 and a file system that can)"):
            users = idmap(owner)
            k.set_attributes(tree, "", k.ATTR_IDMAP, users=users, deep=False)
            os.close(users)
    return tree


def keep(requests: socket.socket, zygote: int, groups: ControlGroups | None, root: bool) -> None:
    """Run the keeper: open layers until the zygote or the host is gone, then clean up."""

    def ended(*_: Any) -> None:
        if os.waitid(os.P_PID, zygote, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            requests.close()

    signal.signal(signal.SIGCHLD, ended)
    try:
        while True:
            message = requests.recv(65536)
            if not message:
                break
            try:
                tree = open_layer(message.decode(), root)
                socket.send_fds(requests, [b"{}"], [tree])
                os.close(tree)
            except k.StepError as error:
                requests.send(json.dumps(error.report).encode())
            except OSError as error:
                requests.send(json.dumps({"step": "open the layer", "error": str(error)}).encode())
    except OSError:
        pass
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.kill(zygote, signal.SIGKILL)
    os.waitpid(zygote, 0)  # returns only after the kernel has ended every process of its pid namespace
    if groups is not None:
        groups.close()


# ---------------------------------------------------------------- the zygote


def leave_host(given: dict[str, Any], root: bool) -> int:
    """Enter new namespaces with their own root and network, and become nobody if `root`. Return a descriptor for making mount points."""
    with k.step("unshare mount, ipc and network namespaces"):
        k.call("unshare", k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWIPC)
    k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
    writable = build_root(given["prefix"], given["version"], given["full"])
    if root:
        with k.step(f"become uid {NOBODY}"):
            for place in (".", "tmp/layers"):
                os.chown(place, NOBODY, NOBODY, dir_fd=writable)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        # the change of uid gave /proc/self to root and made the maps unwritable
        k.call("prctl", k.PR_SET_DUMPABLE, 1, 0, 0, 0)
        with k.step("unshare the user namespace"):
            k.call("unshare", k.CLONE_NEWUSER | k.CLONE_NEWNS | k.CLONE_NEWNET)
    k.call("prctl", k.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return writable


def lower_priority(gives_way: bool) -> bool:
    """Put all boxes into one session, and so into one scheduler autogroup, with about a tenth of the usual weight if `gives_way`.

    Return False if `gives_way` and the kernel has no autogroups.
    """
    os.setsid()
    if not gives_way:
        return True
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write("10")
    except OSError:
        os.nice(5)
        return False
    return True


def forget_arguments() -> None:
    """Overwrite the command line in memory with "init", here and in all boxes, because it contains paths of the host."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end; the state is the first field after the name
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, b"init", min(4, end - start - 1))


def detect_features(
    settings: BoxSettings, given: dict[str, Any], grouped: bool, groups: ControlGroups | None
) -> list[str]:
    """Set the features that this kernel offers in `settings`, and return messages about those that it lacks."""
    missing: list[str] = []
    settings.landlock = max(0, k.libc.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
    settings.time_namespace = int(os.path.exists("/proc/self/timens_offsets"))
    settings.cgroup_namespace = int(os.path.exists("/proc/self/ns/cgroup"))
    if settings.landlock == 0:
        missing.append("no Landlock (Linux 5.13): mounts alone protect the file system")
    elif settings.landlock < 6:
        missing.append("Landlock without scopes (Linux 6.12): every sandbox gets a network namespace of its own")
    if not settings.time_namespace:
        missing.append("no time namespaces (Linux 5.6): programs see how long the host has been up")
    if groups is None or groups.memory is None:
        missing.append(
            "no writable memory cgroup: a poller, not the kernel, enforces the memory limit, which a burst may exceed"
        )
    if given["gives_way"] and (groups is None or not groups.shares):
        tail = "" if grouped else ", nor scheduler autogroups"
        missing.append(
            f"no writable processor cgroup{tail}: programs that start their own sessions get a full share of the processor"
        )
    return missing


def start_zygote(
    control: socket.socket, given: dict[str, Any], groups: ControlGroups | None, root: bool, proc: int
) -> None:
    """Become the zygote, report the kernel's features to the host, and serve."""
    settings = BoxSettings(proc=proc, memory=-1)
    library = ctypes.PyDLL(given["library"])  # keeps the GIL, which a child needs when it returns from `serve`
    code = ctypes.create_string_buffer(bytes.fromhex(given["filter"]))
    settings.filter, settings.filter_instructions = ctypes.addressof(code), (len(code) - 1) // 8
    grouped = lower_priority(given["gives_way"])
    forget_arguments()
    missing = detect_features(settings, given, grouped, groups)
    if groups is not None and groups.memory is not None:
        settings.memory, settings.memory_version = os.open(groups.memory, os.O_PATH | os.O_DIRECTORY), groups.version
    settings.root = leave_host(given, root)
    if root:
        with k.step("map the user"):
            k.map_user(proc, NOBODY, NOBODY)
    number = KEYCTL.get(os.uname().machine)
    if number is not None:
        k.libc.syscall(number, 1, None, 0, 0, 0)  # join a fresh session keyring: nothing inherited can be read
    if not os.path.ismount("/tmp/proc"):
        missing.append("no /proc of its own (this one is partly hidden): programs see none")
    os.umask(0)
    library.configure(ctypes.byref(settings))
    hello = {
        "missing": missing,
        "landlock": settings.landlock,
        "memory": settings.memory_version,
        "proc": os.path.ismount("/tmp/proc"),
    }
    control.send(json.dumps(hello).encode())
    serve_and_attach(control, library, settings.root)


# ---------------------------------------------------------------- children of the native loop that continue in Python


def interpret(path: str) -> int:
    """Run a Python file as ``__main__`` in this warm interpreter, several times faster than a new one. Return the exit code."""
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


def c_strings(library: Any, name: str) -> list[str]:
    """Return the library's NULL-terminated array of C strings `name`."""
    array = ctypes.POINTER(ctypes.c_char_p).in_dll(library, name)
    found: list[str] = []
    while (text := array[len(found)]) is not None:
        found.append(os.fsdecode(text))
    return found


def continue_child(body: int, library: Any) -> NoReturn:
    """Run the requested Python program if `body` is 1, else compute the workspace's diff; then exit."""
    status = 126
    try:
        if body == 1:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.environ.clear()
            for text in c_strings(library, "body_environment"):
                name, _, value = text.partition("=")
                os.environ[name] = value
            for name in ("kernel", "groups", "root", "view", "compare"):
                sys.modules.pop(name, None)
            status = interpret(c_strings(library, "body_arguments")[0])
        else:
            count = ctypes.c_int.in_dll(library, "body_count").value
            fds = list((ctypes.c_int * 250).in_dll(library, "body_fds"))[:count]
            write_changes(fds[0], fds[1], fds[2], fds[3:])
            status = 0
    finally:
        os._exit(status)


# ---------------------------------------------------------------- start-up


def serve_and_attach(control: socket.socket, library: Any, writable: int) -> None:
    """Run the native loop. It returns at the end, when a layer must be attached, and in a child that continues in Python."""
    gc.collect()
    gc.freeze()
    layer = 0
    while True:
        python = ctypes.pythonapi
        python.PyOS_BeforeFork()
        body = library.serve(control.fileno())
        if body in (1, 2):
            python.PyOS_AfterFork_Child()
            continue_child(body, library)
        python.PyOS_AfterFork_Parent()
        if body == 0:
            os._exit(0)
        tree = ctypes.c_int.in_dll(library, "layer").value
        os.mkdir(f"tmp/layers/{layer}", 0o755, dir_fd=writable)
        k.attach(tree, f"/tmp/layers/{layer}")
        os.close(tree)
        control.send(str(layer).encode())
        layer += 1


def main() -> None:
    """Start the keeper and its zygote. The zygote reports the kernel's features, or the step that the kernel refused."""
    control, requests = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    with open(int(sys.argv[3])) as file:
        given = json.load(file)
    for end in (control, requests):
        end.set_inheritable(False)
    # the terminal sends them to the caller too, which then closes the sockets
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    root, uid, gid = os.geteuid() == 0, os.getuid(), os.getgid()
    groups: ControlGroups | None = None
    zygote = -1
    try:
        with k.step("open /proc"):
            proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        groups = ControlGroups(gives_way=given["gives_way"]) if given["groups"] else None
        if groups is not None and root:
            groups.give(NOBODY)
        with k.step("unshare the user namespace"):
            k.call("unshare", k.CLONE_NEWNS | k.CLONE_NEWPID | (0 if root else k.CLONE_NEWUSER))
        if not root:
            with k.step("map the user"):
                k.map_user(proc, uid, gid)
        with k.step("make mounts private"):
            k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
        zygote = os.fork()
        if zygote == 0:
            requests.close()
            if groups is not None:
                groups.release_locks()
            start_zygote(control, given, groups, root, proc)
    except k.StepError as error:
        control.send(json.dumps(error.report).encode())
        if groups is not None and zygote:
            groups.close()
        os._exit(1)
    control.close()
    keep(requests, zygote, groups, root)


if __name__ == "__main__":
    main()
