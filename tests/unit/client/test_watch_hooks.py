"""Hooks are put into an agent's settings and taken out again, whatever else is done to them, by `ostinato-connect` too."""

import json
import shlex
import subprocess
import sys
from io import StringIO

import pytest

from ostinato_client.connect import command
from ostinato_client.connect.agent_settings import Surroundings
from ostinato_client.connect.command import Options
from ostinato_client.connect.errors import BadConfig, NotFound
from ostinato_client.connect.terminal import Terminal
from ostinato_client.watch import running
from ostinato_client.watch.installation import HOOKS, MODULE, change_hook

OWN = '{\n    "permissions": {"allow": ["Bash(make *)"]},\n    "hooks": {"PostToolUse": [{"matcher": "Edit", "hooks": []}], "Stop": []}\n}'


@pytest.fixture
def at(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "src").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "src", check=True)
    return Surroundings(env={"HOME": str(tmp_path / "home")}, directory=tmp_path / "src")


def install(name, at, scope="user", *, undone=False):
    terminal = Terminal(StringIO())
    change_hook(name, scope, at, terminal, undone=undone, yes=True, program="ostinato watch")
    return terminal.out.getvalue()


def undo(name, at, scope="user"):
    return install(name, at, scope, undone=True)


def place(name, at, scope="user"):
    return HOOKS[name].places[scope](at)


def put(name, at, text):
    place(name, at).parent.mkdir(parents=True, exist_ok=True)
    place(name, at).write_text(text)


def left(at):
    """Every file of the person's, but for git's."""
    home = at.directory.parent
    return {str(p.relative_to(home)): p.read_text() for p in home.rglob("*") if p.is_file() and ".git" not in p.parts}


def connect(at):
    options = Options(url="http://127.0.0.1:8321", model="m", yes=True)
    command.connect("claude-code", options, at, Terminal(StringIO()))


def disconnect(at):
    command.undo("claude-code", Options(yes=True), at, Terminal(StringIO()))


@pytest.mark.parametrize("name", list(HOOKS))
@pytest.mark.parametrize("scope", ["user", "project"])
def test_undoing_leaves_what_was_there(at, name, scope):
    before = left(at)
    said = install(name, at, scope)
    assert place(name, at, scope).exists()
    assert place(name, at, scope).name in said
    assert "nothing to change" in install(name, at, scope)
    undo(name, at, scope)
    assert left(at) == before
    with pytest.raises(NotFound, match="nothing to undo"):
        undo(name, at, scope)


def test_a_persons_own_hooks_stay_to_the_byte(at):
    put("claude-code", at, OWN)
    install("claude-code", at)
    entries = json.loads(place("claude-code", at).read_text())["hooks"]["PostToolUse"]
    assert entries[0] == {"matcher": "Edit", "hooks": []}
    assert MODULE in entries[1]["hooks"][0]["command"]
    undo("claude-code", at)
    assert place("claude-code", at).read_text() == OWN


def test_of_a_file_that_was_changed_since_only_the_hook_goes(at):
    put("claude-code", at, OWN)
    install("claude-code", at)
    changed = json.loads(place("claude-code", at).read_text()) | {"theme": "dark"}
    put("claude-code", at, json.dumps(changed))
    undo("claude-code", at)
    assert json.loads(place("claude-code", at).read_text()) == json.loads(OWN) | {"theme": "dark"}
    assert list(left(at)) == ["home/.claude/settings.json"]


@pytest.mark.parametrize("before", [None, OWN])
@pytest.mark.parametrize("first", ["connect", "watch"])
@pytest.mark.parametrize("undone_first", ["connect", "watch"])
def test_connect_and_watch_take_out_their_own(at, before, first, undone_first):
    if before is not None:
        put("claude-code", at, before)
    if first == "watch":
        install("claude-code", at)
    connect(at)
    install("claude-code", at)
    both = json.loads(place("claude-code", at).read_text())
    assert MODULE in str(both["hooks"])
    assert "ANTHROPIC_BASE_URL" in both["env"]
    if undone_first == "connect":
        disconnect(at)
        assert MODULE in place("claude-code", at).read_text()
        undo("claude-code", at)
    else:
        undo("claude-code", at)
        assert "ANTHROPIC_BASE_URL" in place("claude-code", at).read_text()
        assert MODULE not in place("claude-code", at).read_text()
        disconnect(at)
    found = left(at)
    assert {name: json.loads(text) for name, text in found.items()} == (
        {} if before is None else {"home/.claude/settings.json": json.loads(before)}
    )


def test_the_hook_imports_nothing_of_the_directory_that_it_runs_in(at):
    install("claude-code", at)
    entry = json.loads(place("claude-code", at).read_text())["hooks"]["PostToolUse"][0]
    (at.directory / "ostinato_client").mkdir()
    (at.directory / "ostinato_client" / "__init__.py").write_text("open('planted', 'w')")
    (at.directory / "json.py").write_text("open('planted', 'w')")
    file = at.directory / "a.py"
    file.write_text("x = 1\n")
    payload = {
        "tool_name": "Write", "tool_use_id": "call_chatcmpl-1_0_0", "tool_input": {"file_path": str(file), "content": "x = 1\n"},
        "tool_response": {"type": "create", "filePath": str(file), "content": "x = 1\n", "originalFile": None},
    }  # fmt: skip
    words = shlex.split(entry["hooks"][0]["command"])
    assert words[:2] == [sys.executable, "-I"]
    for text in (json.dumps(payload), "{", "[]", '{"tool_input": 5}', ""):
        done = subprocess.run(words, input=text, cwd=at.directory, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (at.directory / "planted").exists()
    (line,) = (at.directory / ".git" / "ostinato" / "spool.jsonl").read_text().split()[:1]
    assert line.startswith('{"v":')


def test_what_cannot_be_changed_is_refused_by_name(at):
    for text in ('{"hooks": []}', '{"hooks": {"PostToolUse": {}}}', "{ // no\n}"):
        put("claude-code", at, text)
        with pytest.raises(BadConfig, match=r"settings\.json"):
            install("claude-code", at)
        assert place("claude-code", at).read_text() == text


def test_cursor_is_refused_with_the_reason(at):
    before = left(at)
    with pytest.raises(BadConfig, match="could be credited by a guess only"):
        install("cursor", at)
    assert left(at) == before


def test_outside_of_a_repository_it_says_what_is_left_to_do(at, tmp_path):
    (tmp_path / "plain").mkdir()
    elsewhere = Surroundings(env=at.env, directory=tmp_path / "plain")
    assert "run `ostinato watch`" in install("opencode", elsewhere)


def test_the_clients_own_command_installs_and_removes_it(at, monkeypatch, capsys):
    monkeypatch.setenv("HOME", at.env["HOME"])
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    monkeypatch.chdir(at.directory)
    before = left(at)
    assert running.main(["--install", "claude-code", "--yes"]) == 0
    assert MODULE in place("claude-code", at).read_text()
    assert "`python -m ostinato_client.watch --install claude-code --undo` removes it" in capsys.readouterr().out
    assert running.main(["--install", "claude-code", "--undo", "--yes"]) == 0
    assert left(at) == before
    assert running.main(["--install", "cursor"]) == 2
    assert "by a guess only" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        running.main(["--undo"])
    assert "with --install" in capsys.readouterr().err
