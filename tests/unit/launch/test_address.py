"""Where a run is served: a stale or damaged word of it is never believed; a taken port is told at once."""

import asyncio
import io
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from ostinato.app.storage import home
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.launch.commands import up
from ostinato.launch.placing.address import bind, handed_down, remove_address, url_of, write_address
from ostinato.launch.placing.heartbeat import LISTEN_FD, SERVING
from ostinato.status.gateway_address import read_address

URL = "http://127.0.0.1:8321"


def test_it_is_believed_while_its_writer_lives(tmp_path):
    path = tmp_path / "gateway.url"
    assert read_address(path) is None
    write_address(path, URL)
    assert read_address(path) == URL
    assert path.read_text().splitlines()[0] == URL, "the first line is the URL, for people"
    remove_address(path)
    remove_address(path)
    assert read_address(path) is None


def test_it_is_not_believed_once_its_writer_was_killed_nor_if_another_process_has_its_pid(tmp_path):
    path = tmp_path / "gateway.url"
    program = f"""
from pathlib import Path
from ostinato.launch.placing.address import write_address
from ostinato.status.gateway_address import read_address
write_address(Path({str(path)!r}), {URL!r})
assert read_address(Path({str(path)!r})) == {URL!r}
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert path.exists()
    assert read_address(path) is None
    write_address(path, URL)
    _, mark = path.read_text().splitlines()
    path.write_text(f"{URL}\n{os.getpid()} {int(mark.split()[1]) + 1}\n")
    assert read_address(path) is None


@pytest.mark.parametrize("cut", [0, 1, 10, 21, 22, 23, 26])
def test_a_damaged_file_names_no_address(tmp_path, cut):
    path = tmp_path / "gateway.url"
    write_address(path, URL)
    path.write_bytes(path.read_bytes()[:cut])
    assert read_address(path) is None
    path.write_bytes(b"\xff\xfe\x00" * cut)
    assert read_address(path) is None


def test_a_taken_port_is_one_line_with_a_way_out():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            BadConfig, match=rf"cannot listen on 127\.0\.0\.1:{port}: another program listens there; set"
        ):
            bind("127.0.0.1", port)
    with pytest.raises(BadConfig, match="check it"):
        bind("203.0.113.7", 0, "check it")
    with pytest.raises(BadConfig, match="cannot listen on no-such-host"):
        bind("no-such-host.invalid", 0)


def test_who_connects_before_anybody_answers_waits_and_is_answered():
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"hello")
        taken, _ = listener.accept()
        with taken:
            assert taken.recv(5) == b"hello"


def test_a_socket_is_handed_down_once_and_no_further(monkeypatch):
    monkeypatch.delenv(LISTEN_FD, raising=False)
    assert handed_down() is None
    with bind("::1", 0) as listener:
        copy = os.dup(listener.fileno())
        os.set_inheritable(copy, True)
        monkeypatch.setenv(LISTEN_FD, str(copy))
        with handed_down() as found:
            assert url_of(found) == url_of(listener)
            assert url_of(found).startswith("http://[::1]:")
            assert not os.get_inheritable(found.fileno())
            assert found.proto == socket.IPPROTO_TCP
        assert handed_down() is None


async def test_the_address_and_the_models_name_are_shown_as_they_are(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}", "model.name='tiny[/x]'"])
    launched = SimpleNamespace(
        home=home(config),
        address=lambda: "http://[fd00::1]:8321",
        doing=lambda worker: f"{SERVING} it",
        trouble=lambda worker: "",
    )
    out = io.StringIO()
    announcing = asyncio.create_task(up._announce(launched, config, Console(file=out, width=200)))
    await asyncio.sleep(0)
    announcing.cancel()
    assert "serving http://[fd00::1]:8321/v1  model tiny[/x]  (Ctrl-C" in out.getvalue()
