"""The lock that keeps a second server or trainer off a store."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ostinato.core.errors import BadConfig, Conflict, StorageFull
from ostinato.record.roles import hold

HOLDER = """
import sys, time
from pathlib import Path
from ostinato.record.roles import hold
with hold(Path(sys.argv[1]), "serve"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_holder_is_refused_with_the_pid_and_the_remedy(tmp_path: Path):
    refused = pytest.raises(Conflict, match=rf"serve process \(pid {os.getpid()}\).*stop it")
    with hold(tmp_path, "serve"), refused, hold(tmp_path, "serve"):
        pass
    with hold(tmp_path, "serve"):
        pass


def test_two_roles_do_not_disturb_each_other(tmp_path: Path):
    with hold(tmp_path, "serve"), hold(tmp_path, "train"):
        pass


def test_kill_9_releases_it(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(Conflict, match=f"pid {process.pid}"), hold(tmp_path, "serve"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with hold(tmp_path, "serve"):
        pass


def test_a_program_started_by_the_holder_does_not_keep_it(tmp_path: Path):
    with hold(tmp_path, "serve"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with hold(tmp_path, "serve"):
            pass
    finally:
        child.kill()
        child.wait()


def test_waiting_ends_at_the_deadline(tmp_path: Path):
    with hold(tmp_path, "migrate"):
        start = time.monotonic()
        with pytest.raises(Conflict), hold(tmp_path, "migrate", wait_s=0.05):
            pass
        assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize("role", ["", "../up", "a/b", "Serve", "x" * 40])
def test_a_role_is_a_plain_name(tmp_path: Path, role: str):
    with pytest.raises(BadConfig), hold(tmp_path, role):
        pass


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFull, match="file"), hold(tmp_path / "file", "serve"):
        pass


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("all of it")
    (tmp_path / ".serve.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageFull, match="cannot create"), hold(tmp_path, "serve"):
        pass
    assert (tmp_path / "precious").read_text() == "all of it"
