"""Forked workers: to its supervisor and to itself each is like one that was started, whatever becomes of the process that it came from."""

import asyncio
import contextlib
import errno
import json
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.places import ensure_writable
from ostinato.launch.placing import process, warm
from ostinato.launch.placing.process import THREADS, WorkerProcess
from ostinato.launch.placing.supervision import Supervisor
from ostinato.launch.placing.warm import NO_FORKS, ForkedWorker, WarmProcess, forked_workers, possible
from ostinato.placing_config import SuperviseConfig

PROGRAM = """
import json, os, random, resource, secrets, signal, sys, time, uuid
import numpy
from ostinato.launch.placing.heartbeat import die_with_parent

what, *words = sys.argv[1:]
if what == "tell":
    files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]  # not what lists them
    told = {
        "words": words, "main": __name__, "path": sys.path[0], "directory": os.getcwd(), "environment": dict(os.environ),
        "parent": os.getppid(), "session": os.getsid(0), "group": os.getpgrp(), "pid": os.getpid(), "files": sorted(files),
        "called": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"), "limit": resource.getrlimit(resource.RLIMIT_CORE),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "others": [signal.getsignal(each).name for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)],
        "input": sys.stdin.read(), "warm": "ours" in sys.modules,
        "drawn": [random.random(), numpy.random.random(), secrets.token_hex(), str(uuid.uuid4()), str(numpy.random.default_rng().random())],
    }
    sys.stdout.write(json.dumps(told) + "\\n")
elif what == "end":
    sys.exit(int(words[0]))
elif what == "fail":
    raise ZeroDivisionError("by zero")
elif what == "print":
    die_with_parent()
    print("printed")
    time.sleep(600)
elif what == "wait":
    die_with_parent()
    print("waits", flush=True)
    while True:
        time.sleep(1)
"""
LIBRARY = """
import os, random, numpy
os.environ.setdefault("WRITTEN", "by a library")
random.seed(0)
numpy.random.seed(0)
"""
LIBRARIES = ("ours",)
LIMITS = SuperviseConfig(silence_s=60.0, stop_s=5.0, tries=3, window_s=60.0, longest_wait_s=0.05)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with the workers' program and a library of theirs."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "ours.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(
        warm, "PER_WORKER", warm.PER_WORKER | {"PYTEST_CURRENT_TEST"}
    )  # which pytest changes within a test
    return tmp_path


@pytest.fixture
def warmed(place, monkeypatch):
    """A warm process that workers are forked from."""
    monkeypatch.setattr(warm, "_FORK_S", PATIENT_S)
    made = WarmProcess(LIBRARIES)
    monkeypatch.setattr(process, "spawn", made.spawn)
    yield made
    made.close()


def worker(place: Path, *words: str, name: str = "one", **env: str) -> WorkerProcess:
    argv = (sys.executable, "-m", "program", *words)
    return WorkerProcess(name, argv, place / f"{name}.log", env=THREADS | env)


async def told(one: WorkerProcess) -> dict:
    await one.start()
    assert await one.ended() == 0, one.log.read_text()
    return json.loads(one.log.read_text().splitlines()[-1])


async def until(condition):
    async with asyncio.timeout(PATIENT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def forked(place: Path, *words: str) -> WorkerProcess:
    """A worker that was forked, which the process has to be ready for: it is not waited for once another one was."""
    async with asyncio.timeout(PATIENT_S):
        while True:
            one = worker(place, *words, name="forked")
            await one.start()
            if isinstance(one.process, ForkedWorker):
                return one
            await one.kill()
            await one.ended()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def held(pid: int) -> None:
    """Stop a process, so that it replies to nothing."""
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: state(pid) == "T")


