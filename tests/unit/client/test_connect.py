"""An agent's settings are changed as far as it needs, shown without secrets, and put back exactly; the gateway's answer is told."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path

import pytest
import yaml
from tests.deadlines import WHOLE_PROGRAM_S
from tests.growth import grows_with_its_input

from ostinato_client.connect import command, settings_files
from ostinato_client.connect.agent_settings import (
    AGENTS,
    Surroundings,
    _once,
    check_env,
    merged_json,
    with_block,
    yaml_keys,
)
from ostinato_client.connect.command import Options, check_capture, connect, main, undo
from ostinato_client.connect.errors import BadConfig, Conflict, NotFound, Unauthorized, Unavailable
from ostinato_client.connect.settings_files import diff
from ostinato_client.connect.terminal import Terminal, hidden, masked

URL = "http://127.0.0.1:8321"
KEY = "sk-0123456789abcdefWXYZ"
WRITTEN = [name for name, agent in AGENTS.items() if agent.places]

BEFORE = {
    "claude-code": '{\n    "permissions": {"allow": ["Bash(make *)"]},\n    "env": {"EDITOR": "vi", "N": 1.5}\n}',
    "codex": '# mine\r\napproval_policy = "never"\r\n\r\n[projects."/src"]\r\ntrust_level = "trusted"',
    "opencode": '{"theme": "gruvbox", "provider": {"other": {"options": {"apiKey": "sk-of-another-1234567890"}}}}\n',
    "qwen-code": '{\n\t"modelProviders": {"openai": [{"id": "q", "name": "Q"}]},\n\t"ui": {"theme": "x"}\n}\n',
    "mini-swe-agent": "# mine\nexport OPENAI_API_KEY='sk-of-another-1234567890'\nMSWEA_GLOBAL_COST_LIMIT=3",
    "aider": "# mine\nauto-commits: false\nread:\n  - CONVENTIONS.md\n",
}
BROKEN = {
    "claude-code": '{"env": // no\n {}}',
    "codex": "model = \n",
    "opencode": '{"model": "a", "model": "b"}',
    "qwen-code": '{"security": "none"}',
    "mini-swe-agent": "OPENAI_API_KEY='open\n",
    "aider": "{model: flow}\n",
}


@pytest.fixture
def at(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "src").mkdir()
    return Surroundings(env={"HOME": str(tmp_path / "home")}, directory=tmp_path / "src")


def place(name, at, scope="user"):
    return AGENTS[name].places[scope](at)


def put(name, at, text, mode=0o644):
    path = place(name, at)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    path.chmod(mode)
    return path


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def everything(at):
    """Every path of this machine's person, with bytes and permissions."""
    return {
        path.relative_to(at.directory.parent): (path.read_bytes() if path.is_file() else None, mode_of(path))
        for path in at.directory.parent.rglob("*")
    }


def write(name, at, **options):
    terminal = Terminal(StringIO())
    told = {"url": URL, "model": "m", "yes": True} | options
    connect(name, Options(**told), at, terminal)
    return terminal.out.getvalue()


def take_back(name, at, **options):
    terminal = Terminal(StringIO())
    undo(name, Options(yes=True, **options), at, terminal)
    return terminal.out.getvalue()


# ------------------------------------------------------------ what each agent gets


def test_claude_code_gets_the_address_without_v1(at):
    write("claude-code", at)
    env = json.loads(place("claude-code", at).read_text())["env"]
    assert env["ANTHROPIC_BASE_URL"] == URL
    assert env["ANTHROPIC_AUTH_TOKEN"] == "ostinato", "it insists on a key"
    assert {value for name, value in env.items() if name.endswith("MODEL")} == {"m"}


