"""The lab of `tests/examinations/hosts`: its hosts share a network, which can be slow or gone, and nothing else; nothing of it stays."""

import subprocess
import sys
import time

import pytest
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.examinations.hosts.lab import PREFIX, ROOT, Lab, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SERVER = (
    "import socket; s = socket.create_server(('', 7)); c, _ = s.accept()\nwhile data := c.recv(99): c.sendall(data)"
)
CLIENT = """
import socket, sys, time
ends = time.monotonic() + 100
while True:
    try:
        c = socket.create_connection((sys.argv[1], 7), 100)
        break
    except ConnectionRefusedError:  # the server has not begun to listen
        if time.monotonic() > ends: raise
        time.sleep(0.02)
for _ in range(3):
    began = time.monotonic(); c.sendall(b"x"); c.recv(1); print(time.monotonic() - began, flush=True)
sys.stdin.read(1) if len(sys.argv) > 2 else None
"""


def echoes(lab):
    one, other = lab["one"], lab["other"]
    server = other.start("server", sys.executable, "-c", SERVER)
    times = [float(word) for word in one.run(sys.executable, "-c", CLIENT, other.address).split()]
    assert server.wait(PATIENT_S) == 0
    return times


def test_hosts_share_a_network_and_nothing_else_and_it_can_be_slow_or_gone(tmp_path):
    with Lab(("one", "other"), tmp_path) as lab:
        assert all(lab.check().values())
        ends, quickest = time.monotonic() + WHOLE_PROGRAM_S, 1.0
        while quickest >= 0.05 and time.monotonic() < ends:  # a busy machine may delay any of them
            quickest = min(echoes(lab))
        assert quickest < 0.05
        lab.round_trips(0.1, 0.1, seed=0)
        assert min(echoes(lab)) >= 0.1
        (lab["one"].directory / "kept").write_text("on its disk")
        process = lab["one"].start("sleep", "sleep", "60")
        lab["one"].kill()
        assert process.wait(PATIENT_S) != 0
        lab["one"].boot()
        assert lab["one"].run("cat", "/mnt/kept") == "on its disk"
        assert len(echoes(lab)) == 3
    assert not list(tmp_path.iterdir())


def test_what_a_killed_lab_leaves_is_gone_with_the_next(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.examinations.hosts.lab import Lab\n"
        "with Lab(('one',), Path(sys.argv[1])) as lab:\n"
        "    lab['one'].start('sleep', 'sleep', '6161.25')\n    print('up', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    process.kill()
    process.communicate()
    ends = time.monotonic() + WHOLE_PROGRAM_S
    while subprocess.run(["pgrep", "-f", "sleep 6161.25"], capture_output=True).stdout and time.monotonic() < ends:
        time.sleep(0.1)
    assert not subprocess.run(["pgrep", "-f", "sleep 6161.25"], capture_output=True).stdout
    assert list(tmp_path.glob(f"{PREFIX}*"))
    with Lab(("one",), tmp_path):
        assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 1
