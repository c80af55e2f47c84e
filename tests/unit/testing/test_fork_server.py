"""The fork server: a forked worker is like a process that was started, for its supervisor and for itself."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes import fork_server
from tests.fakes.fork_server import SHARED, ForkServer, OtherServer

from ostinato.launch.placing import process
from ostinato.launch.placing.heartbeat import PARENT
from ostinato.launch.placing.process import WorkerProcess

PROGRAM = """
import os, sys, time
from ostinato.launch.placing.heartbeat import die_with_parent
what, *words = sys.argv[1:]
if what == "tell":
    files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]  # not what lists them
    sys.stdout.write(f"{os.getcwd()} {os.environ['WORD']} {words} {os.getsid(0) == os.getpid()} {sorted(files)}\\n")
elif what == "end":
    sys.exit(int(words[0]))
elif what == "fail":
    raise ZeroDivisionError("by zero")
elif what == "echo":
    sys.stdout.reconfigure(errors="backslashreplace")  # fails where what was a file is a pipe now
    sys.stdout.write(sys.stdin.read() + os.read(int(words[0]), 9).decode())
    sys.exit("and an error")
elif what == "imported":
    import ours
die_with_parent()
sys.stdout.write("waits\\n")
sys.stdout.flush()
while what == "wait":
    time.sleep(1)
"""
COMMAND = (sys.executable, "-c", PROGRAM)


@pytest.fixture(scope="module")
def running():
    server = ForkServer(libraries=("ostinato.launch.workers.worker_main",))
    yield server
    server.close()


@pytest.fixture
def server(running, monkeypatch):
    """One that started with an earlier test, unless that one closed it."""
    monkeypatch.setattr(process, "spawn", running.spawn)
    return running


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
    assert told.startswith(f"{tmp_path} said ['a', 'b c'] True [0, 1, 2, ")
    assert len(told.split("True ")[1].split()) == 4, "three streams and its pulse"


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


def test_a_program_is_used_as_one_of_the_subprocess_module(tmp_path, server):
    with server.popen([*COMMAND, "wait"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as one:
        assert type(one) is not subprocess.Popen, "it was forked"
        assert one.stdout.readline() == "waits\n"
        assert os.readlink(f"/proc/{one.pid}/cwd") == str(tmp_path)
        assert one.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(0.01)
        os.kill(one.pid, signal.SIGKILL)
        assert one.wait() == one.poll() == -signal.SIGKILL
        one.terminate()
    with server.popen([*COMMAND, "wait"], stdout=subprocess.DEVNULL) as two:
        two.terminate()
        assert two.wait(PATIENT_S) == -signal.SIGTERM


def test_a_program_has_its_pipes_and_its_files_by_their_numbers(server):
    ours, theirs = os.pipe()
    os.write(theirs, b"a file")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with server.popen([*COMMAND, "echo", ours], pass_fds=[ours], text=True, **pipes) as one:
        assert one.communicate("said and ", timeout=PATIENT_S) == ("said and a file", "and an error\n")
    assert one.returncode == 1
    for fd in (ours, theirs):
        os.close(fd)


def test_a_programs_environment_is_this_one_and_what_is_said(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WORD", "inherited")
    assert " inherited " in server.run([*COMMAND, "tell"], timeout=PATIENT_S).stdout
    assert " said " in server.run([*COMMAND, "tell"], env={"WORD": "said"}).stdout
    (tmp_path / "ours.py").write_text("print('imported')")
    assert "No module named 'ours'" in server.run([*COMMAND, "imported"]).stderr
    done = server.run([*COMMAND, "imported"], env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "imported\nwaits\n")


def test_a_module_is_run_as_the_main_one(tmp_path, server):
    (tmp_path / "ours.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    done = server.run([sys.executable, "-m", "ours", "a"], env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "__main__ ['a']\n"


def test_what_torch_writes_into_the_environment_keeps_nothing_from_being_forked(server, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    with server.popen([*COMMAND, "end", "0"]) as one:
        assert type(one) is not subprocess.Popen


KERNEL = "from ostinato.weights.delta.encoder import _parameter as kernel\n"


def test_a_kernel_that_was_compiled_before_is_loaded_once_for_all_programs(server):
    assert server.run([sys.executable, "-c", f"{KERNEL}kernel(9, 3)"]).returncode == 0
    with contextlib.closing(ForkServer(libraries=("ostinato.weights.delta.encoder",))) as other:
        told = other.run(
            [sys.executable, "-c", f"{KERNEL}print(len(kernel.overloads), sum(kernel.stats.cache_misses.values()))"]
        )
    loaded, compiled = map(int, told.stdout.split())
    assert (loaded > 0, compiled) == (True, 0)


def test_what_a_test_has_the_interpreter_run_first_is_run_first(tmp_path, server):
    (tmp_path / "sitecustomize.py").write_text("print('first')")
    done = server.run([*COMMAND, "end", "0"], env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "first\n"


def test_another_process_may_ask_for_programs(server):
    other = OtherServer(server.start())
    assert other.run([*COMMAND, "end", "7"]).returncode == 7
    with other.popen([*COMMAND, "wait"], stdout=subprocess.PIPE, text=True) as one:
        assert type(one) is not subprocess.Popen
        assert one.stdout.readline() == "waits\n"
        server.close()
        assert one.wait(PATIENT_S) == -signal.SIGKILL, "they end with the server"


def test_who_can_only_start_an_interpreter_has_its_program_forked(tmp_path, server):
    """With this process's streams, environment, directory, signals and exit code: as pytest-xdist starts its workers."""
    interpreter, env = [sys.executable, fork_server.__file__, "-u", "-c"], os.environ | {SHARED: server.start()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env, "cwd": tmp_path}
    told = "import os, sys; print(os.getcwd(), 'ostinato.launch.workers.worker_main' in sys.modules, sys.stdin.read()); sys.exit(7)"
    with subprocess.Popen([*interpreter, told], **pipes) as one:
        assert one.communicate("said", timeout=PATIENT_S)[0] == f"{tmp_path} True said\n"
    assert one.returncode == 7
    with subprocess.Popen([*interpreter, PROGRAM, "wait"], **pipes) as two:
        assert two.stdout.readline() == "waits\n"
        two.send_signal(signal.SIGTERM)
        assert two.wait(PATIENT_S) == 128 + signal.SIGTERM


