"""A suite's items, the flat form of held-out tasks: what is taken, what is refused with line and field, and what the hash covers."""

import json
from pathlib import Path

import pytest

from ostinato.core.conversation import Role
from ostinato.core.errors import BadConfig
from ostinato.worlds.tasks import tasksets
from ostinato.worlds.tasks.task import Split
from ostinato.worlds.tasks.tasksets import load, save, taskset_of

GOOD = {
    "id": "add-1",
    "family": "arithmetic",
    "messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "def add(a, b):\n"}],
    "continue_final_message": True,
    "sampling": {"max_tokens": 96, "temperature": 0.8, "top_p": 0.95, "stop": ["\ndef"]},
    "grader": "python_tests",
    "head": "def add(a, b):",
    "tests": "assert add(1, 2) == 3",
}


def parse(name, text):
    return tasksets.parse(name, text, Path())


def line(**changes):
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value is not ...})


def test_an_item_is_a_held_out_task_of_one_answer_with_its_graders_data():
    user_last = {"messages": GOOD["messages"][:1], "continue_final_message": ..., "sampling": ...}
    suite = parse("held-out", line() + "\n\n" + line(id="add-2", **user_last) + "\n")
    first, second = suite.tasks
    assert first.messages[1].role is Role.ASSISTANT
    assert (first.tokens, first.temperature, first.top_p, first.stop) == (96, 0.8, 0.95, ("\ndef",))
    assert (first.harness, first.split, first.grading.grader) == ("single", Split.HELD_OUT, "python_tests")
    assert first.grading.data == {"head": GOOD["head"], "tests": GOOD["tests"]}
    assert (first.timeout_s, first.grading.timeout_s) == (120.0, 4.0)
    assert (second.tokens, second.temperature, second.top_p, second.stop) == (256, 1.0, 1.0, ())
    assert (suite.name, len(suite.hash)) == ("held-out", 64)
    slow = tasksets.parse("s", line(), Path(), answer_s=7.0, grading_s=9.0).tasks[0]
    assert (slow.timeout_s, slow.grading.timeout_s) == (7.0, 9.0)


def test_both_forms_stand_in_one_file_and_a_saved_one_is_the_same_suite(tmp_path):
    whole = {"id": "t", "family": "f", "messages": [{"role": "user", "content": "x"}], "grading": {"grader": "pattern"}}
    found = parse("mixed", line() + "\n" + json.dumps(whole))
    assert [task.split for task in found.tasks] == [Split.HELD_OUT, Split.TRAIN]
    save(found, tmp_path / "mixed.jsonl")
    assert '"grading"' in (tmp_path / "mixed.jsonl").read_text().splitlines()[0]
    assert load(tmp_path / "mixed.jsonl") == found


def test_the_hash_of_a_taskset_is_that_of_earlier_versions_unless_a_later_field_is_set():
    whole = {"id": "t", "family": "f", "messages": [{"role": "user", "content": "x"}], "grading": {"grader": "pattern"}}
    plain = parse("s", json.dumps(whole))
    assert plain.hash == "83193cba8764c2f2aa6e80a69842f610034421ec31a74451746f84aee24a023c"
    others = [parse("s", json.dumps(whole | more)).hash for more in ({"temperature": 0.5}, {"top_p": 0.9})]
    assert len({plain.hash, *others}) == 3
    assert taskset_of("s", plain.tasks).hash == plain.hash


def test_hash_sees_content_and_not_spelling():
    suite = parse("a", line())
    assert (
        parse("b", json.dumps(dict(reversed(GOOD.items())), indent=None, separators=(" ,", " : "))).hash == suite.hash
    )
    changes = (
        {"id": "x"},
        {"tests": "assert True"},
        {"sampling": GOOD["sampling"] | {"temperature": 0.9}},
        {"sampling": GOOD["sampling"] | {"top_p": 0.9}},
        {"head": "é"},
    )
    hashes = {parse("a", line(**change)).hash for change in changes} | {suite.hash}
    assert len(hashes) == 1 + len(changes)
    swapped = parse("a", line(id="x") + "\n" + line()).hash
    assert swapped != parse("a", line() + "\n" + line(id="x")).hash


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a list, not a JSON object"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"id": NaN}', "line 2: not JSON"),
        (line(id=...), "line 2, field 'id'"),
        (line(id=7), "line 2, field 'id'"),
        (line(grader=...), "line 2, field 'grading' is missing"),
        (line(messages=[]), "line 2, field 'messages'"),
        (line(messages=[{"role": "root", "content": ""}]), r"line 2, field 'messages\.0\.role'"),
        (line(messages=[{"role": "user", "content": "", "name": "x"}]), r"line 2, field 'messages\.0\.name'"),
        (line(sampling={"max_tokens": 0}), r"line 2, field 'sampling\.max_tokens'"),
        (line(sampling={"max_tokens": "9"}), r"line 2, field 'sampling\.max_tokens'"),
        (line(sampling={"tempreature": 1}), r"line 2, field 'sampling\.tempreature'"),
        (line(continue_final_message="yes"), "line 2, field 'continue_final_message'"),
        (line(), "'add-1' occurs twice"),
        (
            line(harness="tools", turns=8),
            "line 2.*harness, turns: belongs to a whole task, whose grader is in 'grading'",
        ),
        (line(continue_final_message=...), "line 2.*continue_final_message: .* set it to true"),
        (line(messages=GOOD["messages"][:1]), "line 2.*continue_final_message: .* or end with the user's message"),
    ],
)
def test_refusals_name_line_and_field(text, message):
    with pytest.raises(BadConfig, match=message):
        parse("s", line() + "\n" + text)


def test_files(tmp_path):
    path = tmp_path / "copilot.jsonl"
    with pytest.raises(BadConfig, match="cannot be read"):
        load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match="not UTF-8 at byte 0"):
        load(path)
    path.write_text("\n")
    with pytest.raises(BadConfig, match="0 tasks"):
        load(path)
    path.write_text(line())
    assert load(path).name == "copilot"
