"""A worker's process: it says what it does, ends with its supervisor, and says why it fails."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

from ostinato.launch.placing import process
from ostinato.launch.placing.process import THREADS, WorkerProcess
from ostinato.launch.workers.shutdown import Stopped, unless

HEAD = """
import asyncio, sys, threading, time
from ostinato.core.errors import BadConfig, BadWeights, Conflict, StorageFull, Unauthorized, Unavailable
from ostinato.launch.workers.worker_main import run_process
from ostinato.launch.workers.shutdown import unless
"""


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch):
    monkeypatch.setattr(process, "spawn", FORK_SERVER.spawn)


def program(text):
    return (sys.executable, "-c", HEAD + textwrap.dedent(text))


@contextlib.asynccontextmanager
async def started(directory, text):
    worker = WorkerProcess("one", program(text), directory / "one.log", env=THREADS)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.kill()
        await worker.ended()


async def test_what_is_cancelled_may_put_its_things_away_first():
    stopping, put_away = asyncio.Event(), []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            put_away.append(True)

    asyncio.get_running_loop().call_later(0.01, stopping.set)
    with pytest.raises(Stopped):
        await unless(stopping, work())
    assert put_away == [True]


async def heard(worker, doing, timeout_s=PATIENT_S):
    async with asyncio.timeout(timeout_s):
        while worker.sign is None or worker.sign.doing != doing:
            await asyncio.sleep(0.02)


async def test_it_says_what_it_does_and_ends_when_told_to(tmp_path):
    text = """
    async def work(life):
        life.pulse.begin("loading", 60.0)
        life.pulse.trouble = lambda: "the bucket is away"
        await life.stopping.wait()
    run_process(work)
    """
    async with started(tmp_path, text) as worker:
        await heard(worker, "loading")
        assert (worker.sign.limit_s, worker.sign.trouble, worker.sign.failed) == (60.0, "the bucket is away", None)
        assert await worker.stop(PATIENT_S)
        assert await worker.ended() == 0


@pytest.mark.parametrize(
    ("raised", "code", "failed", "certain"),
    [
        ("BadConfig('no such model')", 2, "BadConfig: no such model", True),
        ("BadWeights('holds NaN')", 2, "BadWeights: holds NaN", True),
        ("Conflict('taken')", 2, "Conflict: taken", False),
        ("KeyError('a')", 1, "KeyError: 'a'", False),
        ("ExceptionGroup('x', [KeyError('a'), ExceptionGroup('y', [BadConfig('deep')])])", 2, "BadConfig: deep", True),
    ],
)
async def test_it_says_why_it_fails(tmp_path, raised, code, failed, certain):
    text = f"""
    async def work(life):
        life.pulse.begin("trying")
        raise {raised}
    run_process(work)
    """
    async with started(tmp_path, text) as worker:
        assert await worker.ended() == code
        assert (worker.sign.failed, worker.sign.certain, worker.sign.doing) == (failed, certain, "trying")
    written = (tmp_path / "one.log").read_text()
    assert ("Traceback" in written) == (code == 1)
    assert failed.partition(": ")[2] in written


@pytest.mark.parametrize("limited", [True, False])
async def test_a_lack_of_memory_is_named_with_what_there_is(tmp_path, limited):
    """Where a shell limits the address space, the same allocation would fail at the next start: there is none."""
    text = f"""
    import resource
    if {limited}:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    async def work(life):
        life.pulse.begin("taking step 3")
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 538060032 bytes")
    run_process(work)
    """
    async with started(tmp_path, text) as worker:
        assert await worker.ended() == 2
        assert worker.sign.failed.startswith("out of memory while taking step 3; ")
        for part in ("leaves", "GiB", "smaller model", "smaller steps", "you tried 538060032 bytes"):
            assert part in worker.sign.failed
        assert worker.sign.certain == limited
    assert "Traceback" not in (tmp_path / "one.log").read_text()


@pytest.mark.parametrize(
    ("raised", "code", "outside"),
    [
        ("StorageFull('no room')", 2, True),
        ("OSError(28, 'No space left on device')", 1, True),
        ("OSError(30, 'Read-only file system')", 1, True),
        ("Unavailable('the bucket is away')", 2, True),
        ("Unauthorized('the bucket refuses us')", 2, True),
        ("Conflict('taken')", 2, False),
    ],
)
async def test_it_says_why_it_fails_where_the_disk_takes_no_line_of_its_output(raised, code, outside):
    text = f"""
    async def work(life):
        raise {raised}
    run_process(work)
    """
    worker = WorkerProcess("one", program(text), Path("/dev/full"))
    await worker.start()
    assert await worker.ended() == code
    assert worker.sign.failed.startswith(raised.partition("(")[0])
    assert (worker.sign.outside, worker.sign.certain) == (outside, False)


async def test_told_to_end_it_waits_for_no_thread_that_computes(tmp_path):
    text = """
    async def work(life):
        life.pulse.begin("taking a step")
        await unless(life.stopping, asyncio.to_thread(time.sleep, 300))
    run_process(work)
    """
    async with started(tmp_path, text) as worker:
        await heard(worker, "taking a step")
        assert await worker.stop(100.0), "no SIGKILL was needed"
        assert await worker.ended() == 0
    assert "told to end while taking a step" in (tmp_path / "one.log").read_text()


async def test_a_loop_that_stands_still_is_seen_from_outside(tmp_path):
    text = """
    async def work(life):
        life.pulse.begin("serving")
        await asyncio.sleep(1.5)
        time.sleep(300)
    run_process(work)
    """
    async with started(tmp_path, text) as worker:
        await heard(worker, "serving")
        async with asyncio.timeout(PATIENT_S):
            while worker.sign.lag_s < 2.5:
                await asyncio.sleep(0.05)


def test_it_dies_with_its_supervisor_even_while_it_is_stopped_itself(tmp_path):
    """kill -9 of the supervisor; one worker is healthy, one is stopped and can run no code of its own."""
    worker = HEAD + textwrap.dedent(
        """
        async def work(life):
            print(__import__("os").getpid(), flush=True)
            await life.stopping.wait()
        run_process(work)
        """
    )
    supervisor = textwrap.dedent(
        f"""
        import asyncio, sys
        from pathlib import Path
        from ostinato.launch.placing.process import WorkerProcess
        async def main():
            for name in ("one", "two"):
                await WorkerProcess(name, (sys.executable, "-c", {worker!r}), Path({str(tmp_path)!r}) / name).start()
            await asyncio.sleep(300)
        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", supervisor])
    try:
        pids = [_pid(tmp_path / name) for name in ("one", "two")]
        os.kill(pids[1], signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + PATIENT_S
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if _alive(pid)] == []