def reaped(pid: int) -> int:
    """Take a child's end away from whoever waits for it. Returns its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def alive(pid: int) -> bool:
    try:
        return state(pid) not in "ZX"
    except OSError:
        return False


async def test_it_has_what_a_worker_has_that_was_started(place, warmed, monkeypatch):
    """Its words, name, environment, directory, files, session, signals, limits and parent."""
    forked = worker(place, "tell", "a", "b c", OSTINATO_LISTEN_FD="7")
    one = await told(forked)
    assert isinstance(forked.process, ForkedWorker)
    monkeypatch.setattr(process, "spawn", asyncio.create_subprocess_exec)
    two = await told(worker(place, "tell", "a", "b c", OSTINATO_LISTEN_FD="7"))
    assert one.pop("warm")
    assert not two.pop("warm")
    assert one["environment"].pop("WRITTEN") == "by a library", "as if it had been imported there"
    for each in (one, two):
        assert each["session"] == each["group"] == each["pid"]
        assert len(each["files"]) == 4, "three streams and its pulse"
        assert each["called"][1:] == ["-m", "program", "tell", "a", "b c"]
        del each["session"], each["group"], each["pid"], each["files"], each["drawn"]
        del each["environment"]["OSTINATO_PULSE_FD"]
    assert one == two
    assert one["parent"] == os.getpid()
    assert one["limit"] == [*resource.getrlimit(resource.RLIMIT_CORE)]


async def test_no_two_workers_draw_the_same_numbers(place, warmed):
    drawn = [(await told(worker(place, "tell", name=name)))["drawn"] for name in ("one", "two")]
    assert all(one != two for one, two in zip(*drawn, strict=True))


@pytest.mark.parametrize(("words", "code"), [(("end", "7"), 7), (("end", "0"), 0), (("fail",), 1)])
async def test_its_exit_code_is_its_own(place, warmed, words, code):
    one = worker(place, *words)
    await one.start()
    assert isinstance(one.process, ForkedWorker)
    assert await one.ended() == code
    assert ("ZeroDivisionError: by zero" in one.log.read_text()) == (words == ("fail",))


async def test_a_signal_ends_it_alone(place, warmed):
    one, two = worker(place, "wait"), worker(place, "wait", name="two")
    for each in (one, two):
        await each.start()
    await until(lambda: "waits" in one.log.read_text() and "waits" in two.log.read_text())
    os.kill(one.pid, signal.SIGKILL)
    assert await one.ended() == -signal.SIGKILL
    assert two.running
    assert await two.stop(PATIENT_S)
    assert await two.ended() == -signal.SIGTERM


async def test_workers_outlive_the_process_that_they_came_from_and_it_is_begun_anew(place, warmed):
    one, two = (worker(place, "wait", name=name) for name in ("one", "two"))
    await one.start()
    before = warmed.pid
    os.kill(before, signal.SIGKILL)
    await until(lambda: not alive(before))
    await two.start()
    assert not isinstance(two.process, ForkedWorker), "it does not wait for imports"
    assert warmed.pid not in (0, before)
    three = await forked(place, "wait")
    assert one.running
    for each in (one, two, three):
        await each.kill()
        assert await each.ended() == -signal.SIGKILL


async def test_a_worker_that_is_started_again_waits_for_no_imports(place, warmed):
    first = worker(place, "wait")
    await first.start()
    assert isinstance(first.process, ForkedWorker)
    (place / "ours.py").write_text("import time\ntime.sleep(600)")
    before = warmed.pid
    os.kill(before, signal.SIGKILL)
    await until(lambda: not alive(before))
    later = [worker(place, "wait", name=name) for name in ("two", "three")]
    async with asyncio.timeout(PATIENT_S):
        for each in later:
            await each.start()
            assert not isinstance(each.process, ForkedWorker)
    await until(lambda: all("waits" in each.log.read_text() for each in later))
    assert warmed.pid, "it still imports"
    for each in (first, *later):
        await each.kill()
        await each.ended()


async def test_a_process_that_is_killed_while_it_imports_is_begun_anew(place, monkeypatch):
    normal = (place / "ours.py").read_text()
    (place / "ours.py").write_text("import time\ntime.sleep(600)")
    with contextlib.closing(WarmProcess(LIBRARIES, pytest.fail)) as made:
        monkeypatch.setattr(process, "spawn", made.spawn)
        for _ in range(2):
            before = made.pid
            os.kill(before, signal.SIGKILL)
            await until(lambda pid=before: not alive(pid))
            one = worker(place, "end", "7")
            await one.start()
            assert not isinstance(one.process, ForkedWorker)
            assert await one.ended() == 7
        (place / "ours.py").write_text(normal)
        os.kill(made.pid, signal.SIGKILL)
        assert await (await forked(place, "end", "7")).ended() == 7


async def test_the_loop_goes_on_while_a_worker_is_forked(place, warmed, monkeypatch):
    monkeypatch.setattr(warm, "_FORK_S", PATIENT_S)
    assert (await told(worker(place, "tell")))["warm"]
    await held(warmed.pid)
    one = worker(place, "end", "7")
    starting = asyncio.create_task(one.start())
    await asyncio.sleep(0.05)
    assert not starting.done()
    os.kill(warmed.pid, signal.SIGCONT)
    await starting
    assert isinstance(one.process, ForkedWorker)
    assert await one.ended() == 7


@pytest.mark.parametrize("cancelled", [False, True], ids=["too late", "cancelled"])
async def test_a_reply_that_is_lost_costs_no_more_than_that_fork(place, warmed, monkeypatch, cancelled):
    assert (await told(worker(place, "tell")))["warm"]
    before = warmed.pid
    await held(before)
    with monkeypatch.context() as hurried:
        hurried.setattr(warm, "_FORK_S", PATIENT_S if cancelled else 0.05)
        one = worker(place, "tell", name="two")
        starting = asyncio.create_task(one.start())
        if cancelled:
            await asyncio.sleep(0.05)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert one.log.read_text() == ""
        else:
            await starting
            assert not isinstance(one.process, ForkedWorker), "it is no fault of the worker's"
            assert await one.ended() == 0
            assert len(one.log.read_text().splitlines()) == 1, "there was but one"
    assert not alive(before)
    three = await forked(place, "tell")
    assert await three.ended() == 0
    assert json.loads(three.log.read_text().splitlines()[-1])["pid"] == three.pid


async def test_a_fork_that_nobody_counts_on_does_nothing(place, warmed, monkeypatch):
    seen, said = [], []
    monkeypatch.setattr(warmed, "_say", said.append)
    monkeypatch.setattr(warm, "_is_child", seen.append)
    one = worker(place, "tell")
    await one.start()
    assert not isinstance(one.process, ForkedWorker)
    assert await one.ended() == 0
    assert reaped(seen[0]) == 0
    assert [json.loads(line)["pid"] for line in one.log.read_text().splitlines()] == [one.pid]
    assert said == ["workers are started anew, not forked: the system does not give them to their supervisor"]


async def test_a_fork_whose_end_could_not_be_waited_for_does_nothing(place, warmed, monkeypatch):
    assert (await told(worker(place, "tell")))["warm"]
    seen = []

    def refuse(pid):
        seen.append(pid)
        raise OSError(errno.EMFILE, "too many open files")

    one = worker(place, "tell", name="two")
    with monkeypatch.context() as full:
        full.setattr(os, "pidfd_open", refuse)
        with pytest.raises(OSError, match="too many open files"):
            await one.start()
    await until(lambda: not Path(f"/proc/{seen[0]}").exists())  # nor does it stay as a zombie
    assert one.log.read_text() == ""


async def test_the_end_of_a_worker_that_somebody_else_was_told_is_noticed(place, warmed):
    one = worker(place, "wait")
    await one.start()
    assert isinstance(one.process, ForkedWorker)
    os.kill(one.pid, signal.SIGKILL)
    reaped(one.pid)
    async with asyncio.timeout(PATIENT_S):
        assert await one.ended() == 255


async def test_it_has_the_environment_that_a_home_without_room_leads_to(place, warmed, monkeypatch):
    """The process began before `ensure_writable`; it follows, but not for ever."""
    said = []
    monkeypatch.setattr(warmed, "_say", said.append)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("HOME", "/dev/null")
    assert ensure_writable(place / "run")
    one = worker(place, "tell")
    environment = (await told(one))["environment"]
    assert isinstance(one.process, ForkedWorker)
    assert environment["XDG_CACHE_HOME"] == str(place / "run" / ".cache")
    assert said == []
    monkeypatch.setenv("NUMBA_OPT", "1")
    two = worker(place, "tell", name="two")
    assert (await told(two))["environment"]["NUMBA_OPT"] == "1"
    assert not isinstance(two.process, ForkedWorker)
    assert warmed.pid == 0, "it is of no use"
    assert said == ["workers are started anew, not forked: the environment changes again and again (NUMBA_OPT)"]


async def test_what_it_prints_is_in_its_file_at_once_if_nothing_is_buffered(place, monkeypatch):
    """As in our image; a worker that was killed would lose it."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with contextlib.closing(WarmProcess(LIBRARIES)) as made:
        monkeypatch.setattr(process, "spawn", made.spawn)
        one = worker(place, "print")
        await one.start()
        assert isinstance(one.process, ForkedWorker)
        await until(lambda: one.log.read_text() == "printed\n")
        await one.kill()
        await one.ended()