def test_codex_gets_a_provider_that_speaks_responses(at):
    said = write("codex", at, key=KEY)
    values = tomllib.loads(place("codex", at).read_text())
    assert values["model"] == "m"
    assert values["model_provider"] == "ostinato"
    provider = values["model_providers"]["ostinato"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{URL}/v1", "responses")
    assert provider["env_key"] == "OSTINATO_API_KEY"
    assert "export OSTINATO_API_KEY=sk-…WXYZ" in said
    assert KEY not in place("codex", at).read_text(), "it takes the key from its environment only"


def test_codex_without_a_key_needs_no_variable(at):
    assert "export" not in write("codex", at)
    assert "env_key" not in place("codex", at).read_text()


def test_a_model_that_was_chosen_for_codex_stays(at):
    path = put("codex", at, 'model = "other"\n')
    said = write("codex", at)
    assert path.read_text().startswith('model = "other"\n')
    assert """codex -c 'model_provider="ostinato"' -m m""" in said
    assert "model_provider" not in tomllib.loads(path.read_text())


def test_the_others_get_chat_completions_below_v1(at):
    for name in ("opencode", "qwen-code", "mini-swe-agent", "aider"):
        write(name, at)
    opencode = json.loads(place("opencode", at).read_text())
    assert opencode["model"] == "ostinato/m"
    assert opencode["provider"]["ostinato"]["options"] == {"baseURL": f"{URL}/v1", "apiKey": "ostinato"}
    qwen = json.loads(place("qwen-code", at).read_text())
    assert qwen["modelProviders"]["openai"][0]["baseUrl"] == f"{URL}/v1"
    assert qwen["security"]["auth"]["selectedType"] == "openai"
    assert f"OPENAI_API_BASE='{URL}/v1'" in place("mini-swe-agent", at).read_text()
    aider = yaml.safe_load(place("aider", at).read_text())
    assert aider == {"model": "openai/m", "openai-api-base": f"{URL}/v1", "openai-api-key": "ostinato"}


def test_cursor_is_told_in_steps_and_nothing_is_written(at):
    said = write("cursor", at, key=KEY)
    assert f"{URL}/v1" in said
    assert KEY not in said
    assert list(at.directory.parent.rglob("*.*")) == []
    with pytest.raises(NotFound, match="no file is written for cursor"):
        take_back("cursor", at)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_session_is_in_every_address(at, name):
    write(name, at, session="fix-login")
    text = place(name, at).read_text()
    assert f"{URL}/s/fix-login" in text
    assert text.count(URL) == text.count(f"{URL}/s/fix-login")


def test_telemetry_is_sent_to_the_gateway(at):
    write("claude-code", at, telemetry=True, key=KEY)
    env = json.loads(place("claude-code", at).read_text())["env"]
    assert env["OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"] == f"{URL}/v1/logs"
    assert env["OTEL_EXPORTER_OTLP_LOGS_PROTOCOL"] == "http/json"
    write("codex", at, telemetry=True, key=KEY)
    exporter = tomllib.loads(place("codex", at).read_text())["otel"]["exporter"]["otlp-http"]
    assert exporter == {
        "endpoint": f"{URL}/v1/logs",
        "protocol": "json",
        "headers": {"authorization": f"Bearer {KEY}"},
    }
    assert mode_of(place("codex", at)) == 0o600
    with pytest.raises(BadConfig, match="claude-code and codex can"):
        write("aider", at, telemetry=True)


def test_settings_lie_where_variables_say(at, tmp_path):
    homes = ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME", "MSWEA_GLOBAL_CONFIG_DIR")
    there = Surroundings(env={name: str(tmp_path / name) for name in homes}, directory=tmp_path)
    assert place("claude-code", there) == tmp_path / "CLAUDE_CONFIG_DIR" / "settings.json"
    assert place("codex", there) == tmp_path / "CODEX_HOME" / "config.toml"
    assert place("opencode", there) == tmp_path / "XDG_CONFIG_HOME" / "opencode" / "opencode.json"
    assert place("mini-swe-agent", there) == tmp_path / "MSWEA_GLOBAL_CONFIG_DIR" / ".env"
    mac = Surroundings(env={"HOME": "/Users/a"}, directory=tmp_path, mac=True)
    assert "Application Support" in str(place("mini-swe-agent", mac))
    assert str(place("opencode", mac)) == "/Users/a/.config/opencode/opencode.json"


# ------------------------------------------------------------ what was there


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("key", [None, KEY])
def test_an_absent_file_is_absent_again_after_undo(at, name, key):
    before = everything(at)
    write(name, at, key=key)
    assert place(name, at).exists()
    take_back(name, at)
    assert everything(at) == before, "no directory of ours is left either"


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("mode", [0o644, 0o600, 0o640])
def test_undo_restores_bytes_and_permissions(at, name, mode):
    put(name, at, BEFORE[name], mode)
    before = everything(at)
    write(name, at, key=KEY)
    write(name, at, key=KEY, model="n")
    assert everything(at) != before
    take_back(name, at)
    assert everything(at) == before


@pytest.mark.parametrize("name", WRITTEN)
def test_other_settings_are_kept(at, name):
    path = put(name, at, BEFORE[name])
    write(name, at)
    after = path.read_bytes().decode()
    if path.suffix != ".json":
        assert BEFORE[name] in after, "byte for byte"
        return
    was, now = json.loads(BEFORE[name]), json.loads(after)

    def kept(old, new):
        if isinstance(old, dict):
            return all(kept(value, new[name]) for name, value in old.items())
        return all(each in new for each in old) if isinstance(old, list) else old == new

    assert kept(was, now)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("fresh", [True, False])
def test_the_second_time_changes_nothing(at, name, fresh):
    if not fresh:
        put(name, at, BEFORE[name])
    write(name, at, key=KEY)
    once = everything(at)
    assert "nothing to change" in write(name, at, key=KEY)
    assert everything(at) == once


@pytest.mark.parametrize("name", WRITTEN)
def test_another_model_starts_from_what_was_there_before_us(at, name):
    put(name, at, BEFORE[name])
    write(name, at, model="n")
    expected = place(name, at).read_bytes()
    take_back(name, at)
    write(name, at, model="m", session="one")
    write(name, at, model="n")
    assert place(name, at).read_bytes() == expected


@pytest.mark.parametrize("name", WRITTEN)
def test_undo_is_refused_once_somebody_has_changed_the_file(at, name):
    path = put(name, at, BEFORE[name])
    write(name, at)
    path.write_text(path.read_text() + "\n")
    before = everything(at)
    with pytest.raises(Conflict, match=r"was changed since.*before-ostinato\.json.*delete that file"):
        take_back(name, at)
    assert everything(at) == before
    path.unlink()
    with pytest.raises(Conflict):
        take_back(name, at)


def test_a_file_that_others_changed_can_be_connected_anew_but_not_undone(at):
    path = put("codex", at, BEFORE["codex"])
    write("codex", at)
    with path.open("a") as file:
        file.write('\n[projects."/new"]\ntrust_level = "trusted"\n')
    assert "nothing to change" in write("codex", at)
    assert "others have changed the file" in write("codex", at, model="n")
    values = tomllib.loads(path.read_text())
    assert values["model"] == "n"
    assert set(values["projects"]) == {"/src", "/new"}
    with pytest.raises(Conflict):
        take_back("codex", at)
    assert json.loads(settings_files.look(path).kept.read_text())["before"] == BEFORE["codex"]


@pytest.mark.parametrize("name", WRITTEN)
def test_undo_without_a_change_of_ours_says_so(at, name):
    put(name, at, BEFORE[name])
    with pytest.raises(NotFound, match="nothing to undo"):
        take_back(name, at)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_broken_file_is_refused_in_one_line_and_left(at, name):
    path = put(name, at, BROKEN[name])
    before = everything(at)
    with pytest.raises(BadConfig, match=r"mend|take") as refused:
        write(name, at)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value).strip()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match="no UTF-8"):
        write(name, at)
    path.write_text(BROKEN[name])
    assert everything(at) == before


