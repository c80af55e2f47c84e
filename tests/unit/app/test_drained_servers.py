"""Which servers drain: a file that is written whole, and names none that the engine does not have."""

import pytest

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
    assert [each.name for each in tmp_path.iterdir()] == ["draining"]


@pytest.mark.parametrize("engine", [ENGINE, EngineConfig()])
def test_a_server_that_the_engine_does_not_have_is_refused(tmp_path, engine):
    with pytest.raises(BadRequest, match=r"none of engine\.urls"):
        write_draining(tmp_path / "draining", engine, "http://c:8000", back=False)
    assert not (tmp_path / "draining").exists()