async def test_what_cannot_be_forked_is_started(place, warmed, monkeypatch):
    """Another program, a worker in whose environment an import may find something else, and one whose environment is too long to send."""
    other = WorkerProcess("other", (sys.executable, "-S", "-c", "pass"), place / "other.log", env=THREADS)
    differs = worker(place, "end", "0", NUMBA_OPT="1")
    long = worker(place, "end", "0", OSTINATO_LISTEN_FD="7" * 2_000)
    monkeypatch.setattr(warm, "MOST_BYTES", len(json.dumps({**os.environ})) + 2_000)
    for each in (other, differs, long):
        await each.start()
        assert not isinstance(each.process, ForkedWorker)
        assert await each.ended() == 0
    short = worker(place, "end", "0")
    await short.start()
    assert isinstance(short.process, ForkedWorker)
    assert await short.ended() == 0


@pytest.mark.parametrize(
    "library",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "kept = open(__file__)",
        "raise ImportError('half installed')",
    ],
    ids=["a thread", "an open file", "an error"],
)
async def test_nothing_is_forked_from_a_process_that_is_unfit_for_it(place, monkeypatch, library):
    (place / "ours.py").write_text(library)
    said = []
    made = WarmProcess(LIBRARIES, said.append)
    monkeypatch.setattr(process, "spawn", made.spawn)
    for _ in range(2):
        one = worker(place, "end", "7")
        await one.start()
        assert not isinstance(one.process, ForkedWorker)
        assert await one.ended() == 7
        assert made.pid == 0, "it is of no use"
    (why,) = said
    assert why.startswith("workers are started anew, not forked: ")


