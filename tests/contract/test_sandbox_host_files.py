"""Programs may read the world-readable files of the host that a sandbox shows, and do nothing else with the host's files."""

import os
import shutil
import socket

import pytest
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.errors import BadRequest
from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.worlds.sandbox import Boxes
from ostinato.worlds.sandbox.gvisor import GVisorBoxes

BACKENDS = {"namespaces": Boxes, "gvisor": GVisorBoxes}
SMALL = Limits(memory_mb=128, disk_mb=8, processes=16)
CONNECT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as s:
    try: s.connect(sys.argv[1]); print("connected")
    except OSError: print("out")
"""


@pytest.fixture(params=BACKENDS)
async def backend(request):
    if request.param == "gvisor" and shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    made = BACKENDS[request.param]()
    yield made
    await made.close()


@pytest.mark.parametrize("kind", ["layers", "mounts"])
async def test_no_program_connects_to_a_socket_of_the_host(backend, tmp_path, kind):
    tmp_path.chmod(0o755)
    (tmp_path / "d").mkdir()
    shown = {"layers": {"layers": (str(tmp_path),)}, "mounts": {"mounts": {"/opt/shown": str(tmp_path)}}}[kind]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "d" / "s"))
        listener.listen(1)
        (tmp_path / "d" / "s").chmod(0o666)
        if kind == "mounts" and isinstance(backend, Boxes):
            with pytest.raises(BadRequest, match="socket"):
                await backend.start(SandboxSpec(limits=SMALL, **shown))
            return
        box = await backend.start(SandboxSpec(limits=SMALL, **shown))
        path = {"layers": "d/s", "mounts": "/opt/shown/d/s"}[kind]
        assert (await box.exec(["python3", "-c", CONNECT, path], timeout=WHOLE_PROGRAM_S)).stdout == b"out\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root has no files of root's to show")
@pytest.mark.parametrize("layered", [False, True])
async def test_no_program_reads_what_only_root_may(backend, tmp_path, layered):
    if isinstance(backend, Boxes):
        pytest.skip("namespaces show what a mount holds as the programs' own")
    tmp_path.chmod(0o755)
    for name in ("layer", "shown", "shown/closed"):
        (tmp_path / name).mkdir()
    files = {"layer/own": 0o600, "shown/all": 0o644, "shown/root": 0o600, "shown/group": 0o640, "shown/closed/x": 0o644}
    for name, mode in files.items():
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(mode)
    (tmp_path / "shown/closed").chmod(0o700)
    layers = (str(tmp_path / "layer"),) if layered else ()
    box = await backend.start(SandboxSpec(layers=layers, mounts={"/opt/shown": str(tmp_path / "shown")}, limits=SMALL))
    said = await box.exec(
        ["sh", "-c", "cd /opt/shown; cat all root group closed/x; ls closed"], timeout=WHOLE_PROGRAM_S
    )
    assert said.stdout == b"shown/all"
    if layered:
        said = await box.exec(["sh", "-c", "cat own; echo new > own; cat own"], timeout=WHOLE_PROGRAM_S)
        assert said.stdout == b"layer/ownnew\n", "its own layer is the programs' own"
    box = await backend.start(SandboxSpec(layers=layers, limits=SMALL))
    assert (await box.exec(["sh", "-c", "id -u"], timeout=WHOLE_PROGRAM_S)).stdout == b"1000\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root has no files of root's to show")
async def test_too_much_that_only_root_may_read_is_refused_where_programs_are_root_to_gvisor(backend, tmp_path):
    if isinstance(backend, Boxes):
        pytest.skip("namespaces show layers of root under another user")
    (tmp_path / "layer").mkdir()
    (tmp_path / "shown").mkdir()
    for number in range(70):
        (tmp_path / "shown" / f"f{number}").touch(0o600)
    spec = SandboxSpec(layers=(str(tmp_path / "layer"),), mounts={"/opt/shown": str(tmp_path / "shown")})
    with pytest.raises(BadRequest, match="belong to root"):
        await backend.start(spec)


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root has no files of root's to show")
async def test_a_mount_that_programs_could_not_enter_is_refused(backend, tmp_path):
    if isinstance(backend, Boxes):
        pytest.skip("namespaces show what a mount holds as the programs' own")
    tmp_path.chmod(0o700)
    with pytest.raises(BadRequest, match="readable for everybody"):
        await backend.start(SandboxSpec(mounts={"/opt/shown": str(tmp_path)}))
