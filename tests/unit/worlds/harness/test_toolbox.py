"""What tools say: cut texts, refused edits, wrong calls."""

import json
import time

import pytest

from ostinato.core.conversation import ToolCall
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.worlds.harness.agent import directory_digest
from ostinato.worlds.harness.harnesses import open_harness
from ostinato.worlds.harness.toolbox import checked, cut_middle, replaced_once

CALC = "def add(a, b):\n    return a - b\n\ndef sub(a, b):\n    return a - b\n"


def test_a_short_text_is_left_alone():
    assert cut_middle("x" * 200, 200) == "x" * 200


def test_a_long_text_keeps_both_ends_and_says_what_is_missing():
    cut = cut_middle("a" * 101 + "\n" * 7 + "b" * 100, 201)
    assert cut.startswith("a" * 101)
    assert cut.endswith("b" * 100)
    assert "7 characters (7 line breaks) left out" in cut


def test_an_edit_replaces_what_occurs_once():
    assert replaced_once(CALC, "b):\n    return a - b\n\n", "b):\n    return a + b\n\n", "c") == CALC.replace(
        "-", "+", 1
    )


@pytest.mark.parametrize(
    ("text", "old", "said"),
    [
        (CALC, "return a * b", "does not occur in calc.py. Read the file"),
        (CALC, "return a - b", "occurs 2 times in calc.py, at lines 2, 5. Add lines"),
        (CALC, "def sub(a, b):\n\treturn a - b", "Without regard to indentation it is at line 4."),
        ("aaa", "aa", "occurs 2 times"),
        ("a\n" * 20, "a", "occurs 20 times in calc.py, at lines 1, 2, 3, 4, 5, 6, 7, 8, .... Add lines"),
        ("a\nb\n", " b", "Without regard to indentation it is at line 2."),
        ("ab\n", " b", "does not occur in calc.py. Read the file"),
        (CALC, "", "old is empty"),
        (CALC, "x", "does not occur"),
        (CALC, "new", "are the same"),
    ],
)
def test_a_refused_edit_says_what_to_do(text, old, said):
    with pytest.raises(BadRequest, match=r".*") as caught:
        replaced_once(text, old, "new", "calc.py")
    assert said in str(caught.value)


@pytest.mark.parametrize(("text", "old"), [("a" * (1 << 20), "a"), ("a\n" * (1 << 19), " a\n" * 20_000 + "b")])
def test_an_edit_is_refused_in_time_in_proportion_to_the_file(text, old):
    began = time.monotonic()
    with pytest.raises(BadRequest, match="occur"):
        replaced_once(text, old, "new", "calc.py")
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("look", "{}", "there is no tool 'look'; there are read, write, edit, bash, submit"),
        ("read", "{", "not a JSON object"),
        ("read", "[]", "not a JSON object"),
        ("read", "{}", "path is missing; read takes path, first, last"),
        ("read", '{"path": "a", "line": 1}', "there is no argument 'line'"),
        ("read", '{"path": "a", "first": true}', "first must be of type integer"),
        ("bash", '{"command": ["ls"]}', "command must be of type string"),
        ("submit", '{"why": "done"}', "submit takes no arguments"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(name, arguments, said):
    with pytest.raises(BadRequest) as caught:
        checked(ToolCall(id="c", name=name, arguments=arguments))
    assert said in str(caught.value)


def test_a_right_call_passes():
    call = ToolCall(id="c", name="read", arguments=json.dumps({"path": "a", "last": 3}))
    assert checked(call) == {"path": "a", "last": 3}


def test_what_the_model_sees_decides_the_hash():
    hashes = {
        open_harness("single").hash,
        open_harness("tools").hash,
        open_harness("tools", {"output_chars": 900}).hash,
    }
    assert len(hashes) == 3
    assert open_harness("tools", {}).hash == open_harness("tools").hash


def test_all_that_makes_an_agent_decides_its_hash(tmp_path):
    def hashed(**more):
        directory_digest.cache_clear()
        return open_harness("agent", {"command": ["mini"], "runtime": {"/opt/a": str(tmp_path)}, **more}).hash

    (tmp_path / "a.py").write_text("1")
    (tmp_path / "__pycache__").mkdir()
    first = hashed()
    changes = [{"command": ["mini", "-y"]}, {"environment": {"A": "b"}}, {"files": {"a": "b"}}, {"dialect": "messages"}]
    changes += [{"turns": 3}, {"version": "2"}, {"memory_mb": 64}, {"runtime": {"/opt/b": str(tmp_path)}}]
    assert len({first, *(hashed(**change) for change in changes)}) == len(changes) + 1
    (tmp_path / "__pycache__" / "a.pyc").write_text("compiled")
    assert hashed() == first
    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    tmp_path.rename(moved)
    assert hashed(runtime={"/opt/a": str(moved)}) == first, "the same agent elsewhere"
    (moved / "a.py").write_text("12")
    assert hashed(runtime={"/opt/a": str(moved)}) != first


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("nobody", {}, "no harness 'nobody'; there are single, repair, tools, and agent"),
        ("agent", None, "worlds.harness.agent: this agent is not configured"),
        ("agent-mine", {}, "worlds.harness.agent-mine.command"),
        ("agent", {"command": ["a"], "files": {"../x": ""}}, "worlds.harness.agent.files"),
        ("agent", {"command": ["a"], "runtime": {"/opt/a": "/no/such"}}, "'/no/such' is no directory; name the one"),
        ("tools", {"offered": ["look"]}, "no tool 'look'; there are read, "),
        ("single", {"turns": 1}, "has no settings; remove turns"),
        ("tools", {"output_chars": 1}, "worlds.harness.tools.output_chars"),
        ("tools", {"color": 1}, "worlds.harness.tools.color"),
    ],
)
def test_a_harness_that_cannot_be_opened_says_why(name, settings, said):
    with pytest.raises(BadConfig) as caught:
        open_harness(name, settings)
    assert said in str(caught.value)