async def test_a_worker_that_has_no_group_of_its_own_yet_is_killed_by_its_number(place, warmed, monkeypatch):
    def no_group(*_):
        raise ProcessLookupError

    one = await forked(place, "wait")
    monkeypatch.setattr(process.os, "killpg", no_group)
    async with asyncio.timeout(PATIENT_S):
        await one.kill()
        assert await one.ended() == -signal.SIGKILL


async def test_a_worker_that_waits_for_imports_can_be_told_to_end(place, monkeypatch):
    (place / "ours.py").write_text("import time\ntime.sleep(600)")
    made = WarmProcess(LIBRARIES)
    monkeypatch.setattr(process, "spawn", made.spawn)
    supervisor = Supervisor([worker(place, "wait")], LIMITS, lambda *_: None)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: (place / "one.log").exists())
    supervisor.stop()
    async with asyncio.timeout(PATIENT_S):
        await running
    assert supervisor.watched[0].worker.pid == 0
    made.close()


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from ostinato.launch.placing import process
from ostinato.launch.placing.warm import WarmProcess

async def work(warmed):
    one = process.WorkerProcess("one", (sys.executable, "-m", "program", "wait"), Path("one.log"), env=process.THREADS)
    await one.start()
    print(warmed.pid, one.pid, type(one.process).__name__, flush=True)
    await one.ended()

warmed = WarmProcess(("ours",))
process.spawn = warmed.spawn
asyncio.run(work(warmed))
"""


async def test_kill_9_of_the_supervisor_leaves_nothing(place):
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SUPERVISOR, cwd=place, stdout=asyncio.subprocess.PIPE
    )
    *pids, kind = (await started.stdout.readline()).decode().split()
    assert kind == "ForkedWorker"
    await until(lambda: "waits" in (place / "one.log").read_text())
    assert all(alive(int(pid)) for pid in pids)
    started.kill()
    await started.wait()
    await until(lambda: not any(alive(int(pid)) for pid in pids))


def test_it_is_left_alone_by_a_ctrl_c_at_the_terminal(warmed):
    assert os.getsid(warmed.pid) == warmed.pid != os.getsid(0)


def test_it_can_be_switched_off_and_leaves_other_ways_to_start_alone(monkeypatch):
    assert possible() == (sys.platform == "linux")
    monkeypatch.setenv(NO_FORKS, "1")
    with forked_workers(pytest.fail):
        assert process.spawn is asyncio.create_subprocess_exec
    monkeypatch.delenv(NO_FORKS)

    async def another(*_, **__): ...

    monkeypatch.setattr(process, "spawn", another)
    assert not possible()


def test_where_the_kernel_gives_no_orphans_workers_are_started(monkeypatch):
    def refused(_: bool) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(warm, "_adopt", refused)
    with forked_workers(pytest.fail):
        assert process.spawn is asyncio.create_subprocess_exec


IGNORING = """
import asyncio, signal, sys
from pathlib import Path
from ostinato.launch.placing import process
from ostinato.launch.placing.warm import forked_workers

async def work():
    one = process.WorkerProcess("one", (sys.executable, "-m", "program", "wait"), Path("one.log"), env=process.THREADS)
    await one.start()
    await one.kill()
    print(await one.ended(), flush=True)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as a parent may have left it, over the exec
with forked_workers(print):
    asyncio.run(work())
"""


async def test_a_supervisor_that_is_told_of_no_childs_end_notices_it_all_the_same(place):
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IGNORING, cwd=place, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENT_S):
        said, _ = await started.communicate()
    assert said.decode() == "255\n"
