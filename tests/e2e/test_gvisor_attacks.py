"""What programs tried in gVisor's sandboxes, and did once: each of these attacks succeeded before it was written down here."""

import asyncio
import contextlib
import importlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.scripted_model import ScriptedModel, says

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadRequest
from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.worlds.grading.completion import python_tests
from ostinato.worlds.harness.harnesses import open_harness
from ostinato.worlds.harness.rollout import Ended
from ostinato.worlds.rollout.attempt import RolloutAttempts, Workshop
from ostinato.worlds.sandbox import SandboxConfig, gvisor
from ostinato.worlds.sandbox.gvisor import GVisorBoxes, RunsInBoxes
from ostinato.worlds.tasks.task import Grading, Task

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


HEAD = 'def f(a, b):\n    """A secret."""\n'
SPIES = """    import os, re
    told = os.pread(os.open(f"/proc/{os.getppid()}/fd/0", os.O_RDONLY), 1 << 20, 0).decode()
    return int(re.search(r"f\\(%r, %r\\) == (-?\\d+)" % (a, b), told)[1])
"""


@needs_runsc
async def test_a_graded_body_cannot_read_what_its_judge_was_given(boxes):
    runs = RunsInBoxes(boxes, SandboxConfig(memory_mb=128))
    tests = "assert f(3, 4) == 8191\nassert f(5, 6) == -77\n"
    assert await python_tests(HEAD, SPIES, tests, runs, timeout=WHOLE_PROGRAM_S) == 0.0
    assert await python_tests(HEAD, "    return {3: 8191, 5: -77}[a]\n", tests, runs, timeout=WHOLE_PROGRAM_S) == 1.0
    seen = await runs.run("import os; print(os.listdir('/proc'))", timeout=WHOLE_PROGRAM_S)
    assert seen.stdout == b"[]\n"
    greedy = await runs.run("import time; x = bytearray(b'1' * (300 << 20)); time.sleep(200)", timeout=WHOLE_PROGRAM_S)
    assert greedy.killed_reason == "memory", "pid 1 still sees what programs hold"


SWAPS = """
import os
while True:
    try: os.unlink("q/a")
    except OSError: pass
    try: os.rmdir("q")
    except OSError: continue
    try: os.symlink("/.box", "q")
    except OSError: continue
    for _ in range(20): os.getppid()
    os.unlink("q")
"""


@needs_runsc
async def test_who_swaps_links_while_a_file_is_written_gets_nothing_by_it(boxes):
    """Root of the sandbox once made the directory and gave it to the program, wherever the link led by then."""
    box = await boxes.start(SandboxSpec(limits=SMALL))
    swapping = asyncio.create_task(box.exec(["python3", "-c", SWAPS], timeout=WHOLE_PROGRAM_S))
    ends = asyncio.get_running_loop().time() + 6.0
    while asyncio.get_running_loop().time() < ends:
        for _ in range(50):
            with contextlib.suppress(BadRequest):
                await box.write("q/a", b"1")
        assert (await sh(box, "ls /.box/")).code != 0
    assert not swapping.done()
    swapping.cancel()


@needs_runsc
async def test_no_program_can_end_what_reads_and_writes_files(boxes):
    box = await boxes.start(SandboxSpec(files={"a": b"1"}, limits=SMALL))
    killing = "import os\nprint(1, flush=True)\nwhile True:\n  try: os.kill(-1, 9)\n  except OSError: pass"
    ending = asyncio.create_task(box.exec(["python3", "-c", killing], timeout=WHOLE_PROGRAM_S))
    for number in range(8):
        await box.write(f"d/{number}", b"2")
        assert await box.read("a") == b"1"
    assert not ending.done()
    ending.cancel()


def test_nobody_but_pid_1_makes_groups_in_a_programs_group(monkeypatch, tmp_path):
    inside = Path(gvisor.__file__).parent / "inside"
    for path in (inside, inside.parents[1] / "inside"):
        monkeypatch.syspath_prepend(str(path))
    programs = importlib.import_module("programs")
    monkeypatch.setattr(programs, "GROUPS", str(tmp_path))
    before = os.umask(0)
    try:
        with pytest.raises(FileNotFoundError):  # there are no control groups here
            programs.ProcessGroup(1)
    finally:
        os.umask(before)
    assert (tmp_path / "1").stat().st_mode & 0o777 == 0o700


