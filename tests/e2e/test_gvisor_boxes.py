"""gVisor's sandboxes on the host: what a program is in them, and that nothing stays, whoever of their processes is killed."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.mounts import mounts_beside

from ostinato.app.worlds import open_backend, open_grading
from ostinato.config import Config
from ostinato.core.errors import BadConfig, BadRequest, SandboxBroken, Unavailable
from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.launch.commands.checks import check_sandboxes
from ostinato.launch.commands.doctor import CHECKS
from ostinato.worlds.grading.completion import CompletionGrader
from ostinato.worlds.sandbox import Boxes, SandboxConfig
from ostinato.worlds.sandbox.gvisor import GVisorBoxes, RunsInBoxes
from ostinato.worlds.sandbox.gvisor.backend import GVisorBox

needs_runsc = pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc is not installed")
SMALL = Limits(memory_mb=128, disk_mb=8, processes=16)


@pytest.fixture
async def boxes(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    made = GVisorBoxes()
    yield made
    await made.close()


async def sh(box, script, **options):
    return await box.exec(["sh", "-c", script], **{"timeout": WHOLE_PROGRAM_S, **options})


def processes_of(place):
    """Of runsc, for sandboxes whose directories lie below a place."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(str(place) in word for word in words) and "runsc" in words[0]:
                found[int(entry.name)] = words
    return found


async def until_gone(box):
    with contextlib.suppress(Unavailable):
        while True:
            await sh(box, "true")


async def until(condition):
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while not condition():
            await asyncio.sleep(0.05)


@needs_runsc
async def test_a_program_has_no_rights_and_another_kernel(boxes):
    box = await boxes.start(SandboxSpec(limits=SMALL))
    status = (await sh(box, "cat /proc/self/status")).stdout.decode()
    rights = [line.split()[1] for line in status.splitlines() if line.startswith(("CapPrm", "CapEff", "CapBnd"))]
    assert rights == ["0000000000000000"] * 3
    assert "Seccomp:\t2" in status
    assert os.uname().release.encode() not in (await sh(box, "uname -r")).stdout
    for script in (
        "kill -9 1", "ls /.box", "unshare -U true", "mount -t tmpfs x /tmp", "echo x > /etc/x", "echo x > /usr/x", "chroot /tmp true",
        "cat /proc/1/root/etc/passwd", "echo 1 > /.box/pids/cgroup.procs", "cat <> /proc/1/fd/3",
    ):  # fmt: skip
        assert (await sh(box, script)).code != 0, script
    assert (await sh(box, "ls -l / /tmp && stat /etc")).code == 0, "statx is mended where this runsc needs that"


@needs_runsc
async def test_all_programs_together_have_so_many_processes_and_no_more(boxes):
    box = await boxes.start(SandboxSpec(limits=SMALL))
    fork = "import os, time\nfor n in range(300):\n  try:\n    if os.fork() == 0: time.sleep(600)\n  except OSError: pass\ntime.sleep(600)"
    for seconds in (4.0, 16.0, 64.0):  # until this machine makes so many in the time
        held = [asyncio.create_task(box.exec(["python3", "-c", fork], timeout=seconds)) for _ in range(2)]
        most = 0
        while any(not each.done() for each in held):
            with contextlib.suppress(Unavailable):
                count = "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))"
                said = await box.exec(["python3", "-c", count], timeout=WHOLE_PROGRAM_S)
                most = max(most, int(said.stdout or 0))
        if most >= 12:
            break
    assert 12 <= most <= SMALL.processes + 4, "pid 1, the count itself, and each first process on top"
    assert [each.timed_out for each in await asyncio.gather(*held)] == [True, True]
    assert (await sh(box, "ls /proc | grep -c '^[0-9]'")).stdout == b"4\n"


