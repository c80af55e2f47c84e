"""The hosts: each has namespaces of its own (network, processes, mounts, name), a directory that the others do not see, and no other disk.

A host is a process that waits for its input to end, as the first process of its namespaces. When it ends, for whatever reason, the kernel
kills everything in the namespaces and removes them. Its input is a pipe from this process, so even after a kill -9 of this process nothing
is left but directories, which the next lab removes.

A host may write only to its directory (`/mnt`, and `/tmp` and `/dev/shm` in memory). The rest of the disk, Python and this project, is
read-only; if the kernel has overlays, a host may keep its own compiled kernels beside the sources.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.examinations.hosts.wire import INTERFACE, MTU

import ostinato

PREFIX = "ostinato-hosts-"
PLACE = Path("/mnt")
"""A host's own directory, as seen by the host."""
ROOT = Path(__file__).parents[3]
_PACKAGE = Path(ostinato.__file__).parent
_TOOLS = ("unshare", "nsenter", "ip", "mount", "findmnt")
_BOOT = f"""
set -e
trap '' CHLD  # whose parent died is reaped by the kernel
hostname "$1"
mount --bind "$2" {PLACE}
mkdir -p {PLACE}/home {PLACE}/.upper {PLACE}/.work
for hidden in /tmp /var/tmp /dev/shm "$3"; do [ -d "$hidden" ] && mount -t tmpfs tmpfs "$hidden"; done
mount -t overlay overlay -o "lowerdir=$4,upperdir={PLACE}/.upper,workdir={PLACE}/.work" "$4" 2>/dev/null || true
mount -o remount,bind,ro /
ip link set lo up
echo ready
exec cat
"""


def missing() -> str:
    """Why this machine cannot run a lab, or "" if it can."""
    if os.geteuid() != 0:
        return "a host needs namespaces of its own: run it as root"
    if not Path("/dev/net/tun").exists():
        return "this kernel has no TUN devices (/dev/net/tun)"
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(absent)} (apt-get install util-linux iproute2 mount)"
    hidden = [Path("/tmp"), Path("/var/tmp")]
    needed = [ROOT, Path(sys.prefix), Path(sys.base_prefix), _PACKAGE]
    if inside := [path for path in needed if any(path.is_relative_to(place) for place in hidden)]:
        return f"{inside[0]} lies in a temporary directory, which a host has to itself; move it"
    return ""


class Process:
    """A program on a host. `nsenter` waits for it, so our child process ends with it."""

    def __init__(self, name: str, child: subprocess.Popen[bytes]) -> None:
        self.name, self._child = name, child

    @property
    def pid(self) -> int:
        """The pid of `nsenter`."""
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program itself."""
        for pid in _children(self._child.pid):
            os.kill(pid, number)

    def wait(self, timeout_s: float) -> int:
        """Wait for the program. Returns its exit status. Raises TimeoutError."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} has not ended after {timeout_s:g} s") from None


