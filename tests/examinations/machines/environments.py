"""The environments that one machine can imitate for others: processors, users, containers, limits, languages, networks, installations."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONTAINER = (sys.executable, str(ROOT / "tests/fakes/plain_container.py"))
CHECKS = ("doctor", "up", "demo")
STRANGER = 54321  # a user number without an entry in passwd
_BASH = ("bash", "-c")

Setup = Callable[["Place"], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an environment is tried. `place` is the working directory, below `top`, which also holds the model."""

    top: Path
    place: Path
    model: Path

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.place / "run"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One environment. `prefix` comes before every command, `variables` are added to ours (None: taken out).

    `missing` returns why it cannot be imitated here, or "". `says`: check -> what its output must contain. `refused`: the checks that must
    end with an error, which `says` then describes. `checks` are those that are made; `demo` are more words for that command.
    """

    name: str
    about: str
    variables: Mapping[str, str | None] = field(default_factory=dict)
    prefix: Callable[[Place], Sequence[str]] = lambda _: ()
    settings: tuple[str, ...] = ()
    prepare: Setup = lambda _: None
    missing: Callable[[], str] = lambda: ""
    says: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    checks: tuple[str, ...] = CHECKS
    folder: str = "place"
    model: str = "tiny"
    beside: bool = False
    demo: tuple[str, ...] = ()
    python: Callable[[], str] = lambda: sys.executable


@cache
def flags() -> frozenset[str]:
    """The processor's flags."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def without(*tools: str) -> Callable[[], str]:
    """Why something is missing: the first of the programs that is not installed."""
    return lambda: next((f"{tool} is not installed" for tool in tools if shutil.which(tool) is None), "")


def unless_root(*tools: str) -> Callable[[], str]:
    """As `without`, for what only root can set up."""
    return lambda: without(*tools)() or ("" if os.getuid() == 0 else "only root can set it up")


def unless_mounts() -> str:
    """Why no mount of one's own can be made here."""
    if why := unless_root("unshare", "mount")():
        return why
    made = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True, check=False
    )
    return made.stderr.strip()


def unless_ipv6() -> str:
    """Why nothing can listen on IPv6's own address."""
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::1", 0))
    except OSError as error:
        return f"no IPv6 here: {error.strerror}"
    return ""


def processor(name: str, needed: str, library: str, aten: str, compiler: str) -> Environment:
    """A class of processor, by the switches that hold torch and numba down to it."""
    return Environment(
        name=f"cpu-{name}",
        about=f"a processor with no more than {name}",
        variables={
            "ONEDNN_MAX_CPU_ISA": library,
            "ATEN_CPU_CAPABILITY": aten,
            "NUMBA_CPU_NAME": compiler,
            "NUMBA_CPU_FEATURES": "",  # those that the name implies
        },
        missing=lambda: "" if needed in flags() else f"this processor has no {needed}",
    )


def mounted(script: str) -> Callable[[Place], Sequence[str]]:
    """A prefix that runs a script in a mount namespace of its own, with the run's directory as `$RUN`, and then the command."""

    def prefix(place: Place) -> Sequence[str]:
        place.run.mkdir(exist_ok=True)
        return ("unshare", "-m", *_BASH, f'RUN="$1"; shift; {script} && exec "$@"', "bash", str(place.run))

    return prefix


def own(place: Place) -> None:
    """Give the place to the user without a name."""
    for path in (place.top, *place.top.rglob("*")):
        os.chown(path, STRANGER, STRANGER)


def bare_path(place: Place) -> None:
    """A directory with the few programs that are needed, and no compiler, no git, no shell."""
    (place.place / "bin").mkdir()


