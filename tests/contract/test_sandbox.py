"""What every backend of sandboxes keeps: state from call to call, limits, deadlines, forks, changes, and nothing left behind."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.e2b_server import e2b_server
from tests.fakes.mounts import mounts_beside

from ostinato.core.errors import BadRequest, NotFound, SandboxRefused, StorageFull, TooLarge, Unavailable
from ostinato.core.sandbox import Change, ChangeKind, Limits, SandboxSpec
from ostinato.core.seams import Backend, Sandbox
from ostinato.worlds.sandbox import Boxes, SandboxConfig
from ostinato.worlds.sandbox.e2b import E2BBoxes
from ostinato.worlds.sandbox.gvisor import GVisorBoxes

BACKENDS = {
    "namespaces": Boxes,
    "namespaces without control groups": lambda: Boxes(groups=False),
    "gvisor": GVisorBoxes,
    "e2b": E2BBoxes,
}
KINDS = {Boxes: "namespaces", GVisorBoxes: "gvisor", E2BBoxes: "e2b"}
SMALL = Limits(memory_mb=128, disk_mb=8, processes=16)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def opened(name):
    made = BACKENDS[name]()
    assert isinstance(made, Backend)
    try:
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture(params=BACKENDS, scope="module", loop_scope="module")
async def backend(request):
    """One for all tests that do not end it: its zygote, or the server of its machines, is started once."""
    if request.param == "gvisor" and shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    with pytest.MonkeyPatch.context() as patch:
        async with (
            e2b_server(patch) if request.param == "e2b" else contextlib.nullcontext(),
            opened(request.param) as made,
        ):
            yield made


@pytest_asyncio.fixture(params=[name for name in BACKENDS if name.startswith("namespaces")], loop_scope="module")
async def namespaces(request):
    """A backend of namespaces for one test, which may end it."""
    async with opened(request.param) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def box(backend):
    started = await backend.start(
        SandboxSpec(files={"a.txt": b"one", "d/b.txt": b"two", "run.sh": b"#!/bin/sh\necho ran"}, limits=SMALL)
    )
    assert isinstance(started, Sandbox)
    yield started
    await started.stop()


async def forks_or_refuses(backend, box):
    """True where sandboxes can be forked; where they cannot, the refusal has been checked."""
    if (await backend.isolation()).forks:
        return True
    with pytest.raises(Unavailable, match="cannot be forked"):
        await box.fork(1)
    assert (await sh(box, "echo on")).stdout == b"on\n"
    return False


async def sh(box, script, **options):
    return await box.exec(["sh", "-c", script], **{"timeout": WHOLE_PROGRAM_S, **options})


async def test_what_is_written_stays_from_call_to_call(box):
    await sh(box, "echo three > c.txt; echo t > /tmp/t; echo s > /dev/shm/s")
    assert (await sh(box, "cat a.txt d/b.txt c.txt /tmp/t /dev/shm/s")).stdout == b"onetwothree\nt\ns\n"


async def test_a_program_sees_its_directory_variables_and_input(box):
    assert (await sh(box, "pwd")).stdout == b"/work\n"
    assert (await sh(box, "pwd", cwd="d")).stdout == b"/work/d\n"
    assert (await sh(box, "pwd", cwd="/tmp")).stdout == b"/tmp\n"
    assert (await sh(box, 'printf "$X$HOME"', env={"X": "1"})).stdout == b"1/tmp"
    assert (await box.exec(["cat"], stdin=b"in" * 50_000, timeout=WHOLE_PROGRAM_S)).stdout[:4] == b"inin"
    assert (await box.exec(["cat"], timeout=WHOLE_PROGRAM_S)).stdout == b""
    with pytest.raises(BadRequest, match="cwd"):
        await sh(box, "pwd", cwd="../..")


async def test_exit_codes_and_signals(box):
    assert (await sh(box, "exit 7")).code == 7
    assert (await sh(box, "kill -9 $$")).code == -9
    assert (await box.exec(["./run.sh"], timeout=WHOLE_PROGRAM_S)).stdout == b"ran\n"
    missing = await box.exec(["no-such-program"], timeout=WHOLE_PROGRAM_S)
    assert (missing.code, missing.stdout) == (127, b"")
    assert b"no-such-program" in missing.stderr
    assert (await box.exec(["python3", "-c", "print(6 * 7)"], timeout=WHOLE_PROGRAM_S)).stdout == b"42\n"


async def test_background_programs_go_on_until_the_stop(box):
    started = await sh(box, "(while :; do echo x >> ticks; sleep 0.02; done) & echo $! > pid; echo ready")
    assert started.stdout == b"ready\n"
    seen = await sh(
        box,
        "n=$(wc -l < ticks); while [ $(wc -l < ticks) -le $((n + 2)) ]; do sleep 0.02; done; kill $(cat pid) && echo killed",
    )
    assert seen.stdout == b"killed\n"


async def test_a_deadline_ends_a_program_with_all_it_started_and_nothing_else(box):
    await sh(box, "sleep 600 & echo $! > before")
    hostile = (
        "import os, signal, time\nsignal.signal(15, 1)\nfor n in range(3):\n  if os.fork() == 0:\n    os.setsid()\n"
    )
    hostile += "    if os.fork(): os._exit(0)\n    open(f'pid{n}', 'w').write(str(os.getpid()))\nwhile True:\n  try: time.sleep(9)\n"
    hostile += "  except BaseException: pass\n"
    ended = await box.exec(["python3", "-c", hostile], timeout=1.0)
    assert (ended.timed_out, ended.killed_reason, ended.code) == (True, "timeout", -9)
    left = await sh(
        box, "for f in pid*; do kill -0 $(cat $f) 2>/dev/null && echo $f; done; kill -0 $(cat before) && echo before"
    )
    assert left.stdout == b"before\n"


async def test_a_forking_loop_ends_at_its_deadline(box):
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except BaseException: pass\n"
    await sh(box, "sleep 600 &")
    ended = await box.exec(["python3", "-c", bomb], timeout=0.5)
    assert ended.timed_out
    assert (await sh(box, "ls /proc | grep -c '^[0-9]'")).stdout.strip() in (
        b"3",
        b"4",
        b"5",
    )  # pid 1, sleep, sh, ls, grep


async def test_calls_may_overlap(box):
    first = asyncio.create_task(sh(box, "until [ -e go ]; do sleep 0.02; done; cat go"))
    await box.write("go", b"now")
    assert (await first).stdout == b"now"


async def test_a_cancelled_call_ends_its_program(box):
    call = asyncio.create_task(sh(box, "echo $$ > pid; exec sleep 600"))
    while (await sh(box, "cat pid 2>/dev/null")).stdout == b"":
        pass
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await sh(box, "while kill -0 $(cat pid) 2>/dev/null; do sleep 0.02; done; echo gone")).stdout == b"gone\n"


async def test_output_beyond_the_limit_ends_the_program(box):
    ended = await sh(box, "yes", timeout=WHOLE_PROGRAM_S)
    assert ended.killed_reason == "output"
    assert len(ended.stdout) == box.spec.limits.output_bytes


async def test_memory_that_forks_share_counts_once(box):
    shares = (
        "import os, time\nheld = bytearray(40 << 20)\nfor _ in range(5):\n  if os.fork() == 0:\n    time.sleep(0.5)\n    os._exit(0)\n"
        "ends = [os.wait()[1] for _ in range(5)]\nprint(ends, len(held) >> 20)"
    )
    result = await box.exec(["python3", "-c", shares], timeout=WHOLE_PROGRAM_S)
    assert (result.stdout, result.killed_reason) == (b"[0, 0, 0, 0, 0] 40\n", None)


SHARE = """
import os, sys, time
x = bytearray(b'1' * (30 << 20))
open(f'held{sys.argv[1]}', 'w').close()
def all_hold():
    return sum(name.startswith('held') for name in os.listdir()) == 8
