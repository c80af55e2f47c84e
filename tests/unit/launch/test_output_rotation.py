"""A worker's output is bounded as it is written, and nobody who writes or reads it minds."""

import asyncio
import errno
import os
import subprocess
import sys
import textwrap

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

from ostinato.launch.placing import process
from ostinato.launch.placing.process import OUTPUT, THREADS, WorkerProcess, rotate, rotation

MOST = 100_000
HEAD = f"""
import asyncio, os, subprocess, sys, threading, time
from ostinato.launch.placing import process
from ostinato.launch.workers.worker_main import run_process as living
process.LOOK_S = 0.02
def live(work):
    living(work, output_bytes={MOST})
def burst(times, line=b"a line that a worker writes" * 30):
    for number in range(times):
        os.write(1, line + b"%d" % number + bytes([10]))
"""


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch):
    monkeypatch.setattr(process, "spawn", FORK_SERVER.spawn)


async def ended(directory, text):
    worker = WorkerProcess(
        "one", (sys.executable, "-c", HEAD + textwrap.dedent(text)), directory / "one.log", env=THREADS
    )
    await worker.start()
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        return worker, await worker.ended()


def test_a_long_output_is_moved_aside_and_its_writers_go_on(tmp_path):
    path = tmp_path / "serve.log"
    with path.open("ab", buffering=0) as writer:  # as a worker's output: opened to append, and never again
        writer.write(b"old\n" * 100)
        assert not rotate(path, 400)
        assert rotate(path, 399)
        assert path.read_bytes() == b""
        assert (tmp_path / "serve.1.log").read_bytes() == b"old\n" * 99, "whole lines, as many as may be kept"
        writer.write(b"new\n")
        assert path.read_bytes() == b"new\n"
        writer.write(b"x" * 500)
        assert rotate(path, 399)
        assert (tmp_path / "serve.1.log").read_bytes() == b"x" * 399
    assert sorted(each.name for each in tmp_path.iterdir()) == ["serve.1.log", "serve.log"]


def test_without_room_for_the_copy_a_file_still_ends_at_twice_its_size(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    path = tmp_path / "serve.log"
    monkeypatch.setattr(process, "older", full)
    path.write_bytes(b"x" * 800)
    with pytest.raises(OSError, match="no space"):
        rotate(path, 400)
    assert path.stat().st_size == 800
    path.write_bytes(b"x" * 801)
    assert rotate(path, 400)
    assert [(each.name, each.stat().st_size) for each in tmp_path.iterdir()] == [("serve.log", 0)]


async def test_whatever_a_worker_and_its_children_print_is_bounded_and_the_last_words_are_kept(tmp_path):
    text = """
    async def work(life):
        child = subprocess.Popen([sys.executable, "-S", "-c", "import os; [os.write(2, b'child' * 1000) for _ in range(4000)]"])
        await asyncio.to_thread(burst, 40_000)
        child.wait()
        while max(os.stat("one.log").st_size for _ in range(2)) > 100_000:
            await asyncio.sleep(0.01)
        print("all was written", flush=True)
        os.abort()
    live(work)
    """
    worker, code = await ended(tmp_path, f"import os\nos.chdir({str(tmp_path)!r})\n" + textwrap.dedent(text))
    assert code == -6
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sum(sizes.values()) <= 3 * MOST + 5_000, "of 50 MB"
    assert {*sizes} == {"one.log", "one.1.log"}
    assert "all was written" in (tmp_path / "one.log").read_text()
    assert worker.last_line() == "all was written"


async def test_a_traceback_behind_a_burst_is_kept_and_named(tmp_path):
    text = """
    async def work(life):
        asleep, sleep = threading.Event(), time.sleep
        def told(seconds):
            if seconds == 300:
                asleep.set()
            sleep(seconds)
        time.sleep, process.LOOK_S = told, 300
        await asyncio.to_thread(asleep.wait)  # who looks by the clock looks no more
        burst(10_000)
        raise ValueError("the last line of all")
    live(work)
    """
    worker, code = await ended(tmp_path, text)
    assert code == 1
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * MOST
    assert "Traceback" in (tmp_path / "one.1.log").read_text()
    assert worker.last_line() == "ValueError: the last line of all"


async def test_an_earlier_processs_last_line_is_not_taken_for_a_later_ones(tmp_path):
    (tmp_path / "one.1.log").write_text("an earlier process ended so\n")
    os.utime(tmp_path / "one.1.log", (1, 1))
    worker, _ = await ended(tmp_path, "")
    assert worker.last_line() == ""


def test_a_users_own_redirect_is_left_alone(tmp_path, monkeypatch):
    text = HEAD + textwrap.dedent(
        """
        async def work(life):
            burst(10_000)
            await asyncio.sleep(0.2)
        live(work)
        """
    )
    with (tmp_path / "mine").open("ab") as mine:
        subprocess.run([sys.executable, "-c", text], stdout=mine, check=True)
    assert (tmp_path / "mine").stat().st_size > 8_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    monkeypatch.setenv(OUTPUT, str(tmp_path / "mine"))
    assert rotation(MOST) is None, "it names a file, and this process writes to another one"
    monkeypatch.setenv(OUTPUT, "/dev/full")
    assert rotation(MOST) is None
