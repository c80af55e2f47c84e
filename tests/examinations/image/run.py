"""Does the image of deploy/ build and serve? Executes deploy/Dockerfile without a Docker daemon, in roots made by debootstrap.

    python -m tests.examinations.image.run        # as root, on Debian or Ubuntu; about 6 GB of disk, and a network

Each stage's root is a fresh copy of Debian's release that the base image names, with that release's own Python in place of the image's.
RUN, COPY, ENV, WORKDIR and USER are followed; a step after USER runs as that user. Then the image's CMD runs as its user, with a network
of its own and a tiny random model, until the Dockerfile's HEALTHCHECK says that it serves; one chat completion is made, and SIGTERM must
end it with 0. pip inside has this machine's configuration, and apt its mirror. Mounts and processes are in namespaces that end with it.

Not imitated: Docker's default system call filter and capabilities, layers, and the base image's own build of Python.
Writes tests/examinations/results/image.json.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.examinations.image.steps import Stage, Step, stages

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "tests" / "examinations" / "results" / "image.json"
MIRROR = "http://deb.debian.org/debian"
IMAGE = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
START_S = 900.0
STOP_S = 90.0
PORT = 8321
CONFIG = """\
[run]
directory = "/srv/ostinato/runs/main"
[listen]
host = "127.0.0.1"
[model]
source = "/srv/ostinato/models/tiny"
compute = "fp32"
numerics = "fast"
"""
TINY = "import pathlib; from ostinato.testing.tiny import tiny_model; tiny_model(pathlib.Path('/srv/ostinato/models/tiny'))"


class Build:
    """Stages below one directory; `seconds` of each step that was executed."""

    def __init__(self, place: Path, base: Path) -> None:
        self.place, self.base = place, base
        self.roots: dict[str, Path] = {}
        self.seconds: list[tuple[str, float]] = []

    def stage(self, number: int, stage: Stage) -> Path:
        """A stage's root with every step executed. Raises CalledProcessError, which names the step that failed."""
        root = self.place / f"stage{number}"
        subprocess.run(["cp", "-a", str(self.base), str(root)], check=True)
        open_root(root)
        for step in stage.steps:
            begun = time.monotonic()
            print(f"{step.kind} {step.text[:150]}", flush=True)
            self._execute(root, step)
            self.seconds.append((f"{step.kind} {step.text[:60]}", round(time.monotonic() - begun, 1)))
        self.roots[stage.name] = root
        return root

    def _execute(self, root: Path, step: Step) -> None:
        if step.kind == "RUN":
            subprocess.run(inside(root, step, ["/bin/sh", "-c", step.text]), check=True, stdin=subprocess.DEVNULL)
        elif step.kind == "WORKDIR":
            (root / step.directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
        else:
            self._copy(root, step)

    def _copy(self, root: Path, step: Step) -> None:
        words = step.words()
        options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        origin = self.roots[options["from"]] if "from" in options else ROOT
        aim = root / os.path.normpath(Path(step.directory, target)).lstrip("/")
        for word in sources:
            source = origin / word.lstrip("/")
            to = aim / source.name if target.endswith("/") and source.is_file() else aim
            to.parent.mkdir(parents=True, exist_ok=True)
            # hard links spare gigabytes; nothing that was copied is written again
            how = ["cp", "-al"] if "from" in options else ["cp", "-rL", "--no-preserve=ownership"]
            subprocess.run([*how, "-T", str(source), str(to)], check=True)
            if "chmod" in options:
                to.chmod(int(options["chmod"], 8))


def inside(root: Path, step: Step | Stage, words: list[str]) -> list[str]:
    """A command line that runs these words in a root, as the step's user, in its directory, with its variables and no others."""
    variables = [f"{name}={value}" for name, value in step.environment.items()]
    entered = f'cd "{step.directory}" && exec "$@"'
    return [
        "chroot",
        f"--userspec={step.user}",
        str(root),
        "env",
        "-i",
        *variables,
        "/bin/sh",
        "-c",
        entered,
        "sh",
        *words,
    ]


def open_root(root: Path) -> None:
    """Give a root what a container's runtime gives it: devices, /proc, names, and for this examination pip's and apt's configuration."""
    for name in ("dev", "proc"):
        subprocess.run(["mount", "--rbind", f"/{name}", str(root / name)], check=True)
    for path in ("/etc/resolv.conf", "/etc/hosts", *certificates()):
        carry(Path(path), root)
    settings: dict[str, str] = {}
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    for line in filter(None, told.splitlines()):
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip(
            "'"
        )  # the environment's lines come first, and are the same or wider
    for value in settings.values():
        for word in value.split():
            place = Path(word.removeprefix("file://"))
            if place.is_absolute() and place.exists():
                carry(place if place.is_file() else place.parent if place.name == "simple" else place, root)
    lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
    (root / "etc" / "pip.conf").write_text(f"[global]\n{lines}")


def certificates() -> list[str]:
    """The file of certificates that pip is told to use, if any."""
    return [path for path in (os.environ.get("PIP_CERT"), os.environ.get("SSL_CERT_FILE")) if path]


def carry(path: Path, root: Path) -> None:
    """A file or directory of this machine at the same place in a root: a file copied, a directory mounted to be read only."""
    target = root / str(path).lstrip("/")
    if path.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    elif not target.exists():
        target.mkdir(parents=True)
        subprocess.run(["mount", "--bind", "-o", "ro", str(path), str(target)], check=True)


def made_base(place: Path, image: str) -> Path:
    """Debian's release that an image is named after, such as python:3.11-slim-bookworm, with `python` where that image has it."""
    if not place.exists():
        release = image.rpartition("-")[2]
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", release, str(place), MIRROR],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    link = place / "usr" / "local" / "bin" / "python"
    if not link.is_symlink():
        link.symlink_to("/usr/bin/python3")
    return place


def reachable(index: str) -> bool:
    """Whether a server answers at an index's host."""
    try:
        socket.create_connection((index.split("/")[2], 443), timeout=10).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def served(root: Path, stage: Stage) -> Iterator[subprocess.Popen[bytes]]:
    """The image's CMD as its user, with a network of its own. Ended when the context is left."""
    ctypes.CDLL(None, use_errno=True).unshare(0x40000000)  # CLONE_NEWNET: whatever listens outside is not in the way
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
    process = subprocess.Popen(inside(root, stage, stage.command))
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def examine(place: Path, base: Path | None) -> dict[str, object]:
    """Build and serve. Raises CalledProcessError or RuntimeError for what does not work."""
    arguments = {} if reachable(CPU_INDEX) else {"TORCH_INDEX": "https://pypi.org/simple"}
    found = stages((ROOT / "deploy" / "Dockerfile").read_text(), arguments, IMAGE)
    build = Build(place, made_base(base or place / "base", found[0].base))
    roots = [build.stage(number, stage) for number, stage in enumerate(found)]
    root, stage = roots[-1], found[-1]
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    foreign = [f"--exclude={path}" for path in mounted if path.startswith(f"{root}/")]
    size = subprocess.run(
        ["du", "-sm", *foreign, str(root)], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    (root / "etc" / "ostinato" / "ostinato.toml").write_text(CONFIG)
    subprocess.run(inside(root, stage, ["python", "-c", TINY]), check=True)
    version = subprocess.run(
        inside(root, stage, ["python", "--version"]), capture_output=True, text=True, check=True
    ).stdout
    with served(root, stage) as process:
        begun = time.monotonic()
        while subprocess.run(inside(root, stage, stage.health), capture_output=True, check=False).returncode:
            if process.poll() is not None or time.monotonic() - begun > START_S:
                raise RuntimeError(
                    f"`{' '.join(stage.command)}` ended with {process.poll()} or did not answer in {START_S:.0f} s"
                )
            time.sleep(0.5)
        healthy = time.monotonic() - begun
        owners = {os.stat(f"/proc/{pid}").st_uid for pid in (process.pid, *children(process.pid))}
        answer = said(root, stage)
        process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_S)
    steps = [{"step": name, "seconds": seconds} for name, seconds in build.seconds]
    return {
        "python": version.strip(),
        "user": stage.user,
        "owners": sorted(owners),
        "image_mb": int(size),
        "steps": steps,
        "health_s": round(healthy, 1),
        "answer": answer,
        "code": code,
    }


def children(pid: int) -> list[int]:
    """The processes that a process started, and theirs."""
    own = [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]
    return [*own, *(each for child in own for each in children(child))]


def said(root: Path, stage: Stage) -> str:
    """What the gateway answers to one chat completion that is asked for in the image."""
    ask = f"""
import json, urllib.request
address = "http://127.0.0.1:{PORT}/v1"
model = json.load(urllib.request.urlopen(f"{{address}}/models", timeout=60))["data"][0]["id"]
body = json.dumps({{"model": model, "messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 8}}).encode()
request = urllib.request.Request(f"{{address}}/chat/completions", body, {{"content-type": "application/json"}})
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["finish_reason"])
"""
    done = subprocess.run(inside(root, stage, ["python", "-c", ask]), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def missing() -> str:
    """Why this cannot be examined here; "" if it can."""
    if os.geteuid() != 0:
        return "needs root, for chroot"
    if shutil.which("debootstrap") is None:
        return "needs debootstrap: apt-get install debootstrap"
    try:
        socket.create_connection((MIRROR.split("/")[2], 80), timeout=10).close()
    except OSError as error:
        return f"needs a network: {MIRROR} ({error})"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--base", type=Path, help="debootstrap's root, kept: made there if it does not exist")
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if why := missing():
        print(f"skipped: {why}")
        return 0
    if given.place is None:
        # the mounts and processes of the child end with its namespaces; only then are the roots removed
        with tempfile.TemporaryDirectory(prefix="ostinato-image-", dir=os.environ.get("TMPDIR", "/var/tmp")) as place:
            own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
            words = [sys.executable, "-m", "tests.examinations.image.run", "--place", place, "--out", str(given.out)]
            base = ["--base", str(given.base)] if given.base else []
            return subprocess.run([*own, *words, *base], cwd=ROOT, check=False).returncode
    found = examine(given.place, given.base)
    given.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    return 0 if found["code"] == 0 and 0 not in found["owners"] and found["answer"] in ("stop", "length") else 1


if __name__ == "__main__":
    sys.exit(main())
