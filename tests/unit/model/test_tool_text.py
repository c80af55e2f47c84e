"""Tools, calls and results as text: what a conversation becomes for a model, or a fake, whose template knows none of them."""

import pytest
from tests.fakes.conversations import READ, assistant, call, result, system, talk, user

from ostinato.core.conversation import Conversation, Role, ToolCall
from ostinato.model.template_repairs import as_text
from ostinato.testing.engine import STOP_ID
from ostinato.testing.renderer import ByteRenderer

CALLED = '<tool_call>\n{"name": "read", "arguments": {"path": "calc.py"}}\n</tool_call>'
WORKED = talk(
    system("Be brief."),
    user("Go."),
    assistant("Yes.", call("1"), call("2")),
    result("a", "1"),
    result("b", "2"),
    user("And?"),
    tools=[READ],
)


def test_results_in_a_row_become_one_user_message():
    texts = [(message.role, message.text) for message in as_text(WORKED).messages]
    assert texts[2:] == [
        (Role.ASSISTANT, f"Yes.\n{CALLED}\n{CALLED}"),
        (
            Role.USER,
            "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>",
        ),
        (Role.USER, "And?"),
    ]


@pytest.mark.parametrize(("first", "begins"), [([system("Be brief.")], "Be brief.\n\n# Tools"), ([], "# Tools")])
def test_the_system_message_describes_the_tools(first, begins):
    text = as_text(talk(*first, user("a"), tools=[READ])).messages[0]
    assert text.role is Role.SYSTEM
    assert text.text.startswith(begins)
    assert '{"type": "function", "function": {"name": "read", "description": "Read a file."' in text.text


@pytest.mark.parametrize("known", [1, 2, 3, 5, 6])
def test_what_a_beginning_becomes_begins_what_the_whole_becomes(known):
    part = Conversation(messages=WORKED.messages[:known], tools=WORKED.tools)
    short, whole = as_text(part).messages, as_text(WORKED).messages
    assert whole[: len(short)] == short


def test_a_conversation_without_tools_stays_as_it_is():
    plain = talk(system("a"), user("b"), assistant("c"), continued=True)
    assert as_text(plain) == plain


def test_arguments_stay_as_they_were_written():
    said = assistant(
        "", ToolCall(id="1", name="read", arguments='{"n": 1.50}'), ToolCall(id="2", name="é", arguments="[1")
    )
    text = as_text(talk(user("a"), said)).messages[1].text
    assert '"arguments": {"n": 1.50}}' in text
    assert '{"name": "é", "arguments": "[1"}' in text


def test_the_byte_renderer_writes_calls_as_text_and_gives_results_their_own_role():
    renderer = ByteRenderer()
    ids = renderer.chat(WORKED)
    assert renderer.follow_up(WORKED, 3) == [
        *(0xFC, *b"a", STOP_ID, 0xFC, *b"b", STOP_ID),
        *(0xF9, *b"And?", STOP_ID, 0xFA),
    ]
    assert f"Yes.\n{CALLED}\n{CALLED}" in renderer.decode(ids)
    assert renderer.decode(ids).startswith("Be brief.\n\n# Tools")
    assert renderer.chat(talk(user("hi"))) == [0xF9, *b"hi", STOP_ID, 0xFA]
    assert renderer.chat(talk(user("a"), assistant("b"), continued=True)) == [0xF9, *b"a", STOP_ID, 0xFA, *b"b"]


def test_the_byte_renderer_reads_a_call():
    reader = ByteRenderer().reader(talk(user("a"), tools=[READ]), "chatcmpl-1:0")
    pieces = [*reader.feed(f"Yes.\n{CALLED}"), *reader.finish()]
    assert [piece.call.name for piece in pieces if piece.call] == ["read"]
