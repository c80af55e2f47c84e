"""`ostinato drain` writes for the gateway what it says to people."""

import io
import json
import threading

import pytest
from rich.console import Console
from tests.deadlines import PATIENT_S

from ostinato.app import server_loans
from ostinato.app.server_loans import read_draining
from ostinato.app.storage import home
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadRequest
from ostinato.launch.commands.compute import drain_server
from ostinato.record import roles


def configured(tmp_path, urls):
    return load(None, [f"run.directory='{tmp_path / 'run'}'", "engine.kind='vllm'", f"engine.urls={urls}"])


def test_what_is_said_is_what_the_gateway_reads(tmp_path):
    urls = ["http://a:8000", "http://b:8000"]
    config = configured(tmp_path, urls)
    out = io.StringIO()
    drain_server(config, "http://b:8000/", False, Console(file=out, width=300))
    assert "http://b:8000/ gets nothing new" in out.getvalue()
    said = " ".join(out.getvalue().split())
    # 0 open answers say nothing while the gateway does not know of it yet
    assert "ostinato_engine_servers_draining and ostinato_engine_draining_open is 0" in said
    assert out.getvalue().endswith("draining: http://b:8000\n")
    assert read_draining(home(config).draining) == {"http://b:8000"}
    drain_server(config, "http://b:8000", True, Console(file=out, width=300))
    assert out.getvalue().endswith("draining: none\n")
    assert read_draining(home(config).draining) == frozenset()


def test_of_two_that_are_drained_at_once_neither_is_lost(tmp_path, monkeypatch):
    config = configured(tmp_path, ["http://a:8000", "http://b:8000"])
    write, flock, met = server_loans.write_atomic, roles.fcntl.flock, threading.Event()

    def drain_b():
        try:
            drain_server(config, "http://b:8000", False, Console(file=io.StringIO()))
        finally:
            met.set()

    other = threading.Thread(target=drain_b)

    def written(*args, **rest):
        if other.ident is None:  # the first has read the file and is about to write it
            other.start()
            assert met.wait(PATIENT_S)  # the second has written it, or must wait
        return write(*args, **rest)

    def locked(descriptor, how):
        try:
            flock(descriptor, how)
        except BlockingIOError:
            met.set()
            raise

    monkeypatch.setattr(server_loans, "write_atomic", written)
    monkeypatch.setattr(roles.fcntl, "flock", locked)
    drain_server(config, "http://a:8000", False, Console(file=io.StringIO()))
    other.join(PATIENT_S)
    assert read_draining(home(config).draining) == {"http://a:8000", "http://b:8000"}


def test_where_up_on_another_machine_says_what_drains_nothing_is_written(tmp_path):
    """It would be overwritten, and the gateway may not be here at all."""
    config = configured(tmp_path, ["http://a:8000"])
    place = home(config)
    worker = dict.fromkeys(("pid", "since", "doing_since", "restarts"), 0) | {"name": "serve", "node": "10.0.0.7"}
    worker |= dict.fromkeys(("trouble", "reason", "reason_at")) | {"condition": "running", "doing": ""}
    place.workers.write_text(json.dumps({"at": wall_clock(), "pid": 1, "ended": None, "workers": [worker]}))
    with pytest.raises(BadRequest, match="runs on another machine"):
        drain_server(config, "http://a:8000", False, Console(file=io.StringIO()))
    assert not place.draining.exists()
    place.scale.write_text("{}")  # here is `up` itself
    drain_server(config, "http://a:8000", False, Console(file=io.StringIO()))
    assert read_draining(place.draining) == {"http://a:8000"}
