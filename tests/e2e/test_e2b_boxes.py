"""E2B's sandboxes through its own SDK, on a server of the tests' own: what is refused, and what a lost connection costs."""

import asyncio
import contextlib
import gc
import hashlib
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.fakes.e2b_server import KEY, cannot_run, e2b_server

from ostinato.app.worlds import open_backend, open_grading
from ostinato.config import Config
from ostinato.core.errors import BadConfig, BadRequest, SandboxRefused, Unavailable
from ostinato.core.sandbox import ChangeKind, Limits, SandboxSpec
from ostinato.launch.commands.checks import check_sandboxes
from ostinato.launch.commands.doctor import CHECKS
from ostinato.worlds.grading.completion import CompletionGrader
from ostinato.worlds.sandbox import SandboxConfig
from ostinato.worlds.sandbox.e2b import E2BBoxes
from ostinato.worlds.sandbox.e2b.account import LIFE_S, MachineGone
from ostinato.worlds.sandbox.e2b.inside import packets
from ostinato.worlds.sandbox.e2b.inside.packets import DATA, GONE, NUMBER, OPEN, PART, TOOK, WINDOW, encode_line
from ostinato.worlds.sandbox.e2b.wire import Wire
from ostinato.worlds.sandbox.gvisor import RunsInBoxes

needs_server = pytest.mark.skipif(bool(cannot_run()), reason=cannot_run())
SMALL = Limits(memory_mb=128, disk_mb=8, processes=16)
CONFIG = Config(sandbox=SandboxConfig(backend="e2b"))


@pytest.fixture
async def server(monkeypatch):
    async with e2b_server(monkeypatch) as made:
        yield made


@pytest.fixture
async def boxes(server):
    made = E2BBoxes()
    yield made
    await made.close()


async def sh(box, script, **options):
    return await box.exec(["sh", "-c", script], **{"timeout": WHOLE_PROGRAM_S, **options})


async def until(condition):
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while not condition():
            await asyncio.sleep(0.02)


def the_helper(server):
    """The one command of the one machine."""
    (machine,) = server.machines.values()
    (running,) = machine.running.values()
    return running


# ---------------------------------------------------------------- what is missing or refused


def test_without_the_sdk_the_way_to_get_it_is_named(monkeypatch):
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setitem(sys.modules, "e2b", None)
    for ask in (check_sandboxes, dict(CHECKS)["sandbox"]):
        with pytest.raises(BadConfig, match=r"pip install 'ostinato\[e2b\]'"):
            ask(CONFIG)
    check_sandboxes(Config())


@needs_server
def test_without_a_key_its_variable_is_named(monkeypatch):
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(BadConfig, match="E2B_API_KEY, which is not set"):
        check_sandboxes(CONFIG)
    monkeypatch.setenv("E2B_API_KEY", KEY)
    check_sandboxes(CONFIG)


async def test_a_wrong_key_is_refused_and_never_repeated(server, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    wrong = f"{KEY[:-4]}cafe"
    with pytest.raises(BadConfig, match="set E2B_API_KEY") as refused:
        await E2BBoxes(SandboxConfig(), {"E2B_API_KEY": wrong}).start(SandboxSpec())
    assert "no such key: ***" in str(refused.value), "the server repeats it"
    assert wrong not in "".join(traceback.format_exception(refused.value))
    assert not any(wrong in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (429, '{"code": 429, "message": "too many"}', Unavailable, "sandbox.boxes"),
        (500, '{"code": 500, "message": "broken"}', Unavailable, "broken"),
        (503, '{"code": 503, "message": "no room"}', Unavailable, "no room"),
        (201, "nonsense", Unavailable, "start a sandbox"),
        (201, "[]", Unavailable, "start a sandbox"),
        (201, "{}", Unavailable, "start a sandbox"),
        (204, "", Unavailable, "start a sandbox"),
    ],
)
async def test_what_the_server_answers_instead_of_a_machine_is_an_error_of_ours(
    boxes, server, status, body, error, said
):
    server.answers["/v2/sandboxes"] = (status, body)
    with pytest.raises(error, match=said):
        await boxes.start(SandboxSpec())
    server.answers.clear()
    assert (await sh(await boxes.start(SandboxSpec()), "echo on")).stdout == b"on\n"


