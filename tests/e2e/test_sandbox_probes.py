"""A hundred and more things that a hostile program tries: each fires where nothing holds it, none in a sandbox, whoever started it."""

import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.sandbox_probes import MARK, PROBES

from ostinato.core.errors import Unavailable
from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.worlds.sandbox import Boxes, SandboxConfig, SingleRuns, python_inside
from ostinato.worlds.sandbox.gvisor import GVisorBoxes

SCRIPT = Path(__file__).parents[1] / "sandbox_probes.py"
LIMITS = Limits(memory_mb=128, disk_mb=32, processes=24)
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the probes name system calls by x86_64's numbers"
)


@pytest.fixture
def target(tmp_path):
    """Live things outside, each of which a probe looks for; yields what the probes are told."""
    tmp_path.chmod(0o755)
    (tmp_path / "planted").write_text("x")
    victim = subprocess.Popen(["sh", "-c", f"read x; : {MARK}"], stdin=subprocess.PIPE, env={MARK: "1"})
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    listeners[1].bind(f"\0ostinato-{os.getpid()}")
    listeners[2].bind(str(tmp_path / "socket"))
    for listener in listeners[1:]:
        listener.listen(64)
    (tmp_path / "socket").chmod(0o777)
    os.set_inheritable(listeners[0].fileno(), True)
    told = {
        "PID": victim.pid, "PORT": listeners[0].getsockname()[1], "ABSTRACT": f"ostinato-{os.getpid()}", "SOCKET": tmp_path / "socket",
        "FILE": tmp_path / "planted", "HOST": socket.gethostname(), "FD": listeners[0].fileno(),
    }  # fmt: skip
    yield {f"{MARK}_{name}": str(value) for name, value in told.items()}
    for listener in listeners:
        listener.close()
    victim.communicate()


def outside(told):
    """What fires where nothing holds it."""
    environment = {**os.environ, **told, f"{MARK}_SECRET": "1"}
    result = subprocess.run(
        [sys.executable, SCRIPT], env=environment, stdout=subprocess.PIPE, check=True, close_fds=False
    )
    return json.loads(result.stdout)


@pytest.mark.skipif(
    os.geteuid() != 0, reason="an ordinary user is let into less of the kernel, so that controls could not fire"
)
def test_every_probe_fires_where_nothing_holds_it(target):
    assert len(PROBES) >= 100
    assert sorted(set(PROBES) - set(outside(target))) == []


async def test_none_fires_in_a_box(target):
    backend = Boxes()
    try:
        box = await backend.start(SandboxSpec(files={"p.py": SCRIPT.read_bytes()}, env=target, limits=LIMITS))
        result = await box.exec(["python3", "p.py"], timeout=300)
        assert (result.code, result.stderr) == (0, b"")
        assert json.loads(result.stdout) == []
    finally:
        await backend.close()


FILL = "import p; print(p.much_in_sockets())"
GROW = "import p; print(p.much_in_tcp())"


def test_sockets_can_hold_much_memory_where_nothing_counts_it():
    result = subprocess.run(
        [sys.executable, "-c", "from sandbox_probes import much_in_sockets; print(much_in_sockets())"],
        cwd=SCRIPT.parent,
        stdout=subprocess.PIPE,
        check=True,
    )
    assert result.stdout == b"True\n"


@pytest.mark.parametrize("groups", [True, False])
async def test_what_sockets_hold_counts_as_the_boxes_memory(groups):
    backend = Boxes(groups=groups)
    try:
        spec = SandboxSpec(files={"p.py": SCRIPT.read_bytes()}, limits=LIMITS)
        box = await backend.start(spec)

        async def printed(program):
            """Nothing where the kernel, which finds no process that holds the memory, ended all of the box; another takes its place."""
            nonlocal box
            try:
                return (await box.exec(["python3", "-c", program], timeout=WHOLE_PROGRAM_S)).stdout
            except Unavailable:
                await box.stop()
                box = await backend.start(spec)
                return b""

        assert await printed(FILL) in (b"", b"False\n"), "the whole box, or those that held most, were ended"
        async with asyncio.timeout(
            WHOLE_PROGRAM_S
        ):  # the kernel frees what sockets held some time after their processes
            while not (again := await printed(IDLE)):
                await asyncio.sleep(0.1)
        assert again == b"16 processes share 20 pairs\n", "which the same limit allows"
        watched = any("a poller, not the kernel" in text for text in (await backend.isolation()).missing)
        assert watched or groups
    finally:
        await backend.close()


def test_a_connection_can_hold_megabytes_where_nothing_bounds_it():
    command = [sys.executable, "-c", GROW.replace("import p", "import sandbox_probes as p")]
    assert subprocess.run(command, cwd=SCRIPT.parent, stdout=subprocess.PIPE, check=True).stdout == b"True\n"


