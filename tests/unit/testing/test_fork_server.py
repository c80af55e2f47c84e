"""The fork server: a forked worker is like a process that was started, for its supervisor and for itself."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.fork_server import ForkServer

from ostinato.launch.placing import process
from ostinato.launch.placing.process import WorkerProcess
from ostinato.launch.placing.sign import PARENT
from ostinato.launch.workers.stopping import die_with_parent

COMMAND = (sys.executable, "-m", __name__)


def main():
    """What the forked processes of these tests do."""
    what, *words = sys.argv[1:]
    if what == "tell":
        files = sorted(os.listdir("/proc/self/fd"))[:-1]  # without the one that lists them
        sys.stdout.write(f"{os.getcwd()} {os.environ['WORD']} {words} {os.getsid(0) == os.getpid()} {files}\n")
    elif what == "end":
        sys.exit(int(words[0]))
    elif what == "fail":
        raise ZeroDivisionError("by zero")
    die_with_parent()
    sys.stdout.write("waits\n")
    sys.stdout.flush()
    while what == "wait":
        time.sleep(1)


@pytest.fixture
def server(monkeypatch):
    server = ForkServer(module=__name__, libraries=())
    monkeypatch.setattr(process, "spawn", server.spawn)
    yield server
    server.close()


def worker(directory: Path, *words: str, **env: str) -> WorkerProcess:
    return WorkerProcess(
        "one", (*COMMAND, *words), directory / "one.log", env=process.THREADS | env, directory=directory
    )


async def until(condition):
    async with asyncio.timeout(PATIENT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_forked_worker_has_its_words_environment_directory_and_files_only(tmp_path, server):
    one = worker(tmp_path, "tell", "a", "b c", WORD="said")
    await one.start()
    assert await one.ended() == 0
    told = (tmp_path / "one.log").read_text().splitlines()[0]
    assert told.startswith(f"{tmp_path} said ['a', 'b c'] True ['0', '1', '2', ")
    assert told.count("'") == 4 + 2 * 4, "three streams and its pulse"


@pytest.mark.parametrize(("words", "code"), [(("end", "7"), 7), (("end", "0"), 0), (("fail",), 1)])
async def test_its_exit_code_is_reported(tmp_path, server, words, code):
    one = worker(tmp_path, *words)
    await one.start()
    assert await one.ended() == code
    assert ("ZeroDivisionError: by zero" in (tmp_path / "one.log").read_text()) == (words == ("fail",))


async def test_a_signal_ends_it_and_is_reported(tmp_path, server):
    one, two = worker(tmp_path / "a", "wait"), worker(tmp_path / "b", "wait")
    for each in (one, two):
        each.directory.mkdir()
        await each.start()
    await until(lambda: "waits" in one.log.read_text() and "waits" in two.log.read_text())
    os.kill(one.pid, signal.SIGKILL)
    assert await one.ended() == -signal.SIGKILL
    assert two.running
    assert await two.stop(PATIENT_S)
    assert await two.ended() == -signal.SIGTERM


async def test_it_dies_with_the_server(tmp_path, server):
    one = worker(tmp_path, "wait")
    await one.start()
    await until(lambda: "waits" in one.log.read_text())
    server.close()
    assert await one.ended() == -signal.SIGKILL
    await until(lambda: not Path(f"/proc/{one.pid}").exists())


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        ((sys.executable, "-S", "-c", "import os; print(os.getppid())"), {}),
        ((*COMMAND, "end", "0"), {"NUMBA_OPT": "1"}),
    ],
    ids=["another program", "other settings of a library"],
)
async def test_anything_else_is_a_process_of_its_own(tmp_path, server, argv, env):
    one = WorkerProcess("one", argv, tmp_path / "one.log", env=process.THREADS | env)
    await one.start()
    assert isinstance(one.process, asyncio.subprocess.Process)
    assert await one.ended() in (0, 1)
    assert PARENT not in os.environ