@pytest.mark.parametrize("path", ["/files", "/process.Process/Start", "/process.Process/SendInput"])
async def test_a_start_that_fails_leaves_no_machine(server, monkeypatch, path):
    monkeypatch.setattr("ostinato.worlds.sandbox.e2b.wire._BACKOFF_S", (0.0, 0.1))
    boxes = E2BBoxes(SandboxConfig(boxes=1))
    server.answers[path] = (500, "oh no")
    with pytest.raises(Unavailable, match="oh no"):
        await boxes.start(SandboxSpec())
    server.answers.clear()
    assert server.machines == {}
    assert (await sh(await boxes.start(SandboxSpec()), "echo on")).stdout == b"on\n"
    await boxes.close()


async def test_a_start_cancelled_at_any_moment_is_cancelled_and_leaves_no_machine(boxes, server):
    for asked in range(100):  # from before the first request is sent to after the helper has been started
        before = len(server.asked)
        starting = asyncio.create_task(boxes.start(SandboxSpec()))
        await until(lambda: len(server.asked) >= before + asked or starting.done())  # noqa: B023 (it is waited for here)
        starting.cancel()
        try:
            await (await starting).stop()
        except asyncio.CancelledError:
            assert starting.cancelled()
        else:
            break  # it had ended before
        made = sum(path == "/v2/sandboxes" for _, path, _ in server.asked)
        await until(lambda: (server.machines, len(server.ended)) == ({}, made))  # noqa: B023 (it is waited for here)
    assert len(server.ended) > 2


@pytest.mark.parametrize(
    "step",
    [
        "ostinato.worlds.sandbox.gvisor.line.GvisorConnection.start_reading",
        "ostinato.worlds.sandbox.e2b.account.Account.machine",
    ],
)
async def test_a_start_cancelled_as_a_step_ends_leaves_no_socket(boxes, server, monkeypatch, step):
    owner, name = step.rsplit(".", 1)
    module, cls = owner.rsplit(".", 1)
    done = getattr(getattr(importlib.import_module(module), cls), name)

    async def cancelled_at_once(self):
        result = await done(self)
        asyncio.current_task().cancel()
        return result if name == "machine" else await asyncio.sleep(0)

    monkeypatch.setattr(step, cancelled_at_once)
    with pytest.raises(asyncio.CancelledError):
        await boxes.start(SandboxSpec())
    gc.collect()  # a socket that nobody closed warns, and pytest makes that an error
    assert server.machines == {}


async def test_a_cancellation_that_the_sdk_answers_with_an_error_is_one(boxes, server, monkeypatch):
    running = asyncio.Event()

    async def run(*_, **__):
        running.set()
        try:
            await asyncio.sleep(30.0)
        except asyncio.CancelledError as error:
            raise RuntimeError("Request was cancelled") from error

    monkeypatch.setattr("e2b.sandbox_async.commands.command.Commands.run", run)
    starting = asyncio.create_task(boxes.start(SandboxSpec()))
    await asyncio.wait_for(running.wait(), PATIENT_S)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert server.machines == {}


async def test_a_template_that_cannot_serve_is_named(server, monkeypatch):
    with pytest.raises(BadConfig, match=r"sandbox.template = 'none'"):
        await E2BBoxes(SandboxConfig(template="none")).start(SandboxSpec())
    monkeypatch.setattr("ostinato.worlds.sandbox.e2b.backend.PYTHON", "python-there-is-not")
    with pytest.raises(BadConfig, match=r"'base' cannot be used: .*needs python3, 3.10"):
        await E2BBoxes().start(SandboxSpec())
    assert server.machines == {}


async def test_files_that_do_not_fit_are_refused(boxes, server):
    with pytest.raises(BadRequest, match="do not fit"):
        await boxes.start(SandboxSpec(files={"x": bytes(9 << 20)}, limits=SMALL))
    assert server.machines == {}


# ---------------------------------------------------------------- what is asked for, and for how long


