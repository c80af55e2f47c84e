"""How commands and workers end on the signals of a closed terminal, an init system and Ctrl-C."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S

from ostinato.cli import main
from ostinato.launch.workers.shutdown import Interruption, stop_signals, until_stopped

ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of a terminal's foreground, whatever these tests were started from, and afterwards those from before."""
    before = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
async def test_each_of_them_lets_a_worker_end_in_order(number):
    stopping = until_stopped()
    try:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(PATIENT_S):
            await stopping.wait()
    finally:
        for each in stop_signals():
            asyncio.get_running_loop().remove_signal_handler(each)


async def test_a_closed_terminal_is_ignored_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in stop_signals()
    stopping = until_stopped()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert not stopping.is_set()
    finally:
        for each in stop_signals():
            asyncio.get_running_loop().remove_signal_handler(each)


@pytest.mark.parametrize("number", ENDING)
def test_a_command_puts_its_things_away_and_ends_with_the_shells_code(number):
    """The handlers are those of `main`: the work is cancelled, whatever it awaits."""
    put_away = []

    async def work():
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            put_away.append(number)

    interruption = Interruption()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert put_away == [number]
    assert interruption.code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_in_the_background_of_a_script_ends_too(number):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what shells do there
    interruption = Interruption()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert interruption.code == 128 + number


def test_nohup_keeps_a_command_running():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Interruption()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_second_hang_up_does_not_cut_the_end_short_and_a_second_ctrl_c_does():
    """A closing terminal sends its shell's and the kernel's. A whole process, as signals fall on it."""
    text = """
    import asyncio, sys
    from ostinato.launch.workers.shutdown import Interruption

    async def work():
        try:
            print("begun", flush=True)
            await asyncio.sleep(600)
        finally:
            print("ending", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            print("put away", flush=True)

    interruption = Interruption()
    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        sys.exit(interruption.code)
    """
    command = [sys.executable, "-c", textwrap.dedent(text)]
    for again, rest in ((signal.SIGHUP, "put away\n"), (signal.SIGTERM, "put away\n"), (signal.SIGINT, "")):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout.readline() == "begun\n"
                process.send_signal(signal.SIGHUP)
                assert process.stdout.readline() == "ending\n"
                process.send_signal(again)
                while int(pending(process.pid), 16) >> (again - 1) & 1:  # until it has been taken
                    time.sleep(0.001)
                process.stdin.write("go on\n")
                process.stdin.flush()
                assert process.stdout.read() == rest
                assert process.wait(WHOLE_PROGRAM_S) == 128 + signal.SIGHUP
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()


def pending(pid):
    """The signals that were sent to a process and not yet delivered, in hexadecimal."""
    return re.search(r"^ShdPnd:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_the_command_line_itself_ends_so(number, tmp_path):
    """A whole process: a command that waits for ever, in place of one of ours."""
    text = """
    import asyncio, sys
    from pathlib import Path
    from ostinato.cli import main
    from ostinato.cli.commands import app

    @app.command
    def wait():
        async def work():
            try:
                print("begun", flush=True)
                await asyncio.sleep(600)
            finally:
                print("put away", flush=True)
        asyncio.run(work())

    sys.argv = ["ostinato", "wait"]
    main()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(number)
            assert process.stdout.read() == "put away\ninterrupted\n", "nothing else is said"
            assert process.wait(WHOLE_PROGRAM_S) == 128 + number
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


INTERRUPTED = """
import signal, sys

class Interrupter:
    module = sys.argv.pop(1)

    def find_spec(self, name, path, target=None):
        if name == self.module:
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever these tests were started from
sys.meta_path.insert(0, Interrupter())
from ostinato.cli import main
main()
"""
"""The command line, and a Ctrl-C at the instant when it first loads the named module."""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("asyncio", ["doctor"]),
        ("cyclopts", ["doctor"]),
        ("torch", ["doctor"]),
        ("ostinato.launch.commands.worlds.run", ["worlds", "run", "tasks.jsonl"]),
        ("ostinato_client.connect.errors", ["connect", "claude-code"]),
    ],
)
def test_ctrl_c_is_one_line_in_every_phase_of_a_command(module, words, tmp_path):
    words = [sys.executable, "-c", INTERRUPTED, module, *words]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("interrupted\n", 130)


def test_an_error_that_ctrl_c_caused_in_a_library_is_the_same_line(monkeypatch, capsys):
    def run_command():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as stop:
            raise SystemError("initialization of _C raised an unreported exception") from stop

    monkeypatch.setattr("ostinato.cli.commands.run_command", run_command)
    with pytest.raises(SystemExit) as left:
        main()
    assert (left.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_an_error_of_its_own_keeps_its_traceback(monkeypatch):
    def run_command():
        raise ZeroDivisionError

    monkeypatch.setattr("ostinato.cli.commands.run_command", run_command)
    with pytest.raises(ZeroDivisionError):
        main()


LOOP = """
from ostinato.cli import commands, main

def run_command():
    first, second = ValueError("the first"), ValueError("the second")
    {causes}
    raise first

commands.run_command = run_command
main()
"""


@pytest.mark.parametrize(
    "causes",
    [
        "raise first from first",
        "first.__cause__, second.__cause__ = second, first",
        "first.__context__, second.__context__ = second, second",
    ],
)
def test_an_error_whose_causes_form_a_loop_keeps_its_traceback(causes):
    words = [sys.executable, "-c", LOOP.format(causes=causes)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=WHOLE_PROGRAM_S)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: the first"