class Host:
    """One machine. `directory` is the host's disk as seen from outside."""

    def __init__(self, lab: Lab, name: str, address: str) -> None:
        self.name, self.address, self.directory = name, address, lab.directory / name
        self.directory.mkdir(mode=0o755)
        self._lab = lab
        self._init: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def boot(self) -> None:
        """Start the host. The contents of its disk are kept."""
        flags = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "--propagation", "private"]
        words = ["sh", "-c", _BOOT, "boot", self.name, self.directory, self._lab.directory, _PACKAGE]
        with (self._lab.directory / f"{self.name}.boot").open("ab") as log:
            self._init = subprocess.Popen(
                ["unshare", *flags, *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        assert self._init.stdout is not None
        if self._init.stdout.readline().strip() != b"ready":
            raise RuntimeError(
                f"host {self.name} did not start: {(self._lab.directory / f'{self.name}.boot').read_text()}"
            )
        (self._pid,) = _children(self._init.pid)
        self._lab.tell_wire({"host": [self._pid, self.address]})
        for words in (["addr", "add", f"{self.address}/24", "dev"], ["link", "set", "mtu", str(MTU), "up", "dev"]):
            self.run("ip", *words, INTERFACE)

    def kill(self) -> None:
        """Simulate a power failure: first no packet leaves the host any more, then everything on it is killed at once."""
        assert self._init is not None
        self._lab.tell_wire({"gone": self.address})
        self.end()

    def end(self) -> None:
        """Kill everything on the host, if it is running."""
        if self._init is not None:
            os.kill(self._pid, signal.SIGKILL)
            self._init.communicate()
            self._init = None

    def start(self, name: str, *words: object, user: str = "", **environment: str) -> Process:
        """Start a program with its output in the host's file `NAME.log`. `user`: "uid:gid", root if empty."""
        with (self.directory / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                self._inside(words, user), env=self._environment(environment), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return Process(f"{name} on {self.name}", child)

    def run(self, *words: object, user: str = "", check: bool = True, **environment: str) -> str:
        """Run a program to its end. Returns its output. Raises RuntimeError for a nonzero status, if `check`."""
        done = subprocess.run(
            self._inside(words, user), env=self._environment(environment), stdin=subprocess.DEVNULL, capture_output=True, check=False
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(map(str, words))[:200]}: {done.stderr.decode()[-2000:]}")
        return done.stdout.decode()

    def _inside(self, words: Iterable[object], user: str) -> list[str]:
        who = user.split(":") if user else []
        flags = [f"-{flag}{number}" for flag, number in zip("SG", who, strict=False)]
        enter = ["nsenter", "-t", str(self._pid), "-m", "-u", "-i", "-n", "-p", *flags]
        return [*enter, "sh", "-c", f'cd {PLACE} && exec "$@"', "sh", *map(str, words)]

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        own = {"HOME": str(PLACE / "home"), "PYTHONPATH": os.pathsep.join(map(str, [_PACKAGE.parent, ROOT]))}
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_WAIT_POLICY") if name in os.environ}
        return {**kept, **own, "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}


class Lab:
    """All hosts and the wire between them. Example: ``with Lab(("log", "gateway-1")) as lab: lab["log"].run("ip", "addr")``"""

    def __init__(self, names: Sequence[str], place: Path | None = None) -> None:
        """`place`: the directory for the hosts' disks (None: the temporary directory)."""
        remove_dead(place or Path(tempfile.gettempdir()))
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        (self.directory / "owner").write_text(_mark(os.getpid()))
        self._wire: subprocess.Popen[bytes] | None = None
        self.hosts = {name: Host(self, name, f"10.77.0.{at}") for at, name in enumerate(names, 11)}
        self.cuts: dict[str, list[tuple[str, str]]] = {}

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.examinations.hosts.wire"]
        self._wire = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
        )
        try:
            for host in self.hosts.values():
                host.boot()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wire is not None and self._wire.stdin is not None:  # from then on no host reaches another
            self._wire.communicate()
        for host in self.hosts.values():
            host.end()
        shutil.rmtree(self.directory, ignore_errors=True)

    # ------------------------------------------------------------ the network

    def tell_wire(self, order: Mapping[str, Any]) -> Any:
        """Send an order to the wire. Returns its answer."""
        assert self._wire is not None
        assert self._wire.stdin is not None
        assert self._wire.stdout is not None
        try:
            self._wire.stdin.write(json.dumps(order).encode() + b"\n")
            self._wire.stdin.flush()
            return json.loads(self._wire.stdout.readline())
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the wire is gone ({self._wire.poll()}): {error!r}") from error

    def round_trips(self, shortest_s: float, longest_s: float, seed: int) -> None:
        """Give each link its own round trip between these bounds, until the end."""
        dice = random.Random(seed)
        addresses = [host.address for host in self.hosts.values()]
        self.tell_wire(
            {"delays": [[*pair, dice.uniform(shortest_s, longest_s) / 2] for pair in combinations(addresses, 2)]}
        )

    def cut(self, name: str, *pairs: tuple[str, str]) -> None:
        """Drop every packet between these hosts, both ways, until `heal(name)`."""
        self.cuts[name] = [(self[a].address, self[b].address) for a, b in pairs]
        self._tell_cuts()

    def heal(self, name: str) -> None:
        """Undo a cut."""
        del self.cuts[name]
        self._tell_cuts()

    def _tell_cuts(self) -> None:
        self.tell_wire({"cuts": [pair for pairs in self.cuts.values() for pair in pairs]})

    def keep_logs(self, place: Path) -> None:
        """Copy the programs' logs and JSON files from the hosts, without weights and databases."""
        for host in self.hosts.values():
            for path in (
                *host.directory.glob("*.log"),
                *host.directory.glob("*.jsonl"),
                *host.directory.glob("run/**/*.[jl]*"),
            ):
                if path.is_file() and path.suffix in (".log", ".jsonl", ".json"):
                    target = place / host.name / path.relative_to(host.directory)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)

    def check(self) -> dict[str, bool]:
        """Check the isolation and the network that the examination's results depend on."""
        hosts = list(self.hosts.values())
        for host in hosts:
            (host.directory / f"only-{host.name}").touch()
        seen = {host.name: host.run(*_SEARCH, check=False) for host in hosts[:2]}
        seen |= {host.name: host.run("ls", *_places(host, self.directory), check=False) for host in hosts}
        written = [
            host.run("sh", "-c", f"touch '{ROOT}/written' 2>/dev/null && echo written", check=False) for host in hosts
        ]
        one, other = hosts[:2]
        ping = [sys.executable, "-c", _REACHES, other.address]
        before = one.run(*ping).strip()
        self.cut("check", (one.name, other.name))
        during = one.run(*ping).strip()
        self.heal("check")
        return {
            "each host sees its own directory only": all(
                f"only-{host.name}" in seen[host.name] and seen[host.name].count("only-") == seen[host.name].count(f"only-{host.name}")
                for host in hosts
            ),
            "no host writes to the disk below": not any(written),
            "packets arrive": before == "refused",  # refused by the other host's kernel, since nothing listens there
            "packets vanish in a cut": during == "silence",
        }  # fmt: skip


# libraries and repositories hold most of a disk's files, and no host's directory
_SEARCH = shlex.split(
    r"find / -xdev ( -name site-packages -o -name node_modules -o -name .git ) -prune -o -name 'only-*' -print"
)
_REACHES = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 1.0)
except ConnectionRefusedError:
    print("refused")
except TimeoutError:
    print("silence")
"""


def _places(host: Host, directory: Path) -> list[str]:
    others = [directory / name for name in ("", host.name)]
    return ["-R", str(PLACE), "/tmp", *map(str, others)]


def remove_dead(place: Path) -> None:
    """Remove the directories of labs whose process no longer runs."""
    for directory in place.glob(f"{PREFIX}*"):
        owner = directory / "owner"
        mark = owner.read_text() if owner.exists() else ""
        pid = mark.split()[0] if mark else ""
        if pid and mark == _mark(int(pid)):
            continue
        for _ in range(20):  # its hosts may still be ending
            shutil.rmtree(directory, ignore_errors=True)
            if not directory.exists():
                break
            time.sleep(0.1)


def _mark(pid: int) -> str:
    """A process's pid and start time, or "" if there is none."""
    try:
        return f"{pid} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