def test_the_workers_of_these_tests_are_forked(pytestconfig):
    """This process itself, where it is a worker of pytest-xdist."""
    if hasattr(pytestconfig, "workerinput"):
        assert b"fork_server import serve" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        assert fork_server.FORK_SERVER.start() == os.environ[SHARED], "and they share their server"


@pytest.mark.parametrize("forks", [True, False])
def test_what_a_program_starts_is_forked_if_it_shall_be(tmp_path, server, forks):
    supervisor = """
import asyncio, os, sys
from pathlib import Path
from ostinato.launch.placing.process import THREADS, WorkerProcess

async def work():
    one = WorkerProcess("one", (sys.executable, "-c", "import os; print(os.getppid())"), Path("one.log"), env=THREADS)
    await one.start()
    print(os.getppid(), os.getpid(), await one.ended())

asyncio.run(work())
"""
    done = server.run([sys.executable, "-c", supervisor], cwd=tmp_path, forks=forks)
    parent, own, code = done.stdout.split()
    assert code == "0"
    assert (tmp_path / "one.log").read_text() == f"{parent if forks else own}\n"


def test_programs_end_with_the_process_that_started_them(tmp_path):
    code = """
import sys, time
from tests.fakes.fork_server import ForkServer
server = ForkServer(libraries=())
one = server.popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(one.pid, flush=True)
time.sleep(600)
"""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | path) as starter:
        program = Path(f"/proc/{int(starter.stdout.readline())}")
        assert program.exists()
        starter.kill()
    deadline = time.monotonic() + PATIENT_S
    while program.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not program.exists()