def test_settings_that_clash_with_ours_are_refused(at):
    put("aider", at, 'auto-commits: false\n"model" : gpt\n')
    with pytest.raises(BadConfig, match="line 2 sets model already; take that line out"):
        write("aider", at)
    path = put("codex", at, '[model_providers.ostinato]\nname = "mine"\n')
    with pytest.raises(BadConfig, match="provider named ostinato of its own"):
        write("codex", at)
    path.write_text("[otel]\n")
    with pytest.raises(BadConfig, match="leave --telemetry out"):
        write("codex", at, telemetry=True)
    path.write_text("# >>> ostinato connect: model >>>\n")
    with pytest.raises(BadConfig, match="without its other end"):
        write("codex", at)


# ------------------------------------------------------------ files


@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_stays_one_and_its_file_is_written(at, tmp_path, name):
    real = tmp_path / "dotfiles"
    real.write_text(BEFORE[name])
    path = place(name, at)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(real)
    assert f"leads to {real}" in write(name, at)
    assert path.is_symlink()
    assert real.read_text() != BEFORE[name]
    take_back(name, at)
    assert path.is_symlink()
    assert real.read_bytes() == BEFORE[name].encode()


def test_a_projects_link_leads_nowhere_outside(at, tmp_path):
    path = place("opencode", at, "project")
    path.symlink_to(tmp_path / "home" / "victim.json")
    with pytest.raises(BadConfig, match=r"out of .*remove the link"):
        write("opencode", at, scope="project")
    assert not (tmp_path / "home" / "victim.json").exists()
    path.unlink()
    write("opencode", at, scope="project")
    assert path.exists()
    assert not place("opencode", at).exists()
    take_back("opencode", at, scope="project")
    assert list(at.directory.iterdir()) == []


def test_a_scope_that_an_agent_has_not_is_refused(at):
    for name in ("codex", "mini-swe-agent"):
        with pytest.raises(BadConfig, match="for a user only"):
            write(name, at, scope="project")


def test_a_file_with_a_key_is_its_owners_only(at):
    path = put("claude-code", at, "{}", 0o666)
    write("claude-code", at)
    assert mode_of(path) == 0o666
    write("claude-code", at, key=KEY)
    assert mode_of(path) == 0o600
    assert mode_of(settings_files.look(path).kept) == 0o600
    path.chmod(0o644)
    write("claude-code", at, key=KEY)
    assert mode_of(path) == 0o600, "even if nothing else has to change"