while not all_hold() and not os.path.exists('fell'):
    time.sleep(0.02)
for _ in range(3000):  # a supervisor without control groups looks only now and then
    if os.path.exists('fell'):
        break
    time.sleep(0.02)
print(1, flush=True)
"""
TOGETHER = f"""
import os, subprocess, sys
try:
    for number in range(8):
        subprocess.Popen(['python3', '-c', {SHARE!r}, str(number)])
    for _ in range(8):
        if os.wait()[1]:
            open('fell', 'w').close()
except OSError:
    open('fell', 'w').close()
sys.exit(1)
"""
"""Eight programs, each of which keeps its memory until all have theirs, or one was ended for it."""


async def test_memory_is_bounded_for_all_programs_together(box):
    one = await box.exec(["python3", "-c", "x = bytearray(300 << 20)"], timeout=WHOLE_PROGRAM_S)
    assert one.killed_reason == "memory"
    many = await box.exec(["python3", "-c", TOGETHER], timeout=WHOLE_PROGRAM_S)
    assert many.killed_reason == "memory"
    assert many.stdout.count(b"1\n") < 8
    assert (await sh(box, "echo on")).stdout == b"on\n"


async def test_disk_is_bounded_and_full_is_an_answer(box):
    full = await sh(box, "dd if=/dev/zero of=big bs=1M count=20 2>&1; stat -c %s big")
    assert b"No space left" in full.stdout or b"File too large" in full.stdout
    with pytest.raises(StorageFull):
        await box.write("more", bytes(4 << 20))
    await sh(box, "rm big")
    await box.write("more", bytes(1 << 20))
    assert (await sh(box, "ls -A")).stdout.split() == [b"a.txt", b"d", b"more", b"run.sh"]


async def test_read_and_write(box):
    assert await box.read("a.txt") == b"one"
    assert await box.read("/work/d/b.txt") == b"two"
    await box.write("new/deep/f", b"\0\xff")
    assert await box.read("new/deep/f") == b"\0\xff"
    await box.write("run.sh", b"#!/bin/sh\necho again")
    assert (await box.exec(["./run.sh"], timeout=WHOLE_PROGRAM_S)).stdout == b"again\n"
    with pytest.raises(NotFound):
        await box.read("missing")
    with pytest.raises(TooLarge):
        await box.read("a.txt", most=2)
    for path in ("../etc/passwd", "/etc/passwd", "", ".", "d/", "a\0b", "d/../../x"):
        with pytest.raises(BadRequest):
            await box.read(path)
        with pytest.raises(BadRequest):
            await box.write(path, b"")


async def test_no_link_leads_out(box):
    await sh(
        box,
        "ln -s /etc/passwd out; ln -s / root; ln -s ../tmp up; ln -s d/b.txt in; ln -s /proc/self/root magic; mkfifo pipe",
    )
    assert await box.read("in") == b"two"
    for path in ("out", "root/etc/passwd", "up/x", "magic/etc/passwd", "pipe"):
        with pytest.raises(NotFound):
            await box.read(path)
    for path in ("root/tmp/x", "up/x", "magic/tmp/x"):
        with pytest.raises(BadRequest):
            await box.write(path, b"escaped")
    await box.write("out", b"replaced")
    assert (await sh(box, "head -c4 /etc/passwd; test -L out || cat out; ls /tmp")).stdout == b"rootreplaced"


async def test_diff_says_what_is_not_as_it_was(box):
    assert await box.diff() == []
    script = "echo 1 > a.txt; rm -r d; mkdir d; echo 3 > d/c.txt; chmod -x run.sh; mkdir -p e/f; echo x > e/f/g; ln -s /x link; mkfifo p"
    await sh(box, f"{script}; touch -d @0 untouched; rm untouched; : > .wh.foo; chmod +x e/f/g")
    assert list(await box.diff()) == [
        Change(path=".wh.foo", kind=ChangeKind.WRITTEN, data=b""),
        Change(path="a.txt", kind=ChangeKind.WRITTEN, data=b"1\n"),
        Change(path="d/b.txt", kind=ChangeKind.DELETED),
        Change(path="d/c.txt", kind=ChangeKind.WRITTEN, data=b"3\n"),
        Change(path="e/f/g", kind=ChangeKind.WRITTEN, data=b"x\n", executable=True),
        Change(path="link", kind=ChangeKind.LINK, data=b"/x"),
        Change(path="p", kind=ChangeKind.OTHER),
        Change(path="run.sh", kind=ChangeKind.WRITTEN, data=b"#!/bin/sh\necho ran", executable=False),
    ]


async def test_files_that_are_large_or_only_seem_to_be_are_named_without_their_content(backend):
    box = await backend.start(SandboxSpec(limits=Limits(memory_mb=256, disk_mb=64)))
    await sh(box, "truncate -s 40M sparse; for i in 1 2 3 4 5 6; do truncate -s 8M f$i; done; echo 1 > a.txt")
    changes = {change.path: change for change in await box.diff()}
    assert changes["sparse"].kind is ChangeKind.OTHER
    assert changes["a.txt"].data == b"1\n"
    kinds = [changes[f"f{number}"].kind for number in range(1, 7)]
    assert kinds.count(ChangeKind.OTHER) >= 3, "all together have a bound, too"
    assert sum(len(change.data) for change in changes.values()) <= 32 << 20
    await box.stop()


async def test_touch_and_renaming_back_are_no_changes(box):
    await sh(box, "touch a.txt; chmod 600 d/b.txt; mv run.sh x; mv x run.sh; mv d e; mv e d")
    assert await box.diff() == []
    await sh(box, "mv d e; chmod 000 a.txt; echo 1 > e/hidden; chmod 000 e")
    paths = {change.path: change.kind for change in await box.diff()}
    assert paths == {"d/b.txt": "deleted", "e/b.txt": "written", "e/hidden": "written"}


async def test_a_file_in_a_directorys_place_and_back(box):
    await sh(box, "rm -r d; echo f > d; rm a.txt; mkdir a.txt; echo g > a.txt/g")
    paths = {change.path: change.kind for change in await box.diff()}
    assert paths == {"a.txt": "deleted", "a.txt/g": "written", "d": "written", "d/b.txt": "deleted"}


async def test_forks_start_from_the_files_and_go_their_own_ways(backend, box):
    if not await forks_or_refuses(backend, box):
        return
    await sh(box, "echo changed > a.txt; rm d/b.txt; echo new > n")
    before = await box.diff()
    one, two = await box.fork(2)
    assert await one.diff() == []
    await sh(one, "echo 1 > a.txt; rm n")
    await sh(two, "echo 2 > a.txt")
    await sh(box, "echo 0 > a.txt")
    assert [(await sh(each, "cat a.txt")).stdout for each in (box, one, two)] == [b"0\n", b"1\n", b"2\n"]
    assert {change.path: change.kind for change in await one.diff()} == {"a.txt": "written", "n": "deleted"}
    assert {change.path for change in await box.diff()} == {change.path for change in before}
    await box.stop()
    (grandchild,) = await one.fork(1)
    await one.stop()
    assert (await sh(grandchild, "cat a.txt; ls; ls d")).stdout == b"1\na.txt\nd\nrun.sh\n"
    await grandchild.write("a.txt", b"changed\n")
    assert [change.path for change in await grandchild.diff()] == ["a.txt"]
    for each in (two, grandchild):
        await each.stop()


async def test_a_program_in_the_way_of_a_fork_is_named(backend, box):
    if not await forks_or_refuses(backend, box):
        return
    await sh(box, "sleep 600 &")
    with pytest.raises(Unavailable, match="working directory"):
        await box.fork(1)
    assert (await sh(box, "cat a.txt")).stdout == b"one"


async def test_a_fork_waits_for_a_program_that_is_ending(backend, box, monkeypatch):
    monkeypatch.setattr("ostinato.worlds.sandbox.backend._FREEZE_ATTEMPTS", 6_000)  # a busy machine ends it late
    if not await forks_or_refuses(backend, box):
        return
    await sh(box, "sleep 0.3 &")
    (fork,) = await box.fork(1)
    assert (await sh(fork, "cat a.txt")).stdout == b"one"
    await fork.stop()


async def test_a_stopped_sandbox_says_so(box):
    await box.stop()
    await box.stop()
    for call in (sh(box, "true"), box.read("a.txt"), box.write("a", b""), box.diff(), box.fork(1)):
        with pytest.raises(Unavailable):
            await call


async def test_layers_lie_over_each_other_and_stay_as_they_are(backend, tmp_path):
    for name, files in {"low": {"a": "low", "b": "low"}, "high": {"b": "high", "sub/c": "high"}}.items():
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
    tmp_path.chmod(0o755)
    spec = SandboxSpec(
        layers=(str(tmp_path / "low"), str(tmp_path / "high")), files={"f": b"own"}, workdir="/home/me/project"
    )
    box = await backend.start(spec)
    assert (await sh(box, "pwd; cat a b sub/c f")).stdout == b"/home/me/project\nlowhighhighown"
    await sh(box, "echo mine > a; rm b; echo mine > sub/c")
    assert {change.path: change.kind for change in await box.diff()} == {
        "a": "written",
        "b": "deleted",
        "sub/c": "written",
    }
    assert (await sh(box, "cat a sub/c; ls")).stdout == b"mine\nmine\na\nf\nsub\n"
    if await forks_or_refuses(backend, box):
        (fork,) = await box.fork(1)
        assert (await sh(fork, "cat a sub/c; ls")).stdout == b"mine\nmine\na\nf\nsub\n"
    assert [(tmp_path / name).read_text() for name in ("low/a", "low/b", "high/b")] == ["low", "low", "high"]
    with pytest.raises(BadRequest, match="layers"):
        await backend.start(SandboxSpec(layers=(str(tmp_path / "none"),)))


async def test_there_is_no_network_but_its_own_loopback(backend, box):
    connect = (
        "import socket\ntry: socket.create_connection(('127.0.0.1', {}), 2); print('in')\nexcept OSError: print('out')"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert (
            await box.exec(["python3", "-c", connect.format(server.getsockname()[1])], timeout=WHOLE_PROGRAM_S)
        ).stdout == b"out\n"
    own = "import socket\ns = socket.create_server(('127.0.0.1', 8000)); c = socket.create_connection(('127.0.0.1', 8000)); print('own')"
    assert (await box.exec(["python3", "-c", own], timeout=WHOLE_PROGRAM_S)).stdout == b"own\n"


FETCH = """
import http.client, sys
c = http.client.HTTPConnection('127.0.0.1', 3128, timeout=100)
c.set_tunnel(sys.argv[1], int(sys.argv[2]))
try:
    c.request('GET', '/'); print(c.getresponse().read().decode())
