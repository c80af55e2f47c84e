"""What programs can do with files of the host that a sandbox shows: read what everybody may, and nothing else."""

import shutil
import socket

import pytest

from ostinato.core.errors import BadRequest
from ostinato.core.sandboxing import Limits, SandboxSpec
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
        assert (await box.exec(["python3", "-c", CONNECT, path], timeout=20.0)).stdout == b"out\n"
