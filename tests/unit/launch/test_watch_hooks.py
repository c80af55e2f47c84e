"""Hooks are put into an agent's settings and taken out again, whatever else is done to them, by `ostinato connect` too."""

import json
import shlex
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from ostinato.config import load
from ostinato.core.errors import BadConfig, Conflict, NotFound
from ostinato.launch.commands import connect as connecting
from ostinato.launch.commands.agent_settings import Surroundings
from ostinato.launch.commands.connect import Wishes
from ostinato.launch.commands.watch import HOOKS, MODULE, install, undo, watch
from ostinato_client.watch.state import State

OWN = '{\n    "permissions": {"allow": ["Bash(make *)"]},\n    "hooks": {"PostToolUse": [{"matcher": "Edit", "hooks": []}], "Stop": []}\n}'


@pytest.fixture
def at(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "src").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "src", check=True)
    return Surroundings(env={"HOME": str(tmp_path / "home")}, directory=tmp_path / "src")


def run(act, name, at, scope="user"):
    console = Console(file=StringIO(), width=200)
    act(name, scope, at, console, yes=True)
    return console.file.getvalue()


def place(name, at, scope="user"):
    return HOOKS[name].places[scope](at)


def put(name, at, text):
    place(name, at).parent.mkdir(parents=True, exist_ok=True)
    place(name, at).write_text(text)


def left(at):
    """Every file of the person's, but for git's."""
    home = at.directory.parent
    return {str(p.relative_to(home)): p.read_text() for p in home.rglob("*") if p.is_file() and ".git" not in p.parts}


async def connect(at):
    wishes = Wishes(url="http://127.0.0.1:8321", model="m", yes=True)
    await connecting.connect(load(None, []), "claude-code", wishes, at, Console(file=StringIO()))


def disconnect(at):
    connecting.undo("claude-code", Wishes(yes=True), at, Console(file=StringIO()))


@pytest.mark.parametrize("name", list(HOOKS))
@pytest.mark.parametrize("scope", ["user", "project"])
def test_undoing_leaves_what_was_there(at, name, scope):
    before = left(at)
    said = run(install, name, at, scope)
    assert place(name, at, scope).exists()
    assert place(name, at, scope).name in said
    assert "nothing to change" in run(install, name, at, scope)
    run(undo, name, at, scope)
    assert left(at) == before
    with pytest.raises(NotFound, match="nothing to undo"):
        run(undo, name, at, scope)


def test_a_persons_own_hooks_stay_to_the_byte(at):
    put("claude-code", at, OWN)
    run(install, "claude-code", at)
    entries = json.loads(place("claude-code", at).read_text())["hooks"]["PostToolUse"]
    assert entries[0] == {"matcher": "Edit", "hooks": []}
    assert MODULE in entries[1]["hooks"][0]["command"]
    run(undo, "claude-code", at)
    assert place("claude-code", at).read_text() == OWN


def test_of_a_file_that_was_changed_since_only_the_hook_goes(at):
    put("claude-code", at, OWN)
    run(install, "claude-code", at)
    changed = json.loads(place("claude-code", at).read_text()) | {"theme": "dark"}
    put("claude-code", at, json.dumps(changed))
    run(undo, "claude-code", at)
    assert json.loads(place("claude-code", at).read_text()) == json.loads(OWN) | {"theme": "dark"}
    assert list(left(at)) == ["home/.claude/settings.json"]


@pytest.mark.parametrize("before", [None, OWN])
@pytest.mark.parametrize("first", ["connect", "watch"])
@pytest.mark.parametrize("undone_first", ["connect", "watch"])
async def test_connect_and_watch_take_out_their_own(at, before, first, undone_first):
    if before is not None:
        put("claude-code", at, before)
    if first == "watch":
        run(install, "claude-code", at)
    await connect(at)
    run(install, "claude-code", at)
    both = json.loads(place("claude-code", at).read_text())
    assert MODULE in str(both["hooks"])
    assert "ANTHROPIC_BASE_URL" in both["env"]
    if undone_first == "connect":
        disconnect(at)
        assert MODULE in place("claude-code", at).read_text()
        run(undo, "claude-code", at)
    else:
        run(undo, "claude-code", at)
        assert "ANTHROPIC_BASE_URL" in place("claude-code", at).read_text()
        assert MODULE not in place("claude-code", at).read_text()
        disconnect(at)
    found = left(at)
    assert {name: json.loads(text) for name, text in found.items()} == (
        {} if before is None else {"home/.claude/settings.json": json.loads(before)}
    )


def test_the_hook_imports_nothing_of_the_directory_that_it_runs_in(at):
    run(install, "claude-code", at)
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
            run(install, "claude-code", at)
        assert place("claude-code", at).read_text() == text


def test_watching_says_what_is_wrong_and_holds_the_working_tree(at, tmp_path):
    console = Console(file=StringIO(), width=300)
    (tmp_path / "plain").mkdir()
    with pytest.raises(BadConfig, match="plain is not a git repository, nor in one; name one with --repository"):
        watch(tmp_path / "plain", None, once=True, interval_s=1.0, console=console)
    with pytest.raises(BadConfig, match="base_url"):
        watch(at.directory, "ftp://x", once=True, interval_s=1.0, console=console)
    assert watch(at.directory, "http://127.0.0.1:9", once=True, interval_s=1.0, console=console) == 0
    assert "following 0 lines of 0 calls" in console.file.getvalue()
    with (
        State(at.directory / ".git" / "ostinato"),
        pytest.raises(Conflict, match="another watcher"),
    ):
        watch(at.directory, "http://127.0.0.1:9", once=True, interval_s=1.0, console=console)


def test_outside_of_a_repository_it_says_what_is_left_to_do(at, tmp_path):
    (tmp_path / "plain").mkdir()
    elsewhere = Surroundings(env=at.env, directory=tmp_path / "plain")
    assert "run `ostinato watch`" in run(install, "opencode", elsewhere)
