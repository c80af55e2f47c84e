"""The sandbox against hostile programs. Every probe has a positive control: proof that the attack works where nothing holds it."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.fakes.mounts import mounts_beside

from ostinato.core.errors import BadRequest, SandboxRefused
from ostinato.worlds.sandbox import SandboxConfig, SingleRuns, python_inside
from ostinato.worlds.sandbox.protocol import MAX_DEADLINE_FACTOR

with_the_module = pytest.mark.asyncio(loop_scope="module")
"""The loop of what all tests here share."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started():
    async with SingleRuns(SandboxConfig(concurrency=2, memory_mb=128, disk_mb=4, processes=12)) as box:
        await box.check()
        yield box


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(started):
    """One for all tests: nothing of a test may be left for the next."""
    yield started
    await nothing_left(started)


def descendants(pid: int) -> set[int]:
    """Live processes below `pid`, whatever sessions or groups they fled to: orphans of a pid namespace stay below its init."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


async def outside(*arguments):
    """What Python prints where nothing holds it: the positive controls."""
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


async def below(box, fits, what):
    """The processes below the zygote's keeper, once there are as many as fit."""
    assert box._process is not None
    try:
        async with asyncio.timeout(PATIENT_S):
            while not fits(len(found := descendants(box._process.pid))):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what}: {found}") from None
    return found


async def nothing_left(box):
    await below(box, lambda count: count <= 1, "processes outlived their run")  # the zygote itself


async def program_started(box):
    return await below(box, lambda count: count >= 3, "no program started")  # zygote, pid 1 of the box, program


LOOP = "while True:\n    try:\n        while True: pass\n    except BaseException: pass\n"
DEAF = "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
RIVALS = (
    "import os, signal\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    "os.setpriority(os.PRIO_PROCESS, 0, 19)\nwhile True:\n    try: child = os.fork()\n    except OSError: continue\n"
    "    if child == 0:\n        for n in range(10**5): pass\n        os._exit(0)\n"
)
HANGS = {
    "waits for children of its own that leave no account": RIVALS,
    "loop in except BaseException": LOOP,
    "ignores signals": DEAF + LOOP,
    "sleeps": "import time\ntime.sleep(60)\n",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass\n",
    "closes every descriptor": "import os, time\nos.closerange(0, 1000)\ntime.sleep(60)\n",
    "waits for input": "import os\nr, w = os.pipe()\nos.read(r, 1)\n",
}


@pytest.mark.parametrize("name", HANGS)
@with_the_module
async def test_hanging_programs_end_at_the_deadline(sandbox, name):
    result = await sandbox.run(HANGS[name], timeout=0.3)
    assert result.timed_out
    assert result.killed_reason == "timeout"
    assert result.seconds >= 0.3


@with_the_module
async def test_what_neighbours_take_of_a_processor_is_not_taken_from_a_program_s_time(sandbox):
    """Beside two endless ones on one processor: it gets the time it needs, or as often as may be what it was promised."""
    on_one = f"import os\nos.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\n"
    async with SingleRuns(SandboxConfig(concurrency=2)) as beside:
        await beside.check()
        hogs = [asyncio.create_task(beside.run(on_one + "while True: pass", timeout=WHOLE_PROGRAM_S)) for _ in range(2)]
        await below(beside, lambda count: count >= 5, "the hogs did not start")
        needs = on_one + "import time\nwhile time.process_time() < 0.3: pass\nprint('done')"
        result = await sandbox.run(needs, timeout=0.4)
        for hog in hogs:
            hog.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)
    assert result.stdout == b"done\n" or result.seconds >= MAX_DEADLINE_FACTOR * 0.4, result


