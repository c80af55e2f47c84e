"""The root file system of boxes: the system's programs and the interpreter's standard library, mounted read-only on an empty tmpfs."""

from __future__ import annotations

import errno
import os

import kernel as k
from view import ETC, SHOWN, SYSTEM, masks, python_parts

DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
AT = "/tmp"  # where the new root is built; its /tmp holds what no box may see, since every box mounts over it
HIDDEN = f"{AT}/tmp"


def _touch(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o444))


def _make_like(source: str, target: str) -> None:
    """Make an empty directory or file for `source` to be mounted on."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        _touch(target)


def bind(source: str, target: str) -> None:
    """Bind-mount a host path at `target`, read-only."""
    _make_like(source, target)
    k.mount(source, target, None, k.MS_BIND | k.MS_REC)
    k.set_attributes(k.AT_FDCWD, target, k.ATTR_RDONLY | k.ATTR_NOSUID | k.ATTR_NODEV)


def show_system() -> None:
    """Mount the system's directories; `show_python` later covers /usr/local."""
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), f"{AT}{path}")
        elif os.path.isdir(path):
            bind(path, f"{AT}{path}")


def show_python(prefix: str, version: str) -> None:
    """Mount the interpreter, its standard library and the shared libraries beside that; add links to it in /usr/local/bin.

    For an installation in a home directory, that path exists inside with nothing but the installation in it.
    """
    shown = python_parts(prefix, version)
    local = f"{HIDDEN}/local"
    os.makedirs(f"{local}/bin")
    for name in ("python", "python3"):
        os.symlink(f"{prefix}/{shown[0]}", f"{local}/bin/{name}")
    if prefix == "/usr/local":
        for name in shown:
            _make_like(f"{prefix}/{name}", f"{local}/{name}")
    sources = {name: k.open_tree(k.AT_FDCWD, f"{prefix}/{name}") for name in shown} if prefix != "/usr" else {}
    if os.path.isdir("/usr/local"):
        bind(local, f"{AT}/usr/local")
    for name, tree in sources.items():
        target = f"{AT}{prefix}/{name}"
        if not os.path.exists(target):
            _make_like(f"{prefix}/{name}", target)
        k.attach(tree, target)
        k.set_attributes(k.AT_FDCWD, target, k.ATTR_RDONLY | k.ATTR_NOSUID | k.ATTR_NODEV)
        os.close(tree)
    os.mkdir(f"{HIDDEN}/empty", 0o755)
    for path in masks(prefix, version):
        if os.path.isdir(f"{AT}{path}"):
            bind(f"{HIDDEN}/empty", f"{AT}{path}")


def show_devices(full: bool) -> None:
    """Mount five harmless devices, and if `full` also create the paths in /dev, /proc and /etc that programs expect."""
    for name in DEVICES:
        _touch(f"{AT}/dev/{name}")
        k.mount(f"/dev/{name}", f"{AT}/dev/{name}", None, k.MS_BIND)
    if not full:
        return
    os.mkdir(f"{AT}/proc", 0o555)
    os.mkdir(f"{AT}/dev/shm", 0o755)
    for name, target in LINKS.items():
        os.symlink(target, f"{AT}/dev/{name}")
    os.makedirs(f"{AT}/etc")
    for name, text in ETC.items():
        with open(f"{AT}/etc/{name}", "w") as file:
            file.write(text)
    for name in SHOWN:
        if os.path.exists(f"/etc/{name}") and not os.path.islink(f"/etc/{name}"):
            bind(f"/etc/{name}", f"{AT}/etc/{name}")


def build_root(prefix: str, version: str, full: bool) -> int:
    """Build the root, pivot to it and detach the host's. Return a descriptor through which the new root is still writable.

    Its /tmp holds `proc` (a complete /proc, without which the kernel refuses boxes their own) and `layers`. Raises StepError.
    """
    if prefix.startswith("/tmp/"):
        raise k.StepError(
            "show the Python installation", OSError(errno.EINVAL, "it is below /tmp, which is replaced in every run")
        )
    with k.step("mount the root tmpfs"):
        devices = [name for name in DEVICES if not os.path.exists(f"/dev/{name}")]
        if devices:
            raise OSError(errno.ENOENT, f"no /dev/{devices[0]}")
        k.mount("tmpfs", AT, "tmpfs", k.MS_NOSUID, "size=8m,mode=755")
    with k.step("show the system"):
        os.mkdir(HIDDEN, 0o755)
        show_system()
    with k.step("show the Python installation"):
        show_python(prefix, version)
    with k.step("show the devices"):
        show_devices(full)
    with k.step("show /proc"):
        os.mkdir(f"{HIDDEN}/proc", 0o700)
        os.mkdir(f"{HIDDEN}/layers", 0o700)
        try:
            k.mount("proc", f"{HIDDEN}/proc", "proc", k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC)
        except OSError:
            if full:
                os.rmdir(f"{AT}/proc")
    with k.step("change the root"):
        os.chdir(AT)
        writable = k.open_tree(k.AT_FDCWD, AT)
        k.call("pivot_root", b".", b".")
        k.call("umount2", b".", k.MNT_DETACH)
        os.chdir("/")
        k.set_attributes(k.AT_FDCWD, "/", k.ATTR_RDONLY | k.ATTR_NOSUID, deep=False)
    return writable