async def test_a_machine_has_no_network_and_lives_only_while_it_is_kept(boxes, server, monkeypatch):
    monkeypatch.setattr("ostinato.worlds.sandbox.e2b.backend._KEEP_S", 0.05)
    box = await boxes.start(SandboxSpec(hosts=("localhost:9",)))
    (machine,) = server.machines.values()
    assert machine.created["allow_internet_access"] is False
    assert machine.created["timeout"] == LIFE_S
    await until(lambda: machine.kept > 2)
    server.answers["/timeout"] = (500, "later")
    await asyncio.sleep(0.2)
    server.answers.clear()
    kept = machine.kept
    await until(lambda: machine.kept > kept + 1)
    assert (await sh(box, "echo on")).stdout == b"on\n"
    await box.stop()
    assert server.machines == {}
    kept = machine.kept
    await asyncio.sleep(0.2)
    assert machine.kept == kept


ALONE = """
import asyncio
from ostinato.core.sandbox import SandboxSpec
from ostinato.worlds.sandbox.e2b import E2BBoxes

async def main():
    box = await E2BBoxes().start(SandboxSpec())
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_host_leaves_a_machine_that_nobody_keeps(server):
    alone = await asyncio.create_subprocess_exec(sys.executable, "-c", ALONE, stdout=subprocess.PIPE)
    assert await alone.stdout.readline() == b"ready\n"
    alone.kill()
    await alone.wait()
    (machine,) = server.machines.values()
    assert machine.timeout == LIFE_S, "the server ends it then"
    assert [path for method, path, _ in server.asked if method == "DELETE"] == []


async def test_no_more_machines_at_once_than_the_settings_say(server):
    boxes = E2BBoxes(SandboxConfig(boxes=1))
    first = await boxes.start(SandboxSpec())
    second = asyncio.create_task(boxes.start(SandboxSpec()))
    await asyncio.sleep(0.3)
    assert len(server.machines) == 1
    await first.stop()
    assert (await sh(await second, "echo on")).stdout == b"on\n"
    await boxes.close()
    assert server.machines == {}


async def test_a_machine_that_is_gone_is_an_answer_at_once(boxes, server):
    box = await boxes.start(SandboxSpec())
    running = asyncio.create_task(sh(box, "echo begun > begun; sleep 600", timeout=600.0))
    while (await sh(box, "cat begun 2>/dev/null")).stdout == b"":
        pass
    (machine,) = server.machines.values()
    await server.end(machine)
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        with pytest.raises(Unavailable, match="gone"):
            await running
        for call in (sh(box, "true"), box.read("begun"), box.diff(), box.listen(8000)):
            with pytest.raises(Unavailable):
                await call
    await box.stop()


# ---------------------------------------------------------------- connections that break


async def test_a_broken_connection_costs_time_and_no_result(boxes, server):
    box = await boxes.start(SandboxSpec(limits=Limits(output_bytes=1 << 20)))
    script = "echo run >> runs; until [ -e go ]; do sleep 0.02; done; head -c 900000 /dev/zero; exit 7"
    running = asyncio.create_task(sh(box, script))
    await sh(box, "until [ -e runs ]; do sleep 0.02; done")
    for _ in range(3):
        the_helper(server).break_off()
        await sh(box, "echo between >> between")
    await sh(box, "touch go")
    for _ in range(5):
        the_helper(server).break_off()
        await asyncio.sleep(0.03)
    ended = await running
    assert (ended.code, len(ended.stdout)) == (7, 900_000)
    assert (await sh(box, "wc -l < runs; wc -l < between")).stdout.split() == [b"1", b"3"]


@pytest.mark.parametrize("loss", ["refuse_inputs", "lose_answers"])
async def test_what_was_perhaps_not_heard_is_said_again_and_done_once(boxes, server, loss):
    box = await boxes.start(SandboxSpec())
    for number in range(1, 4):
        setattr(server, loss, 2)
        assert (await sh(box, "echo run >> runs; wc -l < runs")).stdout.strip() == str(number).encode()
    await box.write("a", b"x" * 600_000)
    assert len(await box.read("a")) == 600_000


async def test_a_connection_that_stays_broken_is_an_error(boxes, server, monkeypatch):
    monkeypatch.setattr("ostinato.worlds.sandbox.e2b.wire._BACKOFF_S", (0.0, 0.1))
    box = await boxes.start(SandboxSpec())
    server.answers["/process.Process/Connect"] = (500, "no way there")
    running = asyncio.create_task(sh(box, "sleep 600", timeout=600.0))
    await asyncio.sleep(0.2)
    the_helper(server).break_off()
    with pytest.raises(Unavailable, match="no way there"):
        await running
    await box.stop()
    assert server.machines == {}, "whatever it was doing has ended"


@pytest.mark.parametrize(
    "said",
    [b"@nonsense\n", b"@\xff\n", b"@" + b"A" * 40 + b"\n", b"x" * 1_000_000, b"@" + b"QUJD" * 100_000 + b"\n"],
    ids=["no base64", "no text", "no frame", "a megabyte without a line", "a long frame"],
)
async def test_a_helper_that_talks_nonsense_is_no_longer_listened_to(boxes, server, said):
    box = await boxes.start(SandboxSpec())
    running = asyncio.create_task(sh(box, "sleep 600", timeout=600.0))
    await asyncio.sleep(0.1)
    for listener in the_helper(server).listeners:
        listener.put_nowait(("stdout", said))
    with pytest.raises(Unavailable, match="invalid packet"):
        await running
    with pytest.raises(Unavailable, match="invalid packet"):
        await box.diff()


FLOODS = {
    "more than it may": [(0, DATA, bytes(PART))] * 30,
    "nothing, for ever": [(0, DATA, b"")] * 20_000,
    "more passed on than was said": [(0, TOOK, NUMBER.pack(1 << 40))],
    "a connection to no port": [(9, OPEN, NUMBER.pack(80))],
    "a kind that is none": [(0, 77, b"")],
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_helper_that_breaks_its_bounds_is_no_longer_listened_to(boxes, server, monkeypatch, flood):
    monkeypatch.setattr("ostinato.worlds.sandbox.e2b.inside.packets.WINDOW", 10_000)
    box = await boxes.start(SandboxSpec())
    lines = [encode_line(box.wire._received + 1 + number, *packet) for number, packet in enumerate(FLOODS[flood])]
    for listener in the_helper(server).listeners:
        for at in range(0, len(lines), 5000):
            listener.put_nowait(("stdout", b"".join(lines[at : at + 5000])))
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while box.wire._open:
            await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="invalid packet"):
        await box.diff()


async def test_a_helper_that_ends_is_named_with_what_it_complained_of(boxes, server):
    box = await boxes.start(SandboxSpec())
    running = asyncio.create_task(sh(box, "sleep 600", timeout=600.0))
    await asyncio.sleep(0.1)
    (machine,) = server.machines.values()
    for listener in the_helper(server).listeners:
        listener.put_nowait(("stderr", b"out of paper\n"))
    (pid,) = machine.running
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    with pytest.raises(Unavailable, match=r"helper ended.*out of paper"):
        await running


# ---------------------------------------------------------------- what is inside


async def test_a_program_has_no_rights(boxes):
    box = await boxes.start(SandboxSpec(limits=SMALL))
    status = (await sh(box, "cat /proc/self/status")).stdout.decode()
    rights = [line.split()[1] for line in status.splitlines() if line.startswith(("CapPrm", "CapEff", "CapBnd"))]
    assert rights == ["0000000000000000"] * 3
    assert "NoNewPrivs:\t1" in status
    for script in (
        "kill -9 1", "ls /.box", "ls /root/.ostinato-*", "mount -t tmpfs x /tmp", "echo x > /etc/x", "echo x > /usr/x",
        "echo x > /var/tmp/x", "chroot /tmp true", "cat /proc/1/root/etc/passwd", "cat <> /proc/1/fd/3", "nsenter -t 1 -m true",
    ):  # fmt: skip
        assert (await sh(box, script)).code != 0, script
    assert (await sh(box, "id -un; cat /proc/net/dev | wc -l")).stdout == b"user\n3\n"


async def test_layers_arrive_as_they_are(boxes, tmp_path):
    layer = tmp_path / "layer"
    (layer / "deep" / "er").mkdir(parents=True)
    (layer / "large").write_bytes(os.urandom(20 << 20))
    (layer / "run").write_text("#!/bin/sh\necho ran")
    (layer / "run").chmod(0o755)
    (layer / "hidden").write_text("x")
    (layer / "hidden").chmod(0o000)
    (layer / "link").symlink_to("/etc/passwd")
    os.link(layer / "run", layer / "again")
    odd = os.fsdecode(b"odd \xff\n'name")
    (layer / "deep" / "er" / odd).write_text("odd")
    (layer / ("n" * 250)).write_text("long")
    box = await boxes.start(SandboxSpec(layers=(str(layer),), limits=SMALL))
    said = await sh(
        box, f"./run; ./again; readlink link; cat deep/er/* {'n' * 250} hidden; sha256sum < large; ls | wc -l"
    )
    digest = hashlib.sha256((layer / "large").read_bytes()).hexdigest().encode() + b"  -\n"
    assert said.stdout == b"ran\nran\n/etc/passwd\noddlongx" + digest + b"7\n"
    assert await box.diff() == []
    await sh(box, "rm deep/er/*; chmod u+w hidden; echo 1 >> hidden")
    assert [(change.path, change.kind) for change in await box.diff()] == [
        (f"deep/er/{odd}", ChangeKind.DELETED),
        ("hidden", ChangeKind.WRITTEN),
    ]


SWAPPING = """
import os
while True:
    try:
        os.mkdir('q'); os.rmdir('q'); os.symlink('/.box', 'q'); os.unlink('q')
    except OSError:
        pass
