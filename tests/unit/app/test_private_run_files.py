"""Files that people write are read alike with and without a byte order mark, and JSON lines end at line feeds alone."""

import json

import pytest
from pydantic import SecretStr

from ostinato.app.supervised import read_demonstrations
from ostinato.config import read_file
from ostinato.serve.auth import client_keys
from ostinato.worlds.tasks.harbor import load_harbor
from ostinato.worlds.tasks.tasksets import load as load_tasks
from ostinato_client.connect.agent_settings import check_env, edited_json, toml_of, with_block, yaml_keys

MARK = "\ufeff"
MARKED = pytest.mark.parametrize("mark", ["", MARK], ids=["plain", "marked"])
ENDS = pytest.mark.parametrize("end", ["\u2028", "\u2029", "\u0085"])


def written(path, text, mark=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(mark + text, encoding="utf-8")
    return path


def row(**fields):
    return json.dumps(fields, ensure_ascii=False) + "\n"


@MARKED
@ENDS
def test_demonstrations(tmp_path, mark, end):
    said = [{"role": "user", "content": f"a{end}b"}, {"role": "assistant", "content": end}]
    found = read_demonstrations(written(tmp_path / "shown.jsonl", row(messages=said) * 2, mark))
    assert [[message.text for message in each.messages] for each in found] == [[f"a{end}b", end]] * 2


@MARKED
@ENDS
def test_suites(tmp_path, mark, end):
    item = {"family": "f", "messages": [{"role": "user", "content": f"a{end}b"}], "grader": "exact"}
    suite = load_tasks(written(tmp_path / "suite.jsonl", row(id="1", **item) + row(id="2", **item), mark))
    assert [each.messages[0].text for each in suite.tasks] == [f"a{end}b"] * 2


@MARKED
@ENDS
def test_tasks(tmp_path, mark, end):
    task = {
        "id": f"1{end}",
        "messages": [{"role": "user", "content": f"a{end}b"}],
        "grading": {"grader": "pattern", "data": {}},
    }
    tasks = load_tasks(written(tmp_path / "tasks.jsonl", row(family="f", **task), mark)).tasks
    assert tasks[0].messages[0].text == f"a{end}b"


@MARKED
@pytest.mark.parametrize(("name", "text"), [("a.toml", "[listen]\nport = 1\n"), ("a.json", '{"listen": {"port": 1}}')])
def test_configurations(tmp_path, mark, name, text):
    assert read_file(written(tmp_path / name, text, mark)) == {"listen": {"port": 1}}


@MARKED
def test_keys(tmp_path, mark):
    file = written(tmp_path / "keys", "acme:sk-0123456789abcdef\n", mark)
    file.chmod(0o600)
    assert client_keys((), file) == (SecretStr("acme:sk-0123456789abcdef"),)


@MARKED
def test_harbor_folders(tmp_path, mark):
    for name, text in {
        "task.toml": '[task]\nname = "x"\n[environment]\nnetwork_mode = "no-network"\n',
        "instruction.md": "Mend it.\n",
        "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nENV MODE=a\u2028b\n",
        "tests/test.sh": "exit 0\n",
    }.items():
        written(tmp_path / "x" / name, text, mark if name != "tests/test.sh" else "")
    (task,) = load_harbor(tmp_path / "x").tasks
    assert task.messages[0].text == "Mend it.\n"
    assert (task.spec.workdir, task.spec.env["MODE"]) == ("/app", "a\u2028b")


@MARKED
def test_settings_of_agents_keep_their_mark(mark):
    edited = edited_json(f'{mark}{{"a": "\u2028"}}', lambda there: {**there, "b": 1})
    assert (edited.startswith(mark), json.loads(edited.removeprefix(MARK))) == (True, {"a": "\u2028", "b": 1})
    assert edited_json(edited, lambda there: there) == edited
    first = with_block(f"{mark}a = 1\n", "more", ["b = 2"], first=True)
    assert first.startswith(f"{mark}# >>>")
    assert MARK not in first[1:]
    assert toml_of(first) == {"a": 1, "b": 2}
    assert yaml_keys(f"{mark}a: 1\nb: 2\n") == {"a": 1, "b": 2}
    check_env(f"{mark}A=1\u2028\n")