def test_control_a_deaf_loop_survives_sigterm_outside():
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", DEAF + "print(1, flush=True)\n" + LOOP], stdout=-1)
    with process:
        process.stdout.readline()
        process.terminate()
        ignored = re.search(r"^SigIgn:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)[1]
        assert int(ignored, 16) >> (signal.SIGTERM - 1) & 1
        assert process.poll() is None
        process.kill()


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {deaf}
        for fd in (0, 1, 2): os.close(fd)
        time.sleep(60)
    os._exit(0)
print("started")
"""


@with_the_module
async def test_daemons_die_with_the_run(sandbox):
    result = await sandbox.run(DAEMON.format(deaf="pass"), timeout=PATIENT_S)
    assert result.stdout == b"started\n"
    assert result.code == 0
    await nothing_left(sandbox)


@with_the_module
async def test_control_daemons_are_seen_while_they_live(sandbox):
    run = asyncio.create_task(sandbox.run(DAEMON.format(deaf="pass") + "time.sleep(60)", timeout=WHOLE_PROGRAM_S))
    # zygote, pid 1 of the box, program, daemon
    await below(sandbox, lambda count: count >= 4, "the daemon never appeared, so the test above proves nothing")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


@with_the_module
async def test_a_fork_bomb_is_bounded_and_ends(sandbox):
    # what it started only waits: those of HANGS and of the contract of the backends compute
    bomb = "import os, time\nn = 0\nwhile True:\n    try:\n        if os.fork() == 0:\n            time.sleep(600)\n        n += 1\n"
    bomb += "    except OSError:\n        print(n, flush=True)\n        time.sleep(600)\n"
    result = await sandbox.run(bomb, timeout=5.0)
    assert result.timed_out
    assert 1 <= int(result.stdout) < 12


@with_the_module
async def test_endless_output_is_cut(sandbox):
    result = await sandbox.run("import os\nwhile True: os.write(1, b'x' * 65536)\n", timeout=PATIENT_S)
    assert result.killed_reason == "output"
    assert len(result.stdout) == sandbox.config.output_bytes
    allowed = await sandbox.run(f"print('x' * {sandbox.config.output_bytes - 1})", timeout=PATIENT_S)
    assert allowed.killed_reason is None
    assert len(allowed.stdout) == sandbox.config.output_bytes


@with_the_module
async def test_memory_is_bounded(sandbox):
    assert (await sandbox.run("x = bytearray(32 << 20)\nprint(len(x))", timeout=PATIENT_S)).code == 0
    result = await sandbox.run("x = bytearray(400 << 20)\nprint(len(x))", timeout=PATIENT_S)
    assert result.code == 1
    assert b"MemoryError" in result.stderr


@with_the_module
async def test_disk_is_bounded_and_does_not_persist(sandbox):
    write = """
import os
n = 0
try:
    for i in range(99):
        open(f'{i}', 'wb').write(bytes(1 << 20))
        n += 1
except OSError as e:
    print(n, e)
"""
    result = await sandbox.run(write, timeout=PATIENT_S)
    assert re.match(rb"[34] .*No space left", result.stdout)
    assert (await sandbox.run("import os\nprint(os.listdir('/tmp'))", timeout=PATIENT_S)).stdout == b"['main.py']\n"


@with_the_module
async def test_no_network_not_even_loopback(sandbox):
    probe = "import socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}), 1); print('in')\nexcept OSError: print('out')\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = probe.format(port=server.getsockname()[1])
        control = await outside("-I", "-S", "-c", code)
        assert control == "in\n"
        assert (await sandbox.run(code, timeout=PATIENT_S)).stdout == b"out\n"


@with_the_module
async def test_the_host_is_not_visible(sandbox, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    places = [str(secret), "/proc", "/sys", "/home", "/etc/passwd", "/dev/shm", str(Path(__file__))]
    assert all(os.path.exists(place) for place in (str(secret), "/proc", "/sys", "/etc/passwd", str(Path(__file__))))
    result = await sandbox.run(f"import os\nprint([p for p in {places!r} if os.path.exists(p)])", timeout=PATIENT_S)
    assert result.stdout == b"[]\n"


@with_the_module
async def test_only_tmp_can_be_written(sandbox):
    probe = """
import os, sys
hits = []
for place in ("/", "/usr", "/usr/bin", "/dev", sys.base_prefix, "/lib", "/tmp"):
    try:
        open(place + "/probe", "w").close()
        hits.append(place)
    except OSError:
        pass
print(hits)
"""
    assert (await sandbox.run(probe, timeout=PATIENT_S)).stdout == b"['/tmp']\n"


ESCAPES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
status = "uid %d" % os.getuid()
found = []
for name, attempt in {
    "mount": lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None),
    "setuid": lambda: libc.setuid(0),
    "ptrace init": lambda: libc.ptrace(16, 1, 0, 0),
    "hostname": lambda: libc.sethostname(b"x", 1),
    "user namespace": lambda: libc.unshare(0x10000000),
}.items():
    if attempt() == 0:
        found.append(name)
print(status, found, os.getppid())
"""


@with_the_module
async def test_no_way_back_to_privileges(sandbox):
    result = await sandbox.run(ESCAPES, timeout=PATIENT_S)
    assert result.stdout == b"uid 1000 [] 1\n", result
    if os.geteuid() == 0:  # positive control, in a throw-away child: the same calls succeed for who may make them
        control = "import os, ctypes\nctypes.CDLL(None).unshare(0x20000)\n" + ESCAPES.replace("/tmp", "/mnt").replace(
            'b"x", 1', "None, -1"
        )
        control = control.replace("libc.ptrace(16, 1, 0, 0)", "-1")
        printed = await outside("-c", control)
        assert "['mount', 'setuid', 'user namespace']" in printed


@with_the_module
async def test_outside_the_program_is_never_root(sandbox):
    run = asyncio.create_task(sandbox.run(LOOP, timeout=WHOLE_PROGRAM_S))
    uids = set()
    for pid in await program_started(sandbox):
        with contextlib.suppress(OSError):  # one that only started another has ended
            uids |= set(re.findall(r"^Uid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert uids
    assert "0" not in uids


@with_the_module
async def test_no_mounts_or_files_stay_on_the_host(sandbox, tmp_path):
    def traces():
        names = {"left-behind", "main.py"} & set(os.listdir("/tmp"))
        return mounts_beside(tmp_path), names

    before = traces()
    for _ in range(3):
        await sandbox.run("open('left-behind', 'w').write('x')", timeout=PATIENT_S)
    await sandbox.run(LOOP, timeout=0.2)
    sandbox.close()
    mounts, names = traces()
    assert (mounts - before[0], names) == (set(), before[1])
    await sandbox.check()


@with_the_module
async def test_exit_codes_stdin_files_and_argv(sandbox):
    assert (await sandbox.run("raise SystemExit(3)", timeout=PATIENT_S)).code == 3
    assert (await sandbox.run("import os\nos.kill(os.getpid(), 9)", timeout=PATIENT_S)).code == -9
    assert b"ValueError: no" in (await sandbox.run("raise ValueError('no')", timeout=PATIENT_S)).stderr
    echo = await sandbox.run(
        "import sys\nprint(sys.stdin.read()[::-1], open('d/x').read())", stdin=b"abc", files={"d/x": b"y"}, timeout=5
    )
    assert echo.stdout == b"cba y\n"
    version = await sandbox.run(
        [python_inside(), "-I", "-S", "-c", "import sys; print(sys.version_info[:2])"], timeout=5
    )
    assert version.stdout.decode().strip() == str(sys.version_info[:2]), version
    missing = await sandbox.run(["/no/such/program"], timeout=PATIENT_S)
    assert missing.code == 127
    with pytest.raises(BadRequest, match="relative path"):
        await sandbox.run("pass", files={"../x": b""}, timeout=PATIENT_S)


@with_the_module
async def test_cancelling_a_run_kills_it(sandbox):
    run = asyncio.create_task(sandbox.run(LOOP, timeout=1000))
    await program_started(sandbox)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await nothing_left(sandbox)


@with_the_module
async def test_a_killed_zygote_is_replaced(sandbox):
    for pid in descendants(sandbox._process.pid):
        with contextlib.suppress(ProcessLookupError):  # the first one's end is the end of those below it
            os.kill(pid, signal.SIGKILL)
    assert (await sandbox.run("print(1)", timeout=PATIENT_S)).stdout == b"1\n"


@with_the_module
async def test_closing_ends_running_programs():
    box = SingleRuns(SandboxConfig())
    await box.check()
    run = asyncio.create_task(box.run(LOOP, timeout=1000))
    started = await program_started(box)
    run.cancel()
    box.close()
    with pytest.raises(asyncio.CancelledError):
        await run
    async with asyncio.timeout(PATIENT_S):
        while started & descendants(1):
            await asyncio.sleep(0.01)


USER_RUN = """
import asyncio
from ostinato.worlds.sandbox import *
async def main():
    async with SingleRuns() as box:
        await box.check()
{prelude}
asyncio.run(main())
print("ran")
"""
REFUSE = """
import ctypes, os
uid = os.getuid()
ctypes.CDLL(None).unshare(0x10000000)
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write(f"{inside} {uid} 1")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
"""


def test_where_user_namespaces_are_refused_it_says_so():
    code = USER_RUN.format(prelude=REFUSE.replace("{inside}", "1234"))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "SandboxRefused" in result.stderr, result.stderr
    assert "step 'unshare the user namespace' failed" in result.stderr
    assert "max_user_namespaces" in result.stderr
    assert "ran" not in result.stdout


@with_the_module
async def test_an_interpreter_that_cannot_be_started_is_refused_by_name(monkeypatch, tmp_path):
    """As that of another user's home, which `setuid` programs and containers leave behind."""
    (tmp_path / "python").write_text("")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    async with SingleRuns() as runs:
        with pytest.raises(SandboxRefused, match=f"interpreter {tmp_path}/python cannot be started anew"):
            await runs.check()


def as_nobody(*argv):
    drop = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    path = os.pathsep.join(entry for entry in sys.path if entry.endswith(("site-packages", "src")))
    return subprocess.run(
        [*drop, *argv], capture_output=True, text=True, check=False, cwd="/", env={"PYTHONPATH": path}
    )


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="as an ordinary user, all other tests are this one"
)
def test_works_when_started_by_an_ordinary_user():
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{name}", f"/usr/local/bin/{name}"):  # the first may lie in root's home
        with contextlib.suppress(OSError):
            if (
                as_nobody(
                    python, "-c", "import ostinato.worlds.sandbox, os, sys; print(os.access(sys.executable, os.X_OK))"
                ).stdout
                == "True\n"
            ):
                break
    else:
        pytest.skip(f"no {name} here that an ordinary user may run")
    result = as_nobody(python, "-c", USER_RUN.format(prelude=""))
    assert result.stdout == "ran\n", result.stderr


def test_refusal_is_the_documented_error():
    assert issubclass(SandboxRefused, OSError)
