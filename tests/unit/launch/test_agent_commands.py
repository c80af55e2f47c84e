"""`ostinato connect` and `ostinato watch` run the client package with this run's gateway, and its errors become this package's."""

import asyncio
import subprocess
import sys
from io import StringIO

import pytest

from ostinato import __version__
from ostinato.cli.connect import _follow, run_connect, run_watch
from ostinato.cli.options import Common
from ostinato.core import errors
from ostinato.core.errors import BadConfig, Conflict, NotFound, Unauthorized, Unavailable
from ostinato.core.records import Turn
from ostinato.launch.placing.address import write_address
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato_client.connect.errors import ConnectError
from ostinato_client.connect.terminal import Terminal
from ostinato_client.watch.state import State


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "src").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OSTINATO_URL", "http://elsewhere.example:1")
    monkeypatch.delenv("OSTINATO_API_KEY", raising=False)
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    monkeypatch.chdir(tmp_path / "src")
    return tmp_path / "home"


def test_the_running_gateway_is_found(home, tmp_path, capsys):
    common, settings = Common(overrides=(f"run.directory='{tmp_path}'",)), home / ".aider.conf.yml"
    with pytest.raises(NotFound, match="no gateway runs"):
        run_connect("aider", model="m", yes=True, common=common)
    write_address(tmp_path / "gateway.url", "http://0.0.0.0:8400")
    run_connect("aider", model="m", yes=True, common=common)
    assert "http://127.0.0.1:8400/v1" in settings.read_text()
    assert "`ostinato connect aider --undo` takes it back" in capsys.readouterr().out
    run_connect("aider", undo=True, yes=True)
    assert not settings.exists()


async def test_the_gateway_captures_the_call_of_every_dialect(home, monkeypatch, capsys):
    key, log = "sk-0123456789abcdef", MemoryLog()
    app = create_app(
        engine=FakeEngine(),
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(api_keys=(key,)),
        clock=lambda: 1000.0,
        model_name="m",
    )
    async with serving(app) as url:
        with pytest.raises(Unauthorized, match="OSTINATO_API_KEY"):
            await asyncio.to_thread(run_connect, test=True, url=url)
        monkeypatch.setenv("OSTINATO_API_KEY", key)
        for dialect in ("chat", "messages", "responses"):
            await asyncio.to_thread(run_connect, test=True, dialect=dialect, url=url, session="s1")
            said = capsys.readouterr().out
            turn = next(row for row in reversed(log.rows) if isinstance(row, Turn))
            assert f"{url}/s/s1 speaks {dialect}, model m" in said
            assert f"turn     {turn.id}" in said
            assert key not in said
    assert len([row for row in log.rows if isinstance(row, Turn)]) == 3


def test_an_error_of_the_client_package_is_this_packages_of_the_same_name(home):
    assert [kind for kind in ConnectError.__subclasses__() if not hasattr(errors, kind.__name__)] == []
    for kind in ConnectError.__subclasses__():
        assert issubclass(getattr(errors, kind.__name__), errors.OstinatoError)
    with pytest.raises(BadConfig, match="--test and --undo: give one of them"):
        run_connect("aider", test=True, undo=True)
    with pytest.raises(BadConfig, match="name an agent"):
        run_connect()
    with pytest.raises(NotFound, match="nothing to undo"):
        run_connect("aider", undo=True)
    with pytest.raises(Unavailable, match="cannot be reached"):
        run_connect("aider", url="http://127.0.0.1:9")
    with pytest.raises(BadConfig, match="by a guess only"):
        run_watch(install="cursor")
    with pytest.raises(BadConfig, match="say whose hook"):
        run_watch(undo=True)


def test_the_hook_is_removed_by_the_command_that_it_names(home, capsys):
    run_watch(install="claude-code", yes=True)
    assert "`ostinato watch --install claude-code --undo` removes it" in capsys.readouterr().out
    run_watch(install="claude-code", undo=True, yes=True)
    assert list(home.rglob("*.json")) == []


@pytest.mark.parametrize("use", [run_connect, lambda: run_watch(once=True)])
def test_a_missing_client_package_is_named_with_the_remedy(monkeypatch, use):
    monkeypatch.setitem(sys.modules, "ostinato_client.connect.errors", None)
    with pytest.raises(BadConfig, match=f"pip install ostinato-client=={__version__}") as refused:
        use()
    assert "\n" not in str(refused.value)


def test_watching_says_what_is_wrong_and_holds_the_working_tree(tmp_path):
    repository, plain, terminal = tmp_path / "src", tmp_path / "plain", Terminal(StringIO())
    repository.mkdir()
    plain.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)

    def watch(directory, url):
        return _follow(directory, url, terminal, once=True, interval_s=1.0)

    with pytest.raises(BadConfig, match="plain is not a git repository, nor in one; name one with --repository"):
        watch(plain, None)
    with pytest.raises(BadConfig, match="base_url"):
        watch(repository, "ftp://x")
    assert watch(repository, "http://127.0.0.1:9") == 0
    assert "following 0 lines of 0 calls" in terminal.out.getvalue()
    with State(repository / ".git" / "ostinato"), pytest.raises(Conflict, match="another watcher"):
        watch(repository, "http://127.0.0.1:9")