except OSError as error:
    print(error)
"""


async def test_only_allowed_hosts_are_reached(backend):
    async def greet(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with (
        await asyncio.start_server(greet, "127.0.0.1", 0) as server,
        await asyncio.start_server(greet, "127.0.0.1", 0) as other,
    ):
        port, closed = (each.sockets[0].getsockname()[1] for each in (server, other))
        box = await backend.start(SandboxSpec(hosts=(f"localhost:{port}",)))
        said = [
            (await box.exec(["python3", "-c", FETCH, name, str(at)], timeout=WHOLE_PROGRAM_S)).stdout
            for name, at in (("localhost", port), ("localhost", closed), ("127.0.0.1", port))
        ]
        assert said[0] == b"hello\n"
        assert all(b"403" in text for text in said[1:])
        assert b"3128" in (await sh(box, "echo $HTTPS_PROXY")).stdout
        await box.stop()


@pytest.mark.parametrize(
    "spec",
    [
        {"files": {"../x": b""}}, {"files": {"/x": b""}}, {"workdir": "/"}, {"workdir": "work"}, {"workdir": "/usr/x"},
        {"workdir": "/a/../b"}, {"env": {"A=B": ""}}, 
        {"env": {"A": "\0"}}, {"hosts": ("nohost",)}, {"hosts": ("a:99999",)}, {"layers": ("relative",)},
    ],
)  # fmt: skip
async def test_a_spec_that_cannot_be_is_refused(backend, spec):
    with pytest.raises(BadRequest, match=next(iter(spec))):
        await backend.start(SandboxSpec(**spec))


async def test_isolation_names_what_it_is(backend):
    isolation = await backend.isolation()
    assert isolation.kind == KINDS[type(backend)]
    assert isolation.forks == isinstance(backend, Boxes)
    assert isolation.forks != any("forked" in text for text in isolation.missing)
    assert isolation.counts_memory != any("memory" in text for text in isolation.missing)


def groups_of(keeper: int) -> list[Path]:
    return [path for tree in ("cpu", "memory") for path in Path("/sys/fs/cgroup", tree).rglob(f"ostinato-{keeper}")]


async def test_nothing_is_left_behind(namespaces, tmp_path):
    boxes = await asyncio.gather(*(namespaces.start(SandboxSpec(files={"x": bytes(1 << 16)})) for _ in range(8)))
    await asyncio.gather(*(sh(box, "sleep 600 & (setsid sleep 600 &) ; echo y > y") for box in boxes))
    keeper = namespaces._zygote.process.pid
    mounts = mounts_beside(tmp_path)
    assert Path(f"/proc/{keeper}").exists()
    await namespaces.close()
    assert not Path(f"/proc/{keeper}").exists()
    assert mounts_beside(tmp_path) <= mounts
    assert groups_of(keeper) == []
    with pytest.raises(Unavailable):
        await sh(boxes[0], "true")


ANSWER = "import socket, sys\ns = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\ns.sendall(b'hi')\nprint(s.recv(9).decode())"


async def test_the_host_answers_at_a_port_of_one_sandbox_alone(backend, box):
    listener = await box.listen(8321)
    other = await backend.start(SandboxSpec(limits=SMALL))

    async def answer(reader, writer):
        writer.write(await reader.read(9) + b"!")
        writer.close()

    server = await asyncio.start_server(answer, sock=listener)
    try:
        assert (await box.exec(["python3", "-c", ANSWER, "8321"], timeout=WHOLE_PROGRAM_S)).stdout == b"hi!\n"
        refused = await other.exec(["python3", "-c", ANSWER, "8321"], timeout=WHOLE_PROGRAM_S)
        assert b"ConnectionRefused" in refused.stderr
        if await forks_or_refuses(backend, box):
            (child,) = await box.fork(1)
            assert (
                b"ConnectionRefused"
                in (await child.exec(["python3", "-c", ANSWER, "8321"], timeout=WHOLE_PROGRAM_S)).stderr
            )
        with pytest.raises(Unavailable, match="port 8321"):
            await box.listen(8321)
        with pytest.raises(BadRequest, match="port"):
            await box.listen(0)
    finally:
        server.close()


async def test_mounts_show_directories_of_the_host_read_only(backend, tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "bin" / "tool").chmod(0o755)
    spec = SandboxSpec(mounts={"/opt/some/where": str(tmp_path)}, limits=SMALL)
    box = await backend.start(spec)
    children = await box.fork(1) if await forks_or_refuses(backend, box) else []
    for each in (box, *children):
        assert (await each.exec(["/opt/some/where/bin/tool"], timeout=WHOLE_PROGRAM_S)).stdout == b"tool\n"
        assert (await sh(each, "echo x > /opt/some/where/x")).code != 0
        assert await each.diff() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]
    bare = await backend.start(SandboxSpec(limits=SMALL))
    assert (await sh(bare, "ls -A /opt/some/where 2>/dev/null")).stdout == b""


@pytest.mark.parametrize(
    "mounts",
    [
        {"/work/x": "/usr"},
        {"/": "/usr"},
        {"/usr/x": "/usr"},
        {"opt": "/usr"},
        {"/opt/../etc": "/usr"},
        {"/opt": "/usr", "/opt/b": "/usr"},
        {"/opt": "usr"},
        {"/opt": "/no/such/directory"},
        {f"/opt{n}": "/usr" for n in range(17)},
    ],
)
async def test_mounts_that_would_hide_something_are_refused(backend, mounts):
    with pytest.raises(BadRequest, match=r"mounts|layers"):
        await backend.start(SandboxSpec(mounts=mounts, limits=SMALL))


@pytest.mark.parametrize("shown_before", [False, True])
@pytest.mark.parametrize("instead", ["nothing", "a file"])
@pytest.mark.parametrize("kind", [Boxes, GVisorBoxes])
async def test_a_mount_that_is_lost_while_its_start_waits_is_named(kind, instead, shown_before, tmp_path, monkeypatch):
    if kind is GVisorBoxes and shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    made, waiting = kind(SandboxConfig(boxes=1)), asyncio.Event()
    source = tmp_path / "shown"
    source.mkdir()
    tmp_path.chmod(0o755)
    spec = SandboxSpec(mounts={"/opt/shown": str(source)}, limits=SMALL)
    try:
        first = await made.start(spec if shown_before else SandboxSpec(limits=SMALL))
        start = made._sandboxes.start

        async def started(launch, hosts):
            waiting.set()
            return await start(launch, hosts)

        monkeypatch.setattr(made._sandboxes, "start", started)
        second = asyncio.create_task(made.start(spec))
        await waiting.wait()
        source.rmdir()
        if instead == "a file":
            source.write_text("x")
        await first.stop()
        with pytest.raises(BadRequest, match=r"mounts: .*/shown' is not a directory") as refused:
            await second
        assert refused.value.field == "mounts"
        third = await made.start(SandboxSpec(limits=SMALL))
        assert (await sh(third, "echo on")).stdout == b"on\n"
    finally:
        await made.close()


@pytest.mark.parametrize("field", ["layers", "mounts"])
async def test_gvisor_is_not_started_for_a_directory_that_was_lost(field, tmp_path, monkeypatch):
    monkeypatch.setattr("ostinato.worlds.sandbox.gvisor.backend.shutil.which", lambda _: "/no/runsc")
    lost = str(tmp_path / "lost")
    spec = SandboxSpec(layers=(lost,)) if field == "layers" else SandboxSpec(mounts={"/opt/shown": lost})
    with pytest.raises(BadRequest, match=f"{field}: .*/lost' is not a directory"):
        await GVisorBoxes()._launch(spec, None)


async def test_a_file_in_the_place_of_a_layer_ends_no_box(namespaces, tmp_path):
    """It may take the directory's place after every check, when the keeper opens it."""
    (tmp_path / "layer").write_text("x")
    box = await namespaces.start(SandboxSpec(limits=SMALL))
    zygote = namespaces._zygote
    with pytest.raises(SandboxRefused, match="'open the layer' failed: Not a directory"):
        await zygote._open_layer(await zygote.ensure_started(), str(tmp_path / "layer"))
    assert (await sh(box, "echo on")).stdout == b"on\n"
    assert await zygote.layer("layers", str(tmp_path)) == 0


