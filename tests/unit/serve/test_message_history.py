import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.conversation import (
    Message,
    Role,
    Tool,
    ToolCall,
    call_id,
    calling_turn,
    digest,
    normal,
    tools_digest,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def called(arguments, *, id="call_3f_0_0", name="edit", text=""):
    call = ToolCall(id=id, name=name, arguments=arguments)
    return normal(Message(role=Role.ASSISTANT, text=text, calls=(call,)))


def said(text, role=Role.ASSISTANT, **more):
    return normal(Message(role=role, text=text, **more))


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5), st.randoms())
def test_arguments_that_an_agent_writes_anew_are_the_same(values, chance):
    keys = [*values]
    chance.shuffle(keys)
    assert called(json.dumps({key: values[key] for key in keys}, indent=2)) == called(
        json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    )


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        ('{"path": "a", "old": "x"}', '{"old":"x","path":"a","replace_all":false}'),
        ('{"timeout": 60000.0}', '{"timeout":60000}'),
        ('{"text": "\\u00e9"}', '{"text":"é"}'),
        ('{"lines": [1.0, {"to": 2.0}]}', '{"lines":[1,{"to":2}]}'),
        ('{"limit": null}', "{}"),
    ],
)
def test_what_agents_were_seen_to_do_to_arguments_changes_nothing(sampled, sent):
    assert called(sampled) == called(sent)


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        ('{"path": "a"}', '{"path": "b"}'),
        ('{"n": 0}', "{}"),
        ('{"n": 1}', '{"n": true}'),
        ('{"text": ""}', "{}"),
        ('{"replace_all": true}', "{}"),
        ('{"n": 1.5}', '{"n": 1}'),
        ("{", "{ "),
        ("[1]", "[2]"),
    ],
)
def test_another_call_is_another_message(sampled, sent):
    assert called(sampled) != called(sent)


def test_ids_names_and_text_count():
    assert called("{}") != called("{}", id="call_3f_0_1")
    assert called("{}") != called("{}", name="read")
    assert called("{}", text="Now.") != called("{}")
    assert called("{}", text="Now.\n") == called("{}", text="Now.")


def test_an_answer_may_be_trimmed_and_a_question_may_not():
    assert said(" yes\n") == said("yes")
    assert said(" yes\n", Role.USER) != said("yes", Role.USER)
    assert said("yes", Role.USER) != said("yes", Role.SYSTEM) != said("yes")


def test_reasoning_does_not_count():
    assert said("yes", reasoning="They ask whether ...") == said("yes")


def test_a_result_belongs_to_its_call():
    assert said("2 passed", Role.TOOL, answers="call_3f_0_0") != said("2 passed", Role.TOOL, answers="call_3f_0_1")


def test_deep_or_broken_arguments_are_compared_as_they_are():
    deep = '{"a":' * 50_000 + "1" + "}" * 50_000
    assert called(deep) == called(deep) != called(deep + " ")


def test_tools_in_another_order_make_another_prompt():
    read, edit = Tool(name="read"), Tool(name="edit", parameters={"type": "object"})
    assert tools_digest([read, edit]) != tools_digest([edit, read])
    assert tools_digest([]) == ""
    assert tools_digest([read]) == tools_digest([Tool(name="read")])


@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_lists_of_parts_do_not_run_together(one, other):
    assert (digest(b"", *one) == digest(b"", *other)) == (one == other)


@pytest.mark.parametrize(
    ("turn", "id"),
    [("chatcmpl-3f:0", "call_cXCg_2"), ("e1-f:2", "call_e1-f_2_2")],
)
def test_a_calls_id_is_as_it_was(turn, id):
    """Agents keep ids in their histories and signals name them, so they must mean the same after an upgrade."""
    assert call_id(turn, 2) == id


@pytest.mark.parametrize("turn", ["chatcmpl-3f:0", "msg-0aa-bb-1:13", "resp-" + "0" * 32 + ":127", "cmpl-f:0"])
def test_a_calls_id_names_its_turn(turn):
    assert calling_turn(call_id(turn, 2)) == turn


@pytest.mark.parametrize(
    ("kind", "rest"),
    [("chatcmpl", "f" * 32 + ":0"), ("resp", "f" * 32 + ":127"), ("msg", "f" * 24 + "-" + "f" * 12 + "-63:127")],
)
def test_a_calls_id_is_short_enough_for_openais_api_and_plain(kind, rest):
    ids = {call_id(f"{kind}-{rest}", number) for number in range(100)}
    assert len(ids) == 100
    assert all(len(id) <= 40 and re.fullmatch("[A-Za-z0-9_]+", id) for id in ids)


def test_ids_of_the_first_release_still_name_their_turns():
    assert calling_turn("call_chatcmpl-3f_0_2") == "chatcmpl-3f:0"
    assert calling_turn("call_msg-aa-bb-1_13_2") == "msg-aa-bb-1:13"


@given(st.text("0123456789abcdef-", min_size=1, max_size=40), st.integers(0, 127), st.integers(0, 99))
def test_no_two_turns_share_a_calls_id(rest, choice, number):
    turn = f"chatcmpl-{rest}:{choice}"
    assert calling_turn(call_id(turn, number)) == turn


@pytest.mark.parametrize(
    "id",
    [
        *("", "call_", "toolu_01", "call_3f_0_0", "call_chatcmpl-3f_0", "call_chatcmpl-3f_0_0 "),
        *(
            "call_cXCg",
            "call_c_0",
            "call_c0XCg_0",
            "call_c" + "z" * 30 + "_0",
            "call_abc123DEF456ghi789JKL012",
        ),
    ],
)
def test_a_strangers_id_names_none(id):
    assert calling_turn(id) is None