def test_no_home_or_an_unusable_one_is_one_line(at, tmp_path):
    for env in ({}, {"HOME": ""}, {"HOME": "home"}):
        with pytest.raises(BadConfig, match="HOME is not set"):
            write("aider", Surroundings(env=env, directory=tmp_path))
    with pytest.raises(BadConfig, match="CODEX_HOME is 'x'; set it to an absolute path"):
        write("codex", Surroundings(env={"CODEX_HOME": "x"}, directory=tmp_path))
    place("aider", at).mkdir()
    with pytest.raises(BadConfig, match="no plain file"):
        write("aider", at)


def test_a_loop_of_links_is_one_line(at):
    path = place("aider", at)
    path.symlink_to(path)
    with pytest.raises(BadConfig, match="cannot be read"):
        write("aider", at)


def test_a_mode_is_narrowed_by_the_umask_unless_it_is_exact(tmp_path):
    before = os.umask(0o077)
    try:
        settings_files._put(tmp_path / "narrow", "x", 0o644, exact=False)
        settings_files._put(tmp_path / "exact", "x", 0o644, exact=True)
    finally:
        os.umask(before)
    assert (mode_of(tmp_path / "narrow"), mode_of(tmp_path / "exact")) == (0o600, 0o644)


def test_a_change_in_the_meantime_is_not_overwritten(at):
    path = put("aider", at, "a: 1\n")
    found = settings_files.look(path)
    path.write_text("a: 2\n")
    with pytest.raises(Conflict, match="nothing was written"):
        settings_files.write(found, "a: 3\n", secret=False)
    assert path.read_text() == "a: 2\n"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_disk_that_refuses_leaves_what_was_there(at, monkeypatch, failing):
    path = put("aider", at, "a: 1\n")
    before, syncs, real = everything(at), [], os.fsync

    def fsync(fd):
        if stat.S_ISREG(os.fstat(fd).st_mode):
            syncs.append(fd)
            if len(syncs) == failing:
                raise OSError(28, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=f"{path} cannot be written .No space left"):
        write("aider", at)
    assert everything(at) == before


def test_whoever_is_killed_before_the_file_is_written_can_undo_and_go_on(at, monkeypatch):
    path = put("aider", at, "a: 1\n")
    before, put_down = everything(at), settings_files._put

    class Killed(BaseException):
        pass

    def killed(where, *rest, **more):
        if where == path:
            raise Killed
        put_down(where, *rest, **more)

    for earlier in (False, True):
        if earlier:
            write("aider", at, model="first")
        kept = path.read_text()
        monkeypatch.setattr(settings_files, "_put", killed)
        with pytest.raises(Killed):
            write("aider", at, model="second")
        monkeypatch.setattr(settings_files, "_put", put_down)
        assert path.read_text() == kept
        take_back("aider", at)
        assert everything(at) == before


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "",
        "[]",
        '{"wrote": [1], "before": null, "mode": null, "made": 0}',
        '{"wrote": [], "before": 1, "mode": null, "made": 0}',
        '{"wrote": [], "before": null, "mode": true, "made": 0}',
        '{"wrote": [], "before": null, "mode": null, "made": 0.5}',
        '{"wrote": [], "before": null, "mode": null, "made": 0, "more": 1}',
        '{"wrote": [], "before": "\\ud800", "mode": null, "made": 0}',
        "[" * 100_000,
    ],
)
def test_a_damaged_backup_is_named(at, text):
    path = put("aider", at, "a: 1\n")
    settings_files.look(path).kept.write_text(text)
    with pytest.raises(BadConfig, match="is damaged; set it aside"):
        take_back("aider", at)


def test_the_form_of_a_backup_is_pinned(at):
    """A file that an earlier version wrote can be undone."""
    path = put("aider", at, "b: ü\n")
    wrote = "6b12920795fafb906ddfafe1a1a4b8a5f619723c6a3038a866f2a5a3dff69021"
    text = f'{{\n  "wrote": [\n    "{wrote}"\n  ],\n  "before": "a: ü\\n",\n  "mode": 384,\n  "made": 1\n}}\n'
    settings_files.look(path).kept.write_text(text)
    assert settings_files.look(path).backup.to_json() == text
    take_back("aider", at)
    assert path.read_text() == "a: ü\n"
    assert mode_of(path) == 0o600


# ------------------------------------------------------------ forms


def test_json_keeps_its_indent_its_letters_and_its_line_ends():
    assert merged_json('{\r\n\t"a": "ü"\r\n}', {"b": 1}) == '{\r\n\t"a": "ü",\r\n\t"b": 1\r\n}\r\n'
    assert merged_json('{"a":1}', {"a": 1}) == '{"a":1}', "nothing to change: not a byte"
    assert merged_json("", {"a": 1}) == merged_json(None, {"a": 1}) == '{\n  "a": 1\n}\n'