async def test_a_connection_holds_no_more_in_a_box_than_other_sockets():
    backend = Boxes(groups=False)
    try:
        box = await backend.start(SandboxSpec(files={"p.py": SCRIPT.read_bytes()}, limits=LIMITS))
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            result = await box.exec(["python3", "-c", GROW], timeout=WHOLE_PROGRAM_S)
            while b"Resource temporarily unavailable" in result.stderr:  # EAGAIN, beside other tests' boxes
                await asyncio.sleep(0.1)
                result = await box.exec(["python3", "-c", GROW], timeout=WHOLE_PROGRAM_S)
        assert (result.stdout, result.stderr) == (b"False\n", b"")
    finally:
        await backend.close()


IDLE = """
import os, socket, time
pairs = [socket.socketpair() for _ in range(20)]
children = [os.fork() for _ in range(1)]
while children[-1] and len(children) < 15:
    children.append(os.fork())
if not children[-1]:
    time.sleep(0.5)
    os._exit(0)
ended = [os.waitpid(child, 0)[1] == 0 for child in children]
print(1 + sum(ended), "processes share", len(pairs), "pairs")
"""

GVISORS_OWN = {
    "view: sys", "view: proc of the kernel", "view: sysctl", "view: memory devices", "write: own oom score", "write: own maps",
    "limit: timers", "limit: priority",
}  # fmt: skip
"""What fires in a gVisor box reaches a kernel of that box alone: its /sys, /proc and /dev, its timers and priorities."""


@pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc is not installed")
async def test_only_its_own_kernel_is_reached_in_a_gvisor_box(target):
    backend = GVisorBoxes()
    try:
        limits = replace(LIMITS, memory_mb=256)  # a fork there copies more of its parent
        box = await backend.start(SandboxSpec(files={"p.py": SCRIPT.read_bytes()}, env=target, limits=limits))
        result = await box.exec(["python3", "p.py"], timeout=WHOLE_PROGRAM_S)
        assert (result.code, result.stderr) == (0, b"")
        assert set(json.loads(result.stdout)) - GVISORS_OWN == set()
    finally:
        await backend.close()


def told_source(told):
    return f"import os\nos.environ.update({told!r})\n".encode() + SCRIPT.read_bytes()


@pytest.mark.parametrize("warm", [False, True])
async def test_none_fires_in_a_single_run(target, warm):
    config = SandboxConfig(memory_mb=LIMITS.memory_mb, disk_mb=LIMITS.disk_mb, processes=LIMITS.processes)
    async with SingleRuns(config) as runs:
        source = told_source(target)
        program = source.decode() if warm else [python_inside(), "p.py"]
        result = await runs.run(program, files={} if warm else {"p.py": source}, timeout=300)
        assert result.code == 0, result
        assert json.loads(result.stdout) == []


UNPRIVILEGED = """
import asyncio, json, sys
from ostinato.core.errors import Unavailable
from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.worlds.sandbox import Boxes

async def main():
    backend = Boxes()
    source, told = json.load(sys.stdin)
    limits = Limits(memory_mb=128, disk_mb=32, processes=24)
    box = await backend.start(SandboxSpec(files={"p.py": source.encode(), "a": b"1"}, env=told, limits=limits))
    result = await box.exec(["python3", "p.py"], timeout=300)
    (fork,) = await box.fork(1)
    await fork.write("a", b"2")
    changed = [change.path for change in await fork.diff()]
    missing = (await backend.isolation()).missing
    await backend.close()
    print(json.dumps([result.stdout.decode() or result.stderr.decode(), changed, missing]))

asyncio.run(main())
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="as an ordinary user, the tests above are this one"
)
def test_none_fires_in_a_box_that_an_ordinary_user_started(target):
    path = os.pathsep.join(entry for entry in sys.path if entry.endswith(("site-packages", "src")))
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    drop = ["setpriv", "--reuid=12346", "--regid=12346", "--clear-groups"]
    for python in (sys.executable, f"/usr/bin/{name}", f"/usr/local/bin/{name}"):  # the first may lie in root's home
        ready = [
            *drop,
            python,
            "-c",
            "import ostinato.worlds.sandbox, os, sys; print(os.access(sys.executable, os.X_OK))",
        ]
        with contextlib.suppress(OSError):
            tried = subprocess.run(ready, env={"PYTHONPATH": path}, cwd="/", check=False, capture_output=True)
            if tried.stdout == b"True\n":
                break
    else:
        pytest.skip(f"no {name} here that an ordinary user may run")
    told = json.dumps([SCRIPT.read_text(), target])
    result = subprocess.run(
        [*drop, python, "-c", UNPRIVILEGED],
        input=told,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path},
        cwd="/",
        check=False,
    )
    assert result.returncode == 0, result.stderr
    fired, changed, missing = json.loads(result.stdout)
    assert json.loads(fired) == []
    assert changed == ["a"]
    assert any("poller" in text for text in missing)