async def gone(box):
    """Until a box whose zygote was killed says that it is no more."""
    with contextlib.suppress(Unavailable):
        while True:
            await sh(box, "true")
    await box.stop()


async def started_again(backend, spec):
    """A box, however often what was killed makes a start fail."""
    while True:
        try:
            return await backend.start(spec)
        except Unavailable:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("victim", ["keeper", "zygote"])
async def test_whoever_of_its_processes_is_killed_is_replaced_and_leaves_nothing(namespaces, tmp_path, victim):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "a.txt").write_text("first")
    (tmp_path / "two" / "a.txt").write_text("second")
    one, two = (SandboxSpec(layers=(str(tmp_path / name),)) for name in ("one", "two"))
    keepers, boxes = [], [await namespaces.start(one), await namespaces.start(two)]
    for _ in range(2):  # the second ends what replaced the first
        keeper = namespaces._zygote.process.pid
        keepers.append(keeper)
        below = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        os.kill(keeper if victim == "keeper" else int(below[0]), signal.SIGKILL)
        for box in boxes:
            await gone(box)
        boxes = [
            await started_again(namespaces, two),
            await started_again(namespaces, one),
        ]  # layers get other numbers now
        assert [(await sh(box, "cat a.txt")).stdout for box in boxes] == [b"second", b"first"]
    await namespaces.close()
    assert [path for keeper in keepers for path in groups_of(keeper)] == []


async def test_a_keeper_that_is_killed_as_it_starts_is_no_refusal(namespaces, monkeypatch):
    start = subprocess.Popen

    def killed(argv, **more):
        """The process is killed before it has said a word."""
        process = start([sys.executable, "-c", "import time; time.sleep(600)"], **more)
        process.kill()
        return process

    with monkeypatch.context() as patch:
        patch.setattr("ostinato.worlds.sandbox.host.subprocess.Popen", killed)
        with pytest.raises(Unavailable, match="killed as it started"):
            await namespaces.isolation()
    assert (await sh(await namespaces.start(SandboxSpec()), "echo on")).stdout == b"on\n"


async def test_a_box_is_never_started_on_another_zygotes_layers(namespaces, tmp_path, monkeypatch):
    """Between the look-up of a layer's number and the start the zygote is replaced by one that counts anew."""
    look_up = namespaces._zygote.layer

    async def replaced_after(field, path):
        number = await look_up(field, path)
        namespaces._zygote.close()
        return number

    monkeypatch.setattr(namespaces._zygote, "layer", replaced_after)
    with pytest.raises(Unavailable, match="knows no layers yet"):
        await namespaces.start(SandboxSpec(layers=(str(tmp_path),)))