@pytest.mark.parametrize(
    "text", ["[]", "1", "{", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": {}, } ', "[" * 9000, '{"b": [], "a": 1}']
)
def test_json_that_cannot_be_merged_is_refused(text):
    with pytest.raises(BadConfig):
        merged_json(text, {"a": {"x": 1}})


def test_our_entry_of_a_list_is_there_once_and_first():
    text = merged_json('{"l": [{"name": "Q"}, {"name": "Ostinato", "id": 1}]}', {"l": [{"name": "Ostinato", "id": 2}]})
    assert json.loads(text)["l"] == [{"name": "Ostinato", "id": 2}, {"name": "Q"}]


def test_a_block_is_replaced_where_it_stands():
    text = with_block("a = 1", "more", ["b = 2"]) + "c = 3\n"
    new = with_block(text, "more", ["b = 4"])
    assert new == text.replace("b = 2", "b = 4")
    assert with_block(new, "more", []) == "a = 1\nc = 3\n"
    assert with_block("a = 1\n", "top", ["z = 0"], first=True).endswith("<<<\na = 1\n")


def test_only_plain_lines_of_yaml_and_of_variables_are_taken():
    assert yaml_keys("---\na: 1\n# c\n'b-c': |\n  text: x\n\n") == {"a": 2, "b-c": 4}
    for text in ("a: 1\n---\nb: 2\n", "{a: 1}", "a\n", "a:1\n", "...\n"):
        with pytest.raises(BadConfig, match=r"^line \d"):
            yaml_keys(text)
    check_env("A=1\n\n# c\nexport B='x y' # c\nC=\"a\\\"b\"\nD=\nE\n F = it's\n")
    for text in ("A='open\n", 'A="open\n', "A B\n", "=1\n"):
        with pytest.raises(BadConfig, match=r"^line 1"):
            check_env(text)


# ------------------------------------------------------------ secrets


@pytest.mark.parametrize("name", list(AGENTS))
def test_no_key_is_ever_shown(at, name):
    if name in BEFORE:
        put(name, at, BEFORE[name])
    said = write(name, at, key=KEY) + write(name, at, key=KEY, model="n", telemetry=AGENTS[name].telemetry)
    if name in BEFORE:
        said += take_back(name, at)
    assert KEY not in said
    assert "sk-of-another" not in said


@pytest.mark.parametrize(
    "line",
    [
        '"ANTHROPIC_API_KEY": "SECRET12345",',
        "openai-api-key: SECRET12345",
        "export TOKEN=SECRET12345",
        "DB_PASSWORD = 'SECRET12345 SECRET12345'",
        "\"Bash(curl -H 'Authorization: Bearer SECRET12345' x)\"",
        '"X": "Bearer SECRET12345"',
        "url: https://ann:SECRET12345@example.org/",
        "  - anthropic=sk-SECRET12345",
        '"CUSTOM_HEADERS": "x-a: SECRET12345\\nx-b: SECRET12345"',
        "x: SECRET12345abcdefghijklmnop",
        "my.own-api_key_of-this.tool = SECRET12345",
        '"password": "SECRET12345 SECRET12345 and no end',
        "password: 'SECRET12345 SECRET12345 and no end",
        "redis://:SECRET12345@example.org/",
        "url: https://ann:b:SECRET12345@example.org/",
    ],
)
def test_what_looks_like_a_secret_is_hidden(line):
    assert "SECRET" not in hidden(line, None)


@pytest.mark.parametrize(
    "line",
    [
        'env_key = "OSTINATO_API_KEY"',
        '"max_tokens": 4096,',
        '"apiKey": "ostinato"',
        "skeleton: claude-sonnet-4-5-20250929",
        '"allow": ["Bash(make *)"]',
    ],
)
def test_what_is_none_is_shown(line):
    assert hidden(line, None) == line


@pytest.mark.parametrize(
    "piece",
    [
        "key",
        "a",
        "a1",
        "key-",
        "key ",
        "key:",
        'key:"',
        "key='",
        'key:\\"',
        "auth: bearer ",
        "://",
        "://a:",
        ":",
        "sk-",
        "\\",
    ],
)
@pytest.mark.parametrize("start", ["", "key", 'key="', "x://"])
def test_masking_takes_time_in_proportion_to_the_line(start, piece):
    def line(length):
        return start + piece * (length // len(piece))

    assert grows_with_its_input(lambda text: hidden(text, None), line(5_000), line(40_000))


def test_a_key_is_known_by_its_end():
    assert masked(KEY) == "sk-…WXYZ"
    assert masked("0123456789abcd") == "…abcd"
    assert masked("short") == "…"


def test_a_diff_is_no_command_to_a_terminal():
    assert all(line.isprintable() for line in diff("f", "a\x1b[2J\n", "b\u202e\n", None))


# ------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "ftp://x"}, "http://HOST:PORT"),
        ({"url": "http://"}, "http://HOST:PORT"),
        ({"url": "http://h:99999"}, "http://HOST:PORT"),
        ({"url": "http://ann:secret@h"}, "takes no user"),
        ({"url": "http://h/?q=1"}, "takes no user"),
        ({"url": "http://h/$(x)"}, "http://HOST:PORT"),
        ({"session": "../x"}, "--session"),
        ({"session": ""}, "--session"),
        ({"key": "a b"}, "characters that no key has"),
        ({"model": 'm"\n'}, "--model"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(at, options, words):
    with pytest.raises(BadConfig, match=re.escape(words)) as refused:
        write("claude-code", at, **options)
    assert "secret" not in str(refused.value)
    assert list(at.directory.parent.rglob("*.*")) == []


@pytest.mark.parametrize("url", [f"{URL}/", f"{URL}/v1", f"{URL}/v1/"])
def test_an_address_may_end_as_people_write_it(at, url):
    write("claude-code", at, url=url)
    assert json.loads(place("claude-code", at).read_text())["env"]["ANTHROPIC_BASE_URL"] == URL


def test_without_a_url_it_is_the_environments_or_this_machines(at, tmp_path):
    write("aider", at, url=None)
    assert "http://127.0.0.1:8321/v1" in place("aider", at).read_text()
    take_back("aider", at)
    named = Surroundings(env={**at.env, "OSTINATO_URL": "https://gateway.example.org/v1"}, directory=at.directory)
    write("aider", named, url=None)
    assert "https://gateway.example.org/v1" in place("aider", at).read_text()
    write("aider", named)
    assert f"{URL}/v1" in place("aider", at).read_text(), "an option goes first"
    wrong = Surroundings(env={**at.env, "OSTINATO_URL": "http://ann:secret@h"}, directory=at.directory)
    with pytest.raises(BadConfig, match=r"^OSTINATO_URL takes no user"):
        write("aider", wrong, url=None)


def test_nothing_is_written_where_nobody_can_agree(at, monkeypatch):
    before = everything(at)
    monkeypatch.setattr("sys.stdin", StringIO("y\n"))
    with pytest.raises(BadConfig, match="add --yes"):
        write("aider", at, yes=False)
    assert everything(at) == before


@pytest.mark.parametrize(("answer", "written"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_a_person_is_asked(at, monkeypatch, answer, written):
    terminal = StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    said = write("aider", at, yes=False)
    assert place("aider", at).exists() is written
    assert ("nothing was written" in said) is not written


# ------------------------------------------------------------ the gateway asked


class Gateway(BaseHTTPRequestHandler):
    """Answers as a gateway does; the server's `asked` is what it was sent, its `status`, `body` and `headers` can be replaced."""

    def do_GET(self):
        length = int(self.headers.get("content-length") or 0)
        asked = json.loads(self.rfile.read(length)) if length else None
        self.server.asked.append((self.path, self.headers.get("Authorization"), asked))
        if self.path.endswith("/v1/models"):
            status, body, headers = 200, {"data": [{"id": "first"}, {"id": "auto"}]}, {}
        else:
            status, body, headers = self.server.status, self.server.body, self.server.headers
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"content-length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def gateway():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.asked, server.status = [], 200
    server.body = {"usage": {"prompt_tokens": 21, "completion_tokens": 8}}
    server.headers = {
        "request-id": "chatcmpl-1",
        "x-ostinato-turn": "chatcmpl-1:0",
        "x-ostinato-policy": "3",
        "x-ostinato-weights": "ab" * 32,
        "x-ostinato-arm": "live",
    }
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(gateway, at, dialect="chat", **options):
    terminal = Terminal(StringIO())
    check_capture(dialect, Options(url=gateway.url, **options), at, terminal)
    return terminal.out.getvalue()


def test_the_model_is_the_gateways_first(gateway, at):
    write("aider", at, url=gateway.url, model=None, key=KEY)
    assert "openai/first" in place("aider", at).read_text()
    assert gateway.asked == [("/v1/models", f"Bearer {KEY}", None)]


@pytest.mark.parametrize(
    ("dialect", "path", "usage"),
    [
        ("chat", "/v1/chat/completions", {"prompt_tokens": 21, "completion_tokens": 8}),
        ("messages", "/v1/messages", {"input_tokens": 21, "output_tokens": 8}),
        ("responses", "/v1/responses", {"input_tokens": 21, "output_tokens": 8}),
    ],
)
def test_a_call_in_each_dialect_shows_what_was_captured(gateway, at, dialect, path, usage):
    gateway.body = {"usage": usage}
    said = ask(gateway, at, dialect, session="s1", key=KEY)
    assert "chatcmpl-1:0  (request chatcmpl-1)" in said
    assert "v3 abababab" in said
    assert "21 of the prompt and 8 of the answer" in said
    assert [each[0] for each in gateway.asked] == ["/s/s1/v1/models", f"/s/s1{path}"]
    assert gateway.asked[-1][2]["model"] == "first"
    assert KEY not in said
    assert everything(at).keys() == {path.relative_to(at.directory.parent) for path in (at.home, at.directory)}


def test_an_answer_that_no_weights_of_ours_made_says_so(gateway, at):
    del gateway.headers["x-ostinato-policy"]
    gateway.body = {}
    said = ask(gateway, at)
    assert "none of this run's" in said
    assert "not told" in said


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (400, BadConfig, "400: no such thing …WXYZ; look at --model"),
        (401, Unauthorized, "OSTINATO_API_KEY"),
        (404, BadConfig, "older version"),
        (503, Unavailable, "try again"),
        (500, Unavailable, "output says why"),
        (302, BadConfig, "look at --url"),
    ],
)
def test_a_refusal_comes_with_a_way_out(gateway, at, status, error, words):
    gateway.status, gateway.body = status, {"error": {"message": f"no such\nthing {KEY}"}}
    gateway.headers = {"location": "http://127.0.0.1:9/"} if status == 302 else {}
    with pytest.raises(error) as refused:
        ask(gateway, at, key=KEY)
    assert words.replace("…", "sk-…") in str(refused.value)
    assert KEY not in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("piece", ["key", "a", "key: 'a ", f"{KEY} ", "\x1b "])
def test_of_a_long_refusal_only_the_start_is_searched(gateway, at, monkeypatch, piece):
    searched = []
    monkeypatch.setattr(command, "hidden", lambda text, key: searched.append(text) or hidden(text, key))
    gateway.status, gateway.body = 400, {"error": {"message": piece * (100_000 // len(piece))}}
    with pytest.raises(BadConfig, match="answered 400: ") as refused:
        ask(gateway, at, key=KEY)
    assert [len(text) <= 1_000 for text in searched] == [True]
    assert len(str(refused.value)) < 500
    assert KEY[:12] not in str(refused.value)


@pytest.mark.parametrize(
    "message",
    [
        '"private_key": "' + "SECRET/ " * 300 + '" is refused',
        "token=" + "SECRET/" * 140 + " sk-SECRET" + "SECRET" * 20,
        "https://ann:" + "SECRET/" * 200 + "@example.org",
        f"no such thing {'x' * 975} {KEY} SECRET{'SECRET' * 20}",
    ],
)
def test_where_a_refusal_is_cut_no_secret_shows(gateway, at, message):
    gateway.status, gateway.body = 400, {"error": {"message": message}}
    with pytest.raises(BadConfig, match="answered 400: ") as refused:
        ask(gateway, at, key=KEY)
    assert "SECRET/S" not in str(refused.value)
    assert "sk-S" not in str(refused.value)
    assert KEY[:8] not in str(refused.value)


def test_a_status_line_that_is_none_is_masked_and_cut(at):
    with server_of(b"key: SECRET12345 " * 3_000 + b"\r\n\r\n") as url, pytest.raises(Unavailable) as refused:
        check_capture("chat", Options(url=url), at, Terminal(StringIO()))
    assert "cannot be reached (BadStatusLine: " in str(refused.value)
    assert "SECRET" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_version_of_too_many_digits_is_none(gateway, at):
    gateway.headers["x-ostinato-policy"] = "9" * 18
    assert f"v{'9' * 18} " in ask(gateway, at)
    for version in ("9" * 19, "9" * 5_000, "-1", "1.0"):
        gateway.headers["x-ostinato-policy"] = version
        assert "none of this run's" in ask(gateway, at)


def test_an_answer_of_another_server_is_not_taken_for_a_capture(gateway, at):
    gateway.headers = {}
    with pytest.raises(BadConfig, match="captured no turn"):
        ask(gateway, at)
    gateway.body = []
    with pytest.raises(BadConfig, match="something else than a JSON object"):
        ask(gateway, at)


def test_nobody_there_is_one_line(gateway, at):
    gateway.url = "http://127.0.0.1:9"
    with pytest.raises(Unavailable, match="cannot be reached"):
        ask(gateway, at)


def test_an_answer_that_is_late_long_or_cut_off_is_one_line(gateway, at, monkeypatch):
    gateway.headers["content-length"] = "99999"
    with pytest.raises(Unavailable, match=r"cannot be reached \(IncompleteRead"):
        ask(gateway, at)
    del gateway.headers["content-length"]
    gateway.body = b"{" + b" " * 2**20 + b"}"
    with pytest.raises(Unavailable, match="more than 1048576 bytes"):
        ask(gateway, at)
    waiting = threading.Event()
    monkeypatch.setattr(Gateway, "do_GET", lambda self: waiting.wait(60))
    monkeypatch.setattr(command, "_LOOK_S", 0.05)
    with pytest.raises(Unavailable, match=r"no answer within 0\.05 s"):
        ask(gateway, at)
    waiting.set()


@contextmanager
def server_of(start, piece=b"", left=None):
    """A server of one call that answers with `start`, then with a piece every 10 ms; sets `left` once its client is gone."""

    def serve():
        talk, _ = listening.accept()
        with talk:
            talk.recv(65_536)
            try:
                talk.sendall(start)
                for _ in range(3_000 if piece else 0):  # half a minute
                    time.sleep(0.01)
                    talk.sendall(piece)
            except OSError:
                left.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(60)


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\nx-a: ", b"a"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x-a: b\r\n"),
    ],
    ids=["status-line", "header", "100-continue", "body", "body-to-the-end", "chunk-size", "trailers"],
)
def test_a_server_that_sends_slowly_is_left_in_time(at, monkeypatch, start, piece):
    monkeypatch.setattr(command, "_LOOK_S", 0.3)
    left = threading.Event()
    with server_of(start, piece, left) as url, pytest.raises(Unavailable, match=r"no answer within 0\.3 s"):
        check_capture("chat", Options(url=url), at, Terminal(StringIO()))
    assert left.is_set(), "the connection was shut"


class Counted(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return str.__eq__(self, other)


def test_a_name_that_is_there_twice_is_found_in_one_pass(monkeypatch):
    monkeypatch.setattr(Counted, "compared", 0)
    names = [f"name-{number}" for number in range(5_000)]
    with pytest.raises(ValueError, match="'name-4999' is there twice"):
        _once([(Counted(name), None) for name in [*names, names[-1]]])
    assert Counted.compared < 5_000
    assert _once([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}


# ------------------------------------------------------------ the program


PACKAGE = Path(__file__).parents[3] / "client" / "src"


def ran(at, *words, **env):
    """The command as a process that finds the client package and the standard library, and nothing else."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "ostinato_client.connect", *words],
        cwd=at.directory,
        env={**at.env, "PYTHONPATH": str(PACKAGE), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WHOLE_PROGRAM_S,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


def test_it_runs_on_the_standard_library_alone(gateway, at):
    words = ["codex", "--url", gateway.url, "--session", "s1", "--telemetry"]
    before = everything(at)
    refused = ran(at, *words, OSTINATO_API_KEY=KEY)
    assert (refused.returncode, everything(at)) == (2, before)
    assert refused.stderr.endswith("there is no terminal to ask at; add --yes to agree\n")
    done = ran(at, *words, "--yes", OSTINATO_API_KEY=KEY, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "`python -m ostinato_client.connect codex --undo` takes it back" in done.stdout
    assert r"export OSTINATO_API_KEY=sk-\u2026WXYZ" in done.stdout
    assert tomllib.loads(place("codex", at).read_text())["model"] == "first"
    tested = ran(at, "codex", "--url", gateway.url, "--test", OSTINATO_API_KEY=KEY)
    assert tested.returncode == 0
    assert "speaks responses, model first" in tested.stdout
    undone = ran(at, "codex", "--undo", "--yes")
    assert (undone.returncode, everything(at)) == (0, before)
    assert KEY not in "".join(each.stdout + each.stderr for each in (refused, done, tested, undone))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "name an agent (claude-code, codex, opencode, qwen-code, mini-swe-agent, aider, cursor), or give --test"),
        (["aider", "--test", "--undo"], "--test and --undo: give one of them"),
        (["aider", "--dialect", "chat"], "--dialect is of --test"),
        (["vim"], "invalid choice: 'vim'"),
        (["aider", "--mod", "m"], "unrecognized arguments: --mod"),
        (["aider", "--undo"], "nothing to undo"),
    ],
)
def test_a_wrong_command_ends_with_two_and_says_why(at, monkeypatch, capsys, words, told):
    monkeypatch.setenv("HOME", at.env["HOME"])
    monkeypatch.chdir(at.directory)
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert told in capsys.readouterr().err


def test_help_names_every_option_and_agent(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert said.startswith("usage: ostinato-connect ")
    for word in (*AGENTS, "OSTINATO_API_KEY", "OSTINATO_URL", "--undo", "--test", "--session", "--telemetry"):
        assert word in said


def test_a_terminal_gets_colours_unless_it_says_no():
    for env, colored in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        out = StringIO()
        out.isatty = lambda: True
        Terminal(out, env).show(["+new", " same"])
        assert out.getvalue() == ("\x1b[32m+new\x1b[0m\n same\n" if colored else "+new\n same\n")
    out = StringIO()
    Terminal(out, {}).show(["+new"])
    assert out.getvalue() == "+new\n"


def test_where_permissions_or_toml_are_not_known_it_says_so(at, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomllib", None)
    with pytest.raises(BadConfig, match=r"config\.toml: it is TOML, which Python reads from 3\.11 on"):
        write("codex", at)
    write("aider", at)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(BadConfig, match="WSL"):
        command.surroundings()