"""


async def test_links_that_are_swapped_while_a_file_is_written_win_nothing(boxes):
    box = await boxes.start(SandboxSpec(files={"swap.py": SWAPPING.encode()}, limits=SMALL))
    await sh(box, "python3 swap.py >/dev/null 2>&1 &")
    for _ in range(150):
        with contextlib.suppress(BadRequest):
            await box.write("q/a", b"x")
    assert (await sh(box, "stat -c '%U %a' /.box; ls /.box 2>/dev/null")).stdout == b"root 700\n"


async def test_a_hostile_tree_is_bounded(boxes):
    box = await boxes.start(SandboxSpec(limits=SMALL))
    deep = "import os\nfor n in range(900):\n  os.mkdir('d'); os.chdir('d')\nopen('f', 'w').write('x')"
    assert (await box.exec(["python3", "-c", deep], timeout=WHOLE_PROGRAM_S)).code == 0
    await sh(box, "truncate -s 7M sparse; mkfifo p; printf x > \"$(printf 'a\\377\\nb')\"")
    changes = {change.path: change for change in await box.diff()}
    assert set(changes) == {"d/" * 900 + "f", "sparse", "p", os.fsdecode(b"a\xff\nb")}
    assert changes["p"].kind is ChangeKind.OTHER


SEND = """
import socket, sys
s = socket.create_connection(('127.0.0.1', 8321))
size = int(sys.argv[1])
s.sendall(bytes(size)); s.shutdown(socket.SHUT_WR)
print(sum(len(part) for part in iter(lambda: s.recv(65536), b'')))
"""


async def test_ports_carry_much_both_ways_over_connections_that_break(boxes, server):
    box = await boxes.start(SandboxSpec(limits=SMALL))
    heard = []

    async def answer(reader, writer):
        heard.append(len(await reader.read(-1)))
        writer.write(bytes(3 << 20))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, sock=await box.listen(8321)):
        several = [
            asyncio.create_task(box.exec(["python3", "-c", SEND, str(2 << 20)], timeout=WHOLE_PROGRAM_S))
            for _ in range(3)
        ]
        helper = the_helper(server)

        def waiting():
            return any(not each.done() for each in several)

        for _ in range(6):
            passed = len(helper.sent) + 1  # each connection carries something before it breaks, on a slow machine too
            await until(lambda passed=passed: (helper.listeners and len(helper.sent) >= passed) or not waiting())
            helper.break_off()
        await asyncio.gather(*several)
        assert [each.result().stdout for each in several] == [b"%d\n" % (3 << 20)] * 3
    assert heard == [2 << 20] * 3


def test_a_channel_never_holds_more_than_its_window(monkeypatch):
    """The host ends a sandbox whose helper sends more, so the helper must not, whatever the size of what it reads."""
    inside = Path(packets.__file__).parent
    for path in (inside, inside.parents[1] / "gvisor/inside", inside.parents[1] / "inside"):
        monkeypatch.syspath_prepend(str(path))
    monkeypatch.delitem(sys.modules, "packets", raising=False)
    relay = importlib.import_module("relay")
    inner, program = socket.socketpair()
    with inner, program:
        program.sendall(bytes(PART))
        channel = relay.Channel(1, inner, unseen=WINDOW - 10)
        said = []
        for _ in range(2):
            relay.Relay._read_local(SimpleNamespace(_send=lambda *what: said.append(what)), channel)
    assert [data for *_, data in said] == [bytes(10)]
    assert channel.unseen == WINDOW


class EndedHelper:
    """A machine whose helper has ended: it cannot be reached, and a moment later its exit code arrives."""

    async def run(self, command, on_stdout, on_stderr):
        on_stderr("python3: not found")
        return self

    async def send(self, data):
        raise MachineGone("no such process")

    async def ended(self):
        await asyncio.sleep(0.1)
        return 127


async def test_a_helper_that_ended_before_it_was_reached_is_named_with_its_complaint():
    lost = []
    wire = Wire(EndedHelper(), lost.append)
    ours, pid_one = socket.socketpair()
    with pid_one:
        await wire.open("python3 helper.pyz", ours)
        pid_one.send(b"hello")
        await until(lambda: lost)
    assert lost == ["the sandbox is gone: its helper ended with 127: python3: not found"]


async def test_a_channel_that_ends_before_it_began_is_forgotten():
    wire = Wire(EndedHelper(), lambda _: None)
    wire.ports[80] = "/no/such/socket"
    for number in range(1, 1000):
        wire._do(number, OPEN, NUMBER.pack(80))
        wire._do(number, GONE, b"")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert wire._channels == {}


async def test_single_runs_are_sandboxes_too(boxes, server):
    runs = RunsInBoxes(boxes, SandboxConfig(memory_mb=128), python="python3")
    result = await runs.run(
        "import sys; print(6 * 7, sys.stdin.read(), open('a').read())",
        files={"a": b"1"},
        stdin=b"in",
        timeout=WHOLE_PROGRAM_S,
    )
    assert (result.stdout, result.stderr) == (b"42 in 1\n", b"")
    assert (await runs.run("while True: pass", timeout=0.5)).timed_out
    assert (await runs.run("import os; print(os.listdir('/proc'))", timeout=WHOLE_PROGRAM_S)).stdout == b"[]\n"
    assert (await runs.run("x = bytearray(300 << 20)", timeout=WHOLE_PROGRAM_S)).killed_reason == "memory"
    assert server.machines == {}


async def test_the_setting_decides_where_worlds_are_graded(server):
    assert isinstance(open_backend(CONFIG.sandbox), E2BBoxes)
    async with open_grading(CONFIG) as (backend, grader):
        assert isinstance(backend, E2BBoxes)
        completion = grader._graders["python_tests"]
        assert isinstance(completion, CompletionGrader)
        assert isinstance(completion._runs, RunsInBoxes)


async def test_doctor_says_what_it_offers(server):
    said = await asyncio.to_thread(dict(CHECKS)["sandbox"], CONFIG)
    assert "E2B works (template base)" in said
    assert "cannot be forked" in said
    assert "E2B's SDK is installed" in await asyncio.to_thread(dict(CHECKS)["sandbox"], Config())
    assert server.machines == {}


async def test_a_step_that_fails_inside_is_named(boxes, monkeypatch):
    monkeypatch.setattr("ostinato.worlds.sandbox.proxy.ENVIRONMENT", {"PATH": "/bin"})
    with pytest.raises(SandboxRefused, match="make the directories"):
        await boxes.start(SandboxSpec(workdir="/srv/" + "x" * 300))
