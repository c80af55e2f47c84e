"""The gateway's answers to its own clients: what is read, and what is refused by name."""

import json

import pytest

from ostinato.core.chat_answer import GatewayHealth, read_chat_answer, read_health
from ostinato.core.conversation import ToolCall
from ostinato.core.errors import Corrupt, Unauthorized
from ostinato.core.records import PolicyVersion

V7, V9 = PolicyVersion(number=7, hash="aa"), PolicyVersion(number=9, hash="bb")


def choice(index, **message):
    return {"index": index, "message": {"role": "assistant", "content": "", **message}, "finish_reason": "stop"}


def test_all_parts_of_an_answer_are_read_in_the_order_of_their_index():
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    body = {
        "choices": [choice(1, content=None, tool_calls=[call]), choice(0, content="x", reasoning_content="why")],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5},
        "ostinato": {"turns": ["t:0", "t:1"], "spans": [[7, "aa", 2], [9, "bb", 3]], "deadline": True},
    }
    answer = read_chat_answer(body, 2)
    first, second = (each.message for each in answer.choices)
    assert (first.text, first.reasoning, first.calls) == ("x", "why", ())
    assert (second.text, second.calls) == ("", (ToolCall(id="c1", name="read", arguments="{}"),))
    assert (answer.policies, answer.turns) == ((V7, V9), ("t:0", "t:1"))
    assert (answer.prompt_tokens, answer.tokens, answer.overran) == (3, 5, True)
    assert read_chat_answer(json.dumps(body).encode(), 2) == answer


@pytest.mark.parametrize(
    "body",
    [
        b"",
        [],
        None,
        {"choices": []},
        {"choices": [choice(0)]},
        {"choices": [choice(1)], "ostinato": {}},
        {"choices": [choice(0, content=3)], "ostinato": {}},
        {"choices": [choice(0, tool_calls=[{"id": "c1"}])], "ostinato": {}},
        {"choices": [choice(0)], "ostinato": {"spans": [["7", "aa", 2]]}},
        {"choices": [choice(0)], "ostinato": {}, "usage": {"completion_tokens": "many"}},
    ],
)
def test_an_answer_of_another_form_is_corrupt(body):
    with pytest.raises(Corrupt, match="an answer of the gateway does not have the expected form"):
        read_chat_answer(body)


def test_health_names_the_model_and_what_each_slot_serves():
    body = {"status": "ready", "model": "smol", "slots": {"live": {"number": 7, "hash": "aa", "loaded": 1}}}
    assert read_health(body) == GatewayHealth(model="smol", slots={"live": V7})
    with pytest.raises(Unauthorized, match="admin key"):
        read_health({"status": "ready"})
    for other in ([], "ok", {}, {"status": "ready", "slots": {"live": None}, "model": "m"}):
        with pytest.raises(Corrupt, match="/health"):
            read_health(other)
