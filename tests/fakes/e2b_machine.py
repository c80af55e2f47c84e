"""One machine of the fake E2B server: namespaces on this host, an overlay over this host's files, no network. Needs root.

Run as a program it prints the process id of the machine's pid 1, and lives until its standard input ends.
"""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
NOSUID, NODEV, BIND, REC, PRIVATE, DETACH = 2, 4, 4096, 16384, 1 << 18, 2
EMPTY = ("tmp", "root", "home", "opt", "run", "work", "var/tmp", "mnt")
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source, target, kind, flags=0, data=None):
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def build(stage):
    """Build the machine's file system: its writes stay in memory, and the host's homes and temporary files are hidden."""
    mount("tmpfs", stage, "tmpfs", NOSUID | NODEV, "size=1g")
    root = f"{stage}/root"
    for name in ("up", "work", "root"):
        os.mkdir(f"{stage}/{name}")
    mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={stage}/up,workdir={stage}/work")
    mount("proc", f"{root}/proc", "proc")
    mount("/dev", f"{root}/dev", None, BIND | REC)
    for name in EMPTY:
        os.makedirs(f"{root}/{name}", exist_ok=True)
        mount(
            "tmpfs", f"{root}/{name}", "tmpfs", NOSUID | NODEV, "mode=1777" if "tmp" in name else "mode=755"
        )  # /root too: nothing may depend on it
    os.chdir(root)
    call("syscall", PIVOT_ROOT[os.uname().machine], b".", b"mnt")
    os.chdir("/")
    call("umount2", b"/mnt", DETACH)


def live(stage):
    """Pid 1: builds the machine, then reaps orphaned processes."""
    call("prctl", 1, signal.SIGKILL, 0, 0, 0)
    call("unshare", NEWNS | NEWNET | NEWIPC | NEWUTS | NEWCGROUP)
    call("umount2", stage.encode(), DETACH)
    build(stage)
    os.write(1, b"ready\n")
    for fd in (0, 1):
        os.close(fd)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.05)


def swept(group):
    """Remove a control group and its subgroups, once no process is left in them."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            for directory, _, _ in os.walk(group, topdown=False):
                os.rmdir(directory)
            return
        time.sleep(0.02)


def main():
    stage = tempfile.mkdtemp(prefix="e2b-fake-")
    call("unshare", NEWNS | NEWPID)
    mount("none", "/", None, REC | PRIVATE)
    mount("none", stage, "cgroup2")
    group = f"{stage}/{os.path.basename(stage)}"
    os.mkdir(group)
    begin, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(begin, 1)
        try:
            live(stage)
        finally:
            os._exit(1)
    with open(f"{group}/cgroup.procs", "w") as members:
        members.write(str(pid))
    os.write(go, b"x")
    os.write(1, f"{pid}\n".encode())
    sys.stdin.buffer.read()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    swept(group)
    call("umount2", stage.encode(), DETACH)
    os.rmdir(stage)


if __name__ == "__main__":
    main()
