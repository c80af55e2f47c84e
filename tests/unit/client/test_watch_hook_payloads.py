"""What Claude Code's hook says of an edit, and which part of it is the call's."""

import pytest

from ostinato_client.watch.hook import edit_of
from ostinato_client.watch.spool import parse

BEFORE, AFTER = "a = 1\nb = 2\n", "a = 1\nb = 3\n"


def payload(tool="Edit", told=None, **response):
    told = told or {"file_path": "/r/a.py", "old_string": "b = 2", "new_string": "b = 3", "replace_all": False}
    answer = {"filePath": "/r/a.py", "originalFile": BEFORE, "structuredPatch": [], "userModified": False} | response
    return {"tool_name": tool, "tool_use_id": "call_chatcmpl-1_0_0", "tool_input": told, "tool_response": answer}


def test_an_edit_is_from_what_was_there_to_what_is_there():
    edit = edit_of(payload(), AFTER, 5.0)
    assert edit is not None
    assert (edit.call, edit.file, edit.before, edit.after, edit.at) == (
        "call_chatcmpl-1_0_0",
        "/r/a.py",
        BEFORE,
        AFTER,
        5.0,
    )


@pytest.mark.parametrize(
    ("told", "before", "after", "text"),
    [
        ({"old_string": "b = 2", "new_string": "b = 3"}, BEFORE, AFTER, ("new_string", 1, 1)),
        ({"old_string": "= 2\n", "new_string": "= 3\nc = 4\n"}, BEFORE, "a = 1\nb = 3\nc = 4\n", ("new_string", 1, 2)),
        ({"old_string": "1\nb", "new_string": "0\n\nb"}, BEFORE, "a = 0\n\nb = 2\n", ("new_string", 0, 3)),
        ({"old_string": " = ", "new_string": "="}, BEFORE, "a=1\nb = 2\n", None),  # it stands there twice
        ({"old_string": "b = 2", "new_string": "b = 3"}, BEFORE, "a = 1\nb = 3;\n", None),  # a formatter ran
        ({"old_string": "b = 9", "new_string": "b = 3"}, BEFORE, AFTER, None),
        ({"old_string": "", "new_string": AFTER}, "", AFTER, None),
        ({"content": AFTER}, BEFORE, AFTER, ("content", 0, 2)),
        ({"content": "a = 1"}, BEFORE, "a = 1", ("content", 0, 1)),
        ({"content": AFTER + "\n"}, BEFORE, AFTER, None),
        ({"edits": [{"old_string": "b = 2", "new_string": "b = 3"}]}, BEFORE, AFTER, None),
    ],
)
def test_the_argument_is_placed_in_the_file_where_that_is_certain(told, before, after, text):
    edit = edit_of(payload(told={"file_path": "/r/a.py"} | told, originalFile=before), after, 5.0)
    assert edit is not None
    assert edit.text == text
    assert parse(edit.line()) == edit


def test_a_new_file_was_empty_before():
    told = {"file_path": "/r/n.py", "content": AFTER}
    edit = edit_of(payload("Write", told, type="create", originalFile=None), AFTER, 5.0)
    assert edit is not None
    assert edit.before == ""
    unknown = edit_of(payload("Write", told, type="update", originalFile=None), AFTER, 5.0)
    assert unknown is not None
    assert unknown.before is None


def test_what_a_person_changed_before_it_ran_is_not_the_calls():
    edit = edit_of(payload(userModified=True), "a = 1\nb = 4\n", 5.0)
    assert edit is not None
    assert edit.after == AFTER, "what the call asked for; the file then shows what the person made of it"
    assert edit_of(payload(userModified=True), AFTER, 5.0) is None, "nobody can tell which part is whose"
    assert edit_of(payload(userModified=True, originalFile="x"), AFTER, 5.0) is None
    told = {"file_path": "/r/n.py", "content": AFTER}
    written = edit_of(payload("Write", told, userModified=True), "b = 5\n", 5.0)
    assert written is not None
    assert written.after == AFTER


@pytest.mark.parametrize(
    "change",
    [
        {"tool_name": "Bash"},
        {"tool_name": "NotebookEdit"},
        {"tool_use_id": None},
        {"tool_input": "x"},
        {"tool_input": {"file_path": 5}},
        {"tool_response": "The file was not found."},
        {"tool_response": {"type": "error"}},
    ],
)
def test_anything_else_is_no_edit(change):
    assert edit_of(payload() | change, AFTER, 5.0) is None