def test_where_the_kernel_does_not_help_the_worker_notices_by_itself(tmp_path):
    worker = (
        "from ostinato.launch.workers import worker_main as life\nlife.die_with_parent = lambda: None\n"
        + HEAD.replace(
            "from ostinato.launch.workers.worker_main import run_process\n", "run_process = life.run_process\n"
        )
    )
    worker += textwrap.dedent(
        """
        async def work(life):
            print(__import__("os").getpid(), flush=True)
            await life.stopping.wait()
            print("ended by itself", flush=True)
        run_process(work)
        """
    )
    supervisor = textwrap.dedent(
        f"""
        import asyncio, sys
        from pathlib import Path
        from ostinato.launch.placing.process import WorkerProcess
        async def main():
            await WorkerProcess("one", (sys.executable, "-c", {worker!r}), Path({str(tmp_path / "one")!r})).start()
            await asyncio.sleep(300)
        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", supervisor])
    try:
        pid = _pid(tmp_path / "one")
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + PATIENT_S
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(pid)
    assert "ended by itself" in (tmp_path / "one").read_text()


async def test_the_trainer_goes_before_the_gateway_when_memory_is_short(tmp_path):
    text = """
    async def work(life):
        print("score", open("/proc/self/oom_score_adj").read().strip(), flush=True)
    run_process(work, expendable=500)
    """
    async with started(tmp_path, text) as worker:
        assert await worker.ended() == 0
    assert "score 500" in (tmp_path / "one.log").read_text()


def test_started_by_hand_it_prints_its_error_and_ends_with_the_same_code(tmp_path):
    text = """
    async def work(life):
        raise BadConfig("no such [model]")
    run_process(work)
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OSTINATO_")}
    done = subprocess.run(
        program(text), capture_output=True, text=True, env=environment, timeout=WHOLE_PROGRAM_S, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (2, "error no such [model]")


def _pid(path: Path) -> int:
    deadline = time.monotonic() + WHOLE_PROGRAM_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(path.read_text().split()[0])
        time.sleep(0.05)
    raise AssertionError("the worker did not start")


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
