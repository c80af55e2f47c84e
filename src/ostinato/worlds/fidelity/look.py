"""Prints the features of the machine that a program can see, as one line of JSON. Runs the same in a sandbox and on a real machine.

It needs only the standard library (Python 3.10 or newer), not Ostinato: `python3 -s look.py [NAME] >> production.jsonl`. It sends nothing
over a network, and leaves out what may be secret: the values of environment variables (except `PLAIN`), and the names of the machine and
its users. NAME is the line's group, which all observations of one machine share; the default is a hash of the host's name.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

PLAIN = ("LANG", "PATH", "SHELL", "TERM")
"""Environment variables whose values describe the machine and reveal nothing about its owner."""
TOOLS = (
    "awk bash cargo clang curl docker emacs ffmpeg gcc gdb git go gzip htop java jq less make man nano node npm openssl perl pip pip3 ps "
    "psql pytest python python3 rg rsync ruby rustc sed ssh strace sudo systemctl tar tmux uname unzip uv vim wget which zip zsh"
)
"""Programs that a developer's machine may have."""
Value = float | str
Features = Iterator[tuple[str, Value]]


def shape(text: str) -> str:
    """Replace each run of letters by "a" and each run of digits by "0". Example: ``shape("web-12.lan") == "a-0.a"``"""
    return re.sub(r"[A-Za-z]+", "a", re.sub(r"[0-9]+", "0", text))


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 20)


def system() -> Features:
    """Yield features of the host name, kernel and distribution."""
    name = socket.gethostname()
    yield "host.shape", shape(name)
    yield "host.length", float(len(name))
    yield "kernel.system", platform.system()
    yield "kernel.version", ".".join(platform.release().split(".")[:2])
    yield "kernel.flavour", re.sub(r"[0-9.]+", "", platform.release())
    yield "kernel.machine", platform.machine()
    parts = [line.partition("=") for line in _text("/etc/os-release").splitlines()]
    known = {name: value for name, _, value in parts}
    yield "os", f"{known.get('ID', '?')} {known.get('VERSION_ID', '?')}".replace('"', "")


def mounts() -> Features:
    """Yield the number of mounted file systems, by kind."""
    lines = [line.split() for line in _text("/proc/self/mounts").splitlines()]
    kinds = [line[2] for line in lines]
    yield "mounts", float(len(lines))
    for kind in sorted(set(kinds)):
        yield f"mount.kind:{kind}", float(kinds.count(kind))
    yield "mount.root", next((line[2] for line in reversed(lines) if line[1] == "/"), "none")


def clock() -> Features:
    """Yield the time zone and the uptime."""
    yield "clock.zone", time.strftime("%Z")
    yield "uptime_s", float(_text("/proc/uptime").split()[0])


def environment() -> Features:
    """Yield the names of the environment variables, and the values of those in `PLAIN`."""
    yield "env", float(len(os.environ))
    for name in sorted(os.environ):
        yield f"env:{name}", 1.0
    home = os.path.expanduser("~")
    for name in PLAIN:
        if name in os.environ:
            yield f"env.value:{name}", os.environ[name].replace(home, "~") if len(home) > 1 else os.environ[name]


def person() -> Features:
    """Yield features of the current user and the home directory."""
    yield "user.uid", float(os.getuid())
    yield "user.root", float(os.getuid() == 0)
    yield "user.groups", float(len(os.getgroups()))
    yield "user.shape", shape(getpass.getuser())
    home = os.path.expanduser("~")
    yield "home.depth", float(home.count("/"))
    entries = os.listdir(home)
    yield "home.entries", float(len(entries))
    for name in (".bash_history", ".bashrc", ".cache", ".config", ".gitconfig", ".profile", ".ssh"):
        yield f"home.has:{name}", float(name in entries)


def resources() -> Features:
    """Yield the visible processors, disk and processes."""
    yield "cpu.count", float(os.cpu_count() or 0)
    yield "cpu.usable", float(len(os.sched_getaffinity(0)))
    disk = shutil.disk_usage(".")
    yield "disk.total_gb", disk.total / 1e9
    yield "disk.used_share", disk.used / max(1, disk.total)
    shown = [name for name in os.listdir("/proc") if name.isdigit()]
    yield "processes", float(len(shown))
    yield "process.id", float(os.getpid())
    yield "process.first", _text("/proc/1/comm").strip()


def memory() -> Features:
    """Yield the memory that /proc shows."""
    known = {line.split(":")[0]: float(line.split()[1]) for line in _text("/proc/meminfo").splitlines()}
    yield "memory.total_gb", known["MemTotal"] / 1e6
    yield "memory.free_share", known.get("MemAvailable", 0.0) / known["MemTotal"]
    yield "memory.swap_gb", known.get("SwapTotal", 0.0) / 1e6


def network() -> Features:
    """Yield network interfaces, routes and resolvers. Nothing is sent."""
    names = [name for _, name in socket.if_nameindex()]
    yield "net.interfaces", float(len(names))
    for name in sorted({shape(name) for name in names}):
        yield f"net.interface:{name}", 1.0
    yield "net.routes", float(max(0, len(_text("/proc/net/route").splitlines()) - 1))
    yield "net.resolvers", float(_text("/etc/resolv.conf").count("nameserver"))


def files() -> Features:
    """Yield the number of files and their age in days, in directories where programs look first."""
    now = time.time_ns() / 1e9
    for name, place in (
        ("etc", "/etc"),
        ("tmp", tempfile.gettempdir()),
        ("work", "."),
        ("home", os.path.expanduser("~")),
    ):
        ages = [(now - entry.stat(follow_symlinks=False).st_mtime) / 86_400 for entry in os.scandir(place)]
        yield f"files.{name}", float(len(ages))
        if ages:
            yield f"files.{name}.median_days", statistics.median(ages)
            yield f"files.{name}.newest_days", min(ages)
    yield "work.git", float(os.path.exists(".git"))
    yield "work.shape", shape(os.getcwd())


def tools() -> Features:
    """Yield which programs are on the PATH."""
    for name in TOOLS.split():
        yield f"tool:{name}", float(shutil.which(name) is not None)
    yield "python", platform.python_version()


def latency() -> Features:
    """Yield the latency of trivial operations in milliseconds, as the median of five."""
    yield "ms.true", _median(lambda: subprocess.run(["true"], check=False))
    yield "ms.shell", _median(lambda: subprocess.run(["sh", "-c", ":"], check=False))

    def write() -> None:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 18))

    yield "ms.write", _median(write)
    yield "ms.stat", _median(lambda: [os.stat("/") for _ in range(1000)])


def _median(act: Callable[[], object]) -> float:
    spent: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        act()
        spent.append(1e3 * (time.perf_counter() - began))
    return statistics.median(spent)


PARTS: tuple[Callable[[], Features], ...] = (
    system, mounts, clock, environment, person, resources, memory, network, files, tools, latency,
)  # fmt: skip


def look() -> dict[str, Value]:
    """Return all features by name. A part that fails loses its remaining features, and the failure becomes a feature."""
    features: dict[str, Value] = {}
    for part in PARTS:
        try:
            features.update(part())
        except (OSError, KeyError, ValueError, IndexError) as error:
            features[f"unseen:{part.__name__}"] = type(error).__name__
    return features


if __name__ == "__main__":
    named = sys.argv[1] if len(sys.argv) > 1 else hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]
    sys.stdout.write(json.dumps({"group": named, "features": look()}) + "\n")
