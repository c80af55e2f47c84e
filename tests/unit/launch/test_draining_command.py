"""`ostinato drain` writes for the gateway what it says to people."""

import io

from rich.console import Console

from ostinato.app.draining import read_draining
from ostinato.app.storage import home
from ostinato.config import load
from ostinato.launch.commands.draining import drain_server


def test_what_is_said_is_what_the_gateway_reads(tmp_path):
    urls = ["http://a:8000", "http://b:8000"]
    config = load(None, [f"run.directory='{tmp_path / 'run'}'", "engine.kind='vllm'", f"engine.urls={urls}"])
    out = io.StringIO()
    drain_server(config, "http://b:8000/", False, Console(file=out, width=300))
    assert "http://b:8000/ gets nothing new" in out.getvalue()
    assert out.getvalue().endswith("draining: http://b:8000\n")
    assert read_draining(home(config).draining) == {"http://b:8000"}
    drain_server(config, "http://b:8000", True, Console(file=out, width=300))
    assert out.getvalue().endswith("draining: none\n")
    assert read_draining(home(config).draining) == frozenset()
