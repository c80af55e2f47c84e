"""Task files: what is taken, what is refused with line and field, and what the hash sees."""

import json

import pytest

from ostinato.core.errors import BadConfig
from ostinato.evaluate.suites import load, parse

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


def line(**changes):
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value is not ...})


def test_item_keeps_every_field_and_the_graders_data():
    suite = parse("held-out", line() + "\n\n" + line(id="add-2", sampling=..., continue_final_message=...) + "\n")
    first, second = suite.items
    assert first.messages[1].role == "assistant"
    assert first.sampling.stop == ("\ndef",)
    assert first.continue_final_message
    assert first.data == {"head": GOOD["head"], "tests": GOOD["tests"]}
    assert second.sampling.temperature == 1.0
    assert (suite.name, len(suite.hash)) == ("held-out", 64)


def test_hash_sees_content_and_not_spelling():
    suite = parse("a", line())
    assert (
        parse("b", json.dumps(dict(reversed(GOOD.items())), indent=None, separators=(" ,", " : "))).hash == suite.hash
    )
    changes = (
        {"id": "x"},
        {"tests": "assert True"},
        {"sampling": GOOD["sampling"] | {"temperature": 0.9}},
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
        (line(grader=...), "line 2, field 'grader'"),
        (line(messages=[]), "line 2, field 'messages'"),
        (line(messages=[{"role": "root", "content": ""}]), r"line 2, field 'messages\.0\.role'"),
        (line(messages=[{"role": "user", "content": "", "name": "x"}]), r"line 2, field 'messages\.0\.name'"),
        (line(sampling={"max_tokens": 0}), r"line 2, field 'sampling\.max_tokens'"),
        (line(sampling={"max_tokens": "9"}), r"line 2, field 'sampling\.max_tokens'"),
        (line(sampling={"tempreature": 1}), r"line 2, field 'sampling\.tempreature'"),
        (line(continue_final_message="yes"), "line 2, field 'continue_final_message'"),
        (line(), "'add-1' stands twice"),
        (line(head="x" * 2**20), "line 2: longer than"),
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
    with pytest.raises(BadConfig, match="0 items"):
        load(path)
    path.write_text(line())
    assert load(path).name == "copilot"