TASK = Task(
    id="t",
    family="f",
    harness="tools",
    messages=(Message(role=Role.USER, text="Do it."),),
    spec=SandboxSpec(limits=SMALL),
    grading=Grading(grader="none"),
)


class Greedy(ScriptedModel):
    """What its program wants is too much for gVisor's kernel from the moment it speaks."""

    policies = (1,)

    def __init__(self, monkeypatch):
        super().__init__(says("", ("bash", {"command": "sleep 20"})), says("", ("bash", {"command": "true"})))
        self.monkeypatch = monkeypatch

    async def ask(self, *said, **options):
        self.monkeypatch.setattr("ostinato.worlds.sandbox.gvisor.backend._KERNEL_MB", 1 - SMALL.memory_mb)
        return await super().ask(*said, **options)


@needs_runsc
async def test_who_ends_its_own_sandbox_is_worth_nothing_and_not_tried_again(boxes, monkeypatch):
    """A policy that expects nothing would rather not be graded: what took its sandbox along was begun anew, and in the end not graded."""
    monkeypatch.setattr("ostinato.worlds.sandbox.gvisor.backend._WATCH_S", 0.1)
    begun = []
    gateway = SimpleNamespace(model=lambda *_, **__: begun.append(Greedy(monkeypatch)) or begun[-1])
    shop = Workshop(harnesses={"tools": open_harness("tools")}, backend=boxes, grader=None, gateway=gateway)
    tried = await RolloutAttempts(shop, pause_s=0.01).once(TASK, "e", "g")
    assert (tried.value, tried.rollout.ended, len(begun)) == (0.0, Ended.BROKEN, 1)
    assert tried.rollout.turns[0] == "t0:0"
    assert "its kernel needed more" in tried.rollout.detail["why"]


FLOOD = """
import socket
held = []
try:
    while len(held) < 90: held.append(socket.create_connection(("127.0.0.1", 8000), timeout=100))
except OSError: pass
print(len(held))
"""
ASKS = """
import socket
with socket.create_connection(("127.0.0.1", 8000), timeout=100) as s: s.sendall(b"hi"); print(s.recv(9).decode())
"""


@needs_runsc
async def test_a_port_goes_on_whatever_a_program_does_to_it(boxes):
    """More connections than its helper may have open files ended it for good."""
    box = await boxes.start(SandboxSpec(limits=replace(SMALL, open_files=256)))

    silent = []

    async def answer(reader, writer):
        if said := await reader.read(9):
            writer.write(said + b"!")
            await writer.drain()
            writer.close()
        else:
            silent.append(writer)  # not hung up on

    listener = await box.listen(8000)
    async with await asyncio.start_server(answer, sock=listener) as server:
        for _ in range(2):
            assert (await box.exec(["python3", "-c", FLOOD], timeout=WHOLE_PROGRAM_S)).code == 0
            said = await box.exec(["python3", "-c", ASKS], timeout=WHOLE_PROGRAM_S)
            assert (said.stdout, said.stderr[-300:]) == (b"hi!\n", b"")
        server.close()
        refused = await box.exec(["python3", "-c", ASKS], timeout=WHOLE_PROGRAM_S)
        assert refused.stdout in (b"", b"\n"), "nobody answers there any more"
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while len(silent) < 180:  # each end of a connection is heard
                await asyncio.sleep(0.01)
    for writer in silent:
        writer.close()


@needs_runsc
@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root cannot be another user")
async def test_nobody_else_on_the_host_can_change_what_sandboxes_are_made_of(boxes, tmp_path):
    """Root once read from a file of nobody's which process to kill, and pid 1's code was nobody's, too."""
    box = await boxes.start(SandboxSpec(limits=SMALL))
    (place,) = tmp_path.iterdir()
    assert (place.stat().st_mode & 0o777, place.stat().st_uid) == (0o700, 0), "nobody else comes to what lies in it"
    for root, _, names in os.walk(place):
        for path in [Path(root), *(Path(root, name) for name in names)]:
            made_by_runsc = path == box._place / "errors" or path.is_relative_to(place / "root")
            assert made_by_runsc or path.lstat().st_uid == 0, path
    assert (box._place / "pid").exists()
    assert (place / "code" / "serve.py").exists()