def stranger_words() -> Sequence[str]:
    """A prefix: as a user without rights, name or home."""
    drop = ("--clear-groups", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all")
    return ("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", *drop)


@cache
def common_python() -> str:
    """An interpreter of this version that every user may start, with our packages on PYTHONPATH; "" if there is none."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{name}", f"/usr/local/bin/{name}"):  # the first may lie in root's home
        look = [
            *stranger_words(),
            python,
            "-c",
            "import ostinato.cli, os, sys; print(os.access(sys.executable, os.X_OK))",
        ]
        with contextlib.suppress(OSError):
            said = subprocess.run(
                look, capture_output=True, text=True, check=False, cwd="/", env={"PYTHONPATH": packages()}
            )
            if said.stdout == "True\n":
                return python
    return ""


def packages() -> str:
    """Where this interpreter finds Ostinato and what it needs."""
    return os.pathsep.join(entry for entry in sys.path if entry.endswith(("site-packages", "src")))


def unless_stranger() -> str:
    """Why nobody else can be imitated here."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return unless_root("setpriv")() or ("" if common_python() else f"no Python {version} that every user may start")


def installed(place: Place) -> None:
    """Build the wheel and unpack it into the place."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    wheels = place.place / "wheels"
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)], check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(place.place / "site"), str(wheel)],
        check=True,
        capture_output=True,
    )


NO_SANDBOX = {"doctor": "✗ sandbox .*", "demo": "Going on with --scenario tab"}

ENVIRONMENTS: tuple[Environment, ...] = (
    Environment(name="plain", about="this machine as it is"),
    Environment(name="default-model", about="this machine with the model of the README", model="smollm2"),
    processor("amx", "amx_bf16", "AVX512_CORE_AMX", "avx512", "sapphirerapids"),
    processor("avx512-bf16", "avx512_bf16", "AVX512_CORE_BF16", "avx512", "cooperlake"),
    processor("avx512", "avx512f", "AVX512_CORE", "avx512", "skylake-avx512"),
    processor("avx2", "avx2", "AVX2", "avx2", "haswell"),
    Environment(
        name="container",
        about="a container with Docker's default profile: no namespaces, no mounts",
        prefix=lambda _: CONTAINER,
        says=NO_SANDBOX,
        refused=("doctor",),
    ),
    Environment(
        name="user",
        about="a user without rights or name, in a home of its own",
        prefix=lambda _: stranger_words(),
        python=common_python,
        variables={"HOME": "home", "PYTHONPATH": packages()},
        prepare=own,
        missing=unless_stranger,
    ),
    Environment(
        name="homeless",
        about="a user without rights, name or home",
        prefix=lambda _: stranger_words(),
        python=common_python,
        variables={"HOME": None, "XDG_CACHE_HOME": None, "PYTHONPATH": packages()},
        prepare=own,
        missing=unless_stranger,
        says={"up": "converted models and compiled code go to"},
    ),
    Environment(
        name="closed-home",
        about="a home that cannot be written",
        variables={"HOME": "/proc", "XDG_CACHE_HOME": None},
        says={"up": "/proc/.cache/ostinato cannot be written", "demo": "/proc/.cache/ostinato cannot be written"},
    ),
    Environment(
        name="read-only",
        about="a read-only root with one writable directory, the run's",
        prefix=mounted('mount --make-rprivate / && mount --bind "$RUN" "$RUN" && mount -o remount,bind,ro /'),
        missing=unless_mounts,
        says={"up": "no directory for temporary files can be written"},
    ),
    Environment(
        name="small-shm",
        about="/dev/shm of 1 MB",
        prefix=mounted("mount -t tmpfs -o size=1m tmpfs /dev/shm"),
        missing=unless_mounts,
    ),
    Environment(
        name="address-space",
        about="ulimit -v of 4 GB with the model of the README: enough to serve, too little to train",
        prefix=lambda _: (*_BASH, 'ulimit -v 4194304 && exec "$@"', "bash"),
        model="smollm2",
        says={
            "up": "memory is too small to train smollm2: at least .* are needed .* leaves .*serve goes on without it"
        },
        checks=("up",),
        missing=without("bash"),
    ),
    Environment(
        name="one-core",
        about="one core",
        prefix=lambda _: ("taskset", "-c", str(min(os.sched_getaffinity(0)))),
        missing=without("taskset"),
    ),
    Environment(
        name="no-programs",
        about="no compiler, no git and nothing else on the PATH, nothing compiled before",
        variables={"PATH": "bin", "CC": None, "HOME": "home"},
        prepare=bare_path,
        says={"doctor": "✗ sandbox .*no C compiler", "demo": "Going on with --scenario tab"},
        refused=("doctor",),
    ),
    Environment(name="odd-path", about="a path with a space and an umlaut", folder="a plaçe with ü"),
    Environment(
        name="bare-locale",
        about="LANG=C without UTF-8, a path with an umlaut, and hardly a variable",
        variables=dict.fromkeys((name for name in os.environ if name not in ("PATH", "HOME", "PYTHONPATH")), None)
        | {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        folder="ü",
        says=dict.fromkeys(CHECKS, "set PYTHONUTF8=1"),
        refused=CHECKS,
    ),
    Environment(
        name="turkish",
        about="LC_ALL=tr_TR, UTC+5:45",
        variables={"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu"},
    ),
    Environment(
        name="dead-proxies",
        about="proxies in the environment that nobody answers",
        variables=dict.fromkeys(
            ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
        )
        | {"no_proxy": None, "NO_PROXY": None},
    ),
    Environment(name="ipv6", about="IPv6 only", settings=("listen.host='::1'",), missing=unless_ipv6),
    Environment(name="beside", about="beside another run", beside=True, checks=("up",)),
    Environment(name="signals", about="signals in every phase of a start, and nohup", checks=("ends",)),
    Environment(
        name="wheel",
        about="the wheel, in an empty directory",
        variables={"PYTHONPATH": "site"},
        prepare=installed,
        missing=without("git"),
    ),
)