@needs_runsc
async def test_nothing_is_left_behind(boxes, tmp_path):
    mounts = mounts_beside(tmp_path)
    started = await asyncio.gather(*(boxes.start(SandboxSpec(files={"x": bytes(1 << 16)})) for _ in range(3)))
    await asyncio.gather(*(sh(box, "sleep 600 & (setsid sleep 600 &) ; echo y > y") for box in started))
    assert len(processes_of(tmp_path)) >= 6
    await started[0].stop()
    await started[0].stop()
    await boxes.close()
    assert processes_of(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []
    assert mounts_beside(tmp_path) <= mounts
    with pytest.raises(Unavailable):
        await sh(started[1], "true")
    assert (await sh(await boxes.start(SandboxSpec()), "echo on")).stdout == b"on\n"


@needs_runsc
@pytest.mark.parametrize("victim", ["runsc-sandbox", "runsc-gofer", "run"])
async def test_whoever_is_killed_only_that_sandbox_is_gone(boxes, tmp_path, victim):
    other, box = await boxes.start(SandboxSpec()), await boxes.start(SandboxSpec())
    await sh(box, "sleep 600 &")
    ours = {pid: words for pid, words in processes_of(tmp_path).items() if str(box._place) in " ".join(words)}
    (pid,) = (pid for pid, words in ours.items() if words[0].endswith(victim) or (victim == "run" and "run" in words))
    os.kill(pid, signal.SIGKILL)
    if victim == "runsc-sandbox":
        await until_gone(box)
    await box.stop()
    await until(lambda: not any(str(box._place) in " ".join(words) for words in processes_of(tmp_path).values()))
    assert (await sh(other, "echo on")).stdout == b"on\n"
    await boxes.close()
    assert list(tmp_path.iterdir()) == []


@needs_runsc
async def test_a_program_that_cannot_be_ended_from_within_ends_with_its_sandbox(boxes, monkeypatch):
    """Pid 1 hangs, so the host's own deadline has to do: over and above it nothing is owed to the programs."""
    monkeypatch.setattr("ostinato.worlds.sandbox.gvisor.line._GRACE_S", 0.5)
    box = await boxes.start(SandboxSpec())
    pid = int((box._place / "pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    assert (await box.exec(["true"], timeout=0.5)).killed_reason == "timeout"
    with pytest.raises(SandboxBroken, match="was ended"):
        await box.diff()
    assert not Path(f"/proc/{pid}").exists()


@needs_runsc
async def test_a_kernel_that_grows_ends_with_its_sandbox(boxes, monkeypatch):
    monkeypatch.setattr("ostinato.worlds.sandbox.gvisor.backend._WATCH_S", 0.1)
    box, grown = [await boxes.start(SandboxSpec(limits=limits)) for limits in (replace(SMALL, memory_mb=999), SMALL)]
    await asyncio.gather(*(sh(each, "for n in 1 2 3; do touch f$n; sleep 0.1; done") for each in (box, grown)))
    monkeypatch.setattr("ostinato.worlds.sandbox.gvisor.backend._KERNEL_MB", 1 - SMALL.memory_mb)
    assert (await sh(grown, "sleep 200")).killed_reason == "memory"
    for call in (sh(grown, "true"), grown.read("x"), grown.diff()):
        with pytest.raises(SandboxBroken, match="its kernel needed more"):
            await call
    assert (await sh(box, "ls")).stdout == b"f1\nf2\nf3\n"


ALONE = """
import asyncio, sys
from ostinato.core.sandbox import SandboxSpec
from ostinato.worlds.sandbox.gvisor import GVisorBoxes

async def main():
    boxes = GVisorBoxes()
    box = await boxes.start(SandboxSpec())
    await box.exec(["sh", "-c", "sleep 600 &"], timeout=300)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


class Faulty(GVisorBoxes):
    """Sandboxes whose kernel meets a fault when it is told to: Go's runtime ends it, as for a mistake of its own."""

    def _command(self, ground, place):
        runsc, *rest = super()._command(ground, place)
        return [runsc, f"--panic-signal={signal.SIGUSR2.value}", *rest]


@pytest.fixture
async def faulty(boxes):
    made = Faulty()
    yield made
    await made.close()


async def kernel_meets(box, number):
    """Send the kernel a signal while a program runs; what was said of the program, and of the sandbox to who asks next."""
    running = asyncio.create_task(sh(box, "echo on > on; sleep 200"))
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while (await sh(box, "test -s on")).code:
            pass
    signal.pidfd_send_signal(box._kernel_process()[1], number)
    (result,) = await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(Unavailable) as gone:
        await box.read("a")
    return result, gone.value


@needs_runsc
async def test_a_fault_of_its_kernel_is_its_programs_doing_and_an_end_from_outside_is_not(faulty):
    box = await faulty.start(SandboxSpec())
    result, gone = await kernel_meets(box, signal.SIGUSR2)
    assert (result.code, result.killed_reason) == (-9, "memory")
    assert type(gone) is SandboxBroken
    assert "its kernel met a fault while it served the programs (panic: Signal-induced panic" in str(gone)
    await box.stop()
    box = await faulty.start(SandboxSpec())
    result, gone = await kernel_meets(box, signal.SIGKILL)
    assert type(result) is type(gone) is Unavailable
    await box.stop()


@needs_runsc
async def test_a_fault_before_any_program_ran_is_nobodys_doing(faulty):
    box = await faulty.start(SandboxSpec(files={"a": b"1"}))
    assert await box.read("a") == b"1"
    signal.pidfd_send_signal(box._kernel_process()[1], signal.SIGUSR2)
    found = b"1"
    while isinstance(found, bytes):
        (found,) = await asyncio.gather(box.read("a"), return_exceptions=True)
    assert type(found) is Unavailable
    await box.stop()


@needs_runsc
async def test_a_graded_program_that_ends_its_kernel_is_worth_nothing_and_not_asked_for_ever(faulty, monkeypatch):
    started, start = [], faulty.start

    async def starting(spec, *, alone=False):
        started.append(await start(spec, alone=alone))
        return started[-1]

    monkeypatch.setattr(faulty, "start", starting)
    running = asyncio.create_task(RunsInBoxes(faulty, SandboxConfig()).run("import time; time.sleep(60)", timeout=90.0))
    while not (started and started[0]._ran):
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    signal.pidfd_send_signal(started[0]._kernel_process()[1], signal.SIGUSR2)
    assert (await running).killed_reason == "memory"


@pytest.mark.parametrize(
    "report",
    [
        "fatal error: runtime: out of memory\n",
        "runtime: failed to create new OS thread (have 9 already; errno=11)\nfatal error: newosproc\n",
        "fatal error: runtime: cannot allocate memory\n",
        "",
        "what nobody knows\n",
    ],
)
def test_what_this_machine_has_too_little_of_is_nobodys_fault(report, tmp_path):
    box = object.__new__(GVisorBox)
    box._place, box._ran = tmp_path, True
    (tmp_path / "panic").write_text(report)
    assert box._fault() is None
    (tmp_path / "panic").write_text("panic: runtime error: index out of range [3] with length 3\n")
    assert "index out of range" in str(box._fault())
    (tmp_path / "panic").unlink()
    assert box._fault() is None


@needs_runsc
async def test_a_killed_host_takes_its_sandboxes_along(boxes, tmp_path):
    alone = subprocess.Popen(  # noqa: ASYNC220 - once
        [sys.executable, "-c", ALONE], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert alone.stdout.readline() == b"ready\n"
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    assert processes_of(tmp_path)
    alone.kill()
    alone.wait()
    alone.stdout.close()
    await until(lambda: processes_of(tmp_path) == {})
    await boxes.isolation()
    assert not left[0].exists(), "whoever comes next sweeps"


@needs_runsc
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
async def test_layers_of_several_owners_are_refused_and_those_of_one_are_the_programs_own(boxes, tmp_path):
    layers = [tmp_path / name for name in ("one", "two")]
    for owner, layer in enumerate(layers, 12346):
        layer.mkdir()
        (layer / "f").write_text("x")
        for path in (layer, layer / "f"):
            os.chown(path, owner, owner)
    with pytest.raises(BadRequest, match="several users"):
        await boxes.start(SandboxSpec(layers=tuple(map(str, layers))))
    box = await boxes.start(SandboxSpec(layers=(str(layers[1]),)))
    assert (await sh(box, "stat -c %U f; echo y > f && cat f")).stdout == b"user\ny\n"
    assert (layers[1] / "f").read_text() == "x"


@needs_runsc
async def test_files_that_do_not_fit_are_refused(boxes):
    with pytest.raises(BadRequest, match="do not fit"):
        await boxes.start(SandboxSpec(files={"x": bytes(9 << 20)}, limits=SMALL))


@needs_runsc
async def test_single_runs_are_sandboxes_too(boxes):
    runs = RunsInBoxes(boxes, SandboxConfig(memory_mb=128))
    result = await runs.run(
        "import sys, os; print(6 * 7, sys.stdin.read(), open('a').read())",
        files={"a": b"1"},
        stdin=b"in",
        timeout=WHOLE_PROGRAM_S,
    )
    assert (result.stdout, result.stderr) == (b"42 in 1\n", b"")
    assert (await runs.run("while True: pass", timeout=0.5)).timed_out


@needs_runsc
async def test_the_setting_decides_where_worlds_are_graded():
    config = Config(sandbox=SandboxConfig(backend="gvisor"))
    async with open_grading(config) as (backend, grader):
        assert isinstance(backend, GVisorBoxes)
        completion = grader._graders["python_tests"]
        assert isinstance(completion, CompletionGrader)
        assert isinstance(completion._runs, RunsInBoxes)
    assert isinstance(open_backend(SandboxConfig()), Boxes)


def test_without_runsc_the_way_to_get_it_is_named(monkeypatch, tmp_path):
    config = Config(sandbox=SandboxConfig(backend="gvisor"))
    (tmp_path / "cc").symlink_to(shutil.which("cc"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for ask in (check_sandboxes, dict(CHECKS)["sandbox"]):
        with pytest.raises(BadConfig, match="apt-get install runsc"):
            ask(config)
    check_sandboxes(Config())
    assert "no runsc" in dict(CHECKS)["sandbox"](Config())


@needs_runsc
def test_doctor_says_what_it_offers():
    said = dict(CHECKS)["sandbox"](Config(sandbox=SandboxConfig(backend="gvisor")))
    assert "gVisor works" in said
    assert "cannot be forked" in said
    assert "runsc is installed" in dict(CHECKS)["sandbox"](Config())


UNPRIVILEGED = """
import asyncio, json
from ostinato.core.sandbox import SandboxSpec, Limits
from ostinato.worlds.sandbox.gvisor import GVisorBoxes

async def main():
    boxes = GVisorBoxes()
    box = await boxes.start(SandboxSpec(layers=("LAYER",), files={"g": b"1"}, limits=Limits(memory_mb=128)))
    script = "echo y > f; echo y > g; cat f g; grep Cap /proc/self/status | cut -f2 | sort -u; "
    script += "echo x > /etc/x || ls /.box || kill -9 1 || echo x > /dev/x || echo held"
    said = await box.exec(["sh", "-c", script], timeout=300.0)
    changed = [change.path for change in await box.diff()]
    print(json.dumps([said.stdout.decode(), changed, (await boxes.isolation()).missing]))
    await boxes.close()

asyncio.run(main())
"""


@needs_runsc
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="as an ordinary user, the other tests are this one"
)
def test_an_ordinary_user_can_start_them(tmp_path):
    python = f"/usr/bin/python3.{sys.version_info.minor}"
    if not Path(python).exists():
        pytest.skip(f"no {python} here that an ordinary user may run")
    layer, place = tmp_path / "layer", tmp_path / "place"
    for path in (tmp_path, *tmp_path.parents):
        if (
            path.owner() == "root"
            and path.is_relative_to(tempfile.gettempdir())
            and path != Path(tempfile.gettempdir())
        ):
            path.chmod(path.stat().st_mode | 0o055)
    layer.mkdir()
    place.mkdir()
    (layer / "f").write_text("x")
    for path in (layer, place, layer / "f"):
        os.chown(path, 12346, 12346)
    path = os.pathsep.join(entry for entry in sys.path if entry.endswith(("site-packages", "src")))
    done = subprocess.run(
        ["setpriv", "--reuid=12346", "--regid=12346", "--clear-groups", python, "-c", UNPRIVILEGED.replace("LAYER", str(layer))],
        capture_output=True, text=True, check=False, cwd="/", env={"PYTHONPATH": path, "TMPDIR": str(place), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    stdout, changed, missing = json.loads(done.stdout)
    assert stdout == "y\ny\n0000000000000000\nheld\n"
    assert changed == ["f", "g"]
    assert any("not started by root" in text for text in missing)
    assert (layer / "f").read_text() == "x"
    assert list(place.glob("ostinato-gvisor-*")) == []
