"""Which servers drain: a file that is written whole, and names none that the engine does not have."""

import threading

import pytest

from ostinato.app import server_loans
from ostinato.app.server_loans import read_draining, write_draining
from ostinato.core.errors import BadRequest
from ostinato.engine.config import EngineConfig

ENGINE = EngineConfig(kind="vllm", urls=("http://a:8000/", "http://b:8000"))


def test_servers_are_added_and_taken_out_again(tmp_path):
    path = tmp_path / "draining"
    assert read_draining(path) == frozenset()
    write_draining(path, ENGINE, "http://a:8000", back=False)
    assert write_draining(path, ENGINE, "http://b:8000/", back=False) == {"http://a:8000", "http://b:8000"}
    write_draining(path, ENGINE, "http://a:8000/", back=True)
    assert read_draining(path) == {"http://b:8000"}
    assert [each.name for each in tmp_path.iterdir() if not each.name.endswith(".lock")] == ["draining"]


def test_of_two_that_are_drained_at_once_both_are(tmp_path, monkeypatch):
    """The second command comes between the first one's reading and its writing."""
    path, write = tmp_path / "draining", server_loans.write_atomic
    second = threading.Thread(target=write_draining, args=(path, ENGINE, "http://b:8000"), kwargs={"back": False})

    def between(*args, **more):
        monkeypatch.setattr(server_loans, "write_atomic", write)
        second.start()
        second.join(0.2)  # it waits for the lock; without one it is over now, and what it wrote is overwritten
        write(*args, **more)

    monkeypatch.setattr(server_loans, "write_atomic", between)
    write_draining(path, ENGINE, "http://a:8000", back=False)
    second.join()
    assert read_draining(path) == {"http://a:8000", "http://b:8000"}


@pytest.mark.parametrize("engine", [ENGINE, EngineConfig()])
def test_a_server_that_the_engine_does_not_have_is_refused(tmp_path, engine):
    with pytest.raises(BadRequest, match=r"is not in engine\.urls"):
        write_draining(tmp_path / "draining", engine, "http://c:8000", back=False)
    assert not (tmp_path / "draining").exists()
