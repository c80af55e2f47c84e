import json

import pytest

from ostinato.core.conversation import Conversation, Message, Piece, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest, NotFound, OstinatoError, TooLarge, Unauthorized, Unavailable
from ostinato.core.records import Finish
from ostinato.serve.dialects.anthropic import parse_count, parse_messages
from ostinato.serve.dialects.anthropic_reply import ERRORS, SIGNATURE, Messages
from ostinato.serve.dialects.dialect import ContextExceeded, Counts, Heading, Tokens, Whole

ASK = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
READ = {"name": "Read", "description": "Read a file.", "input_schema": {"type": "object", "properties": {}}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}

# As Claude Code 2.1 sends it in the middle of a session, with other texts.
CLAUDE_CODE = {
    "model": "claude-opus-5",
    "max_tokens": 128000,
    "stream": True,
    "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "s-1"})},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "system": [
        {"type": "text", "text": "x-header: 2.1.330.abc"},
        {"type": "text", "text": "You are an agent.", **EPHEMERAL},
    ],
    "tools": [
        READ | {"eager_input_streaming": True},
        READ | {"name": "ToolSearch"},
        READ | {"name": "WebFetch", "defer_loading": True, **EPHEMERAL},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>Be brief.</reminder>"},
                {"type": "text", "text": "Fix it."},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "Today is Monday."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two files.", "signature": SIGNATURE},
                {"type": "text", "text": "Let me look."},
                {
                    "type": "tool_use",
                    "id": "call_3f_0_0",
                    "name": "Read",
                    "input": {"file_path": "ä.py", "limit": 60000},
                },
                {
                    "type": "tool_use",
                    "id": "call_3f_0_1",
                    "name": "ToolSearch",
                    "input": {},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_3f_0_0", "content": "No such file.", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_3f_0_1",
                    "content": [{"type": "tool_reference", "tool_name": "WebFetch"}],
                },
                {"type": "text", "text": "[Interrupted]", **EPHEMERAL},
                {"type": "text", "text": "Try b.py."},
            ],
        },
    ],
}


def said(*messages, **more):
    return parse_messages(ASK | {"messages": list(messages)} | more).conversation


def user(*content):
    return {"role": "user", "content": list(content)}


def assistant(*content):
    return {"role": "assistant", "content": list(content)}


def text(words):
    return {"type": "text", "text": words}


# ---------------------------------------------------------------- in


def test_what_claude_code_sends_is_a_conversation():
    request = parse_messages(CLAUDE_CODE)
    schema = READ["input_schema"]
    calls = (
        ToolCall(id="call_3f_0_0", name="Read", arguments='{"file_path":"ä.py","limit":60000}'),
        ToolCall(id="call_3f_0_1", name="ToolSearch", arguments="{}"),
    )
    assert request.conversation == Conversation(
        messages=(
            Message(role=Role.SYSTEM, text="x-header: 2.1.330.abc\nYou are an agent."),
            Message(role=Role.USER, text="<reminder>Be brief.</reminder>\nFix it."),
            Message(role=Role.SYSTEM, text="Today is Monday."),
            Message(role=Role.ASSISTANT, text="Let me look.", reasoning="Two files.", calls=calls),
            Message(role=Role.TOOL, text="No such file.", answers="call_3f_0_0", failed=True),
            Message(role=Role.TOOL, text="WebFetch", answers="call_3f_0_1"),
            Message(role=Role.USER, text="[Interrupted]\nTry b.py."),
        ),
        tools=tuple(
            Tool(name=name, description="Read a file.", parameters=schema)
            for name in ("Read", "ToolSearch", "WebFetch")
        ),
    )
    assert (request.asker, request.budget, request.stream) == ("d" * 64, 128000, True)
    assert (request.n, request.wants_usage, request.wants_logprobs) == (None, True, False)
    counted = {name: value for name, value in CLAUDE_CODE.items() if name != "max_tokens"}
    assert parse_count(counted).conversation == parse_count(CLAUDE_CODE).conversation == request.conversation


@pytest.mark.parametrize(
    ("user_id", "asker"),
    [
        ("ann", "ann"),
        ("", None),
        (None, None),
        ('{"name": "ann"}', '{"name": "ann"}'),
        ('["ann"]', '["ann"]'),
        ('{"account_uuid": "a", "device_id": "d", "session_id": "s"}', "a"),
        ('{"device_id": "d"}', "d"),
        ('{"session_id": "s", "device_id": 5}', None),
    ],
)
def test_the_asker_is_an_account_a_device_or_plain_text(user_id, asker):
    request = parse_messages(ASK | {"metadata": {"user_id": user_id}})
    assert request.asker == asker


def test_an_identity_that_would_move_a_terminals_cursor_is_refused():
    with pytest.raises(BadRequest, match="printable") as caught:
        parse_messages(ASK | {"metadata": {"user_id": r'{"account_uuid": "a\u001b[2J"}'}})
    assert caught.value.field == "metadata.user_id"


def test_sampling_has_anthropics_defaults():
    plain = parse_messages(ASK).sampling(7)
    assert (plain.max_tokens, plain.temperature, plain.top_p, plain.stop, plain.seed) == (7, 1.0, 1.0, (), None)
    chosen = parse_messages(ASK | {"temperature": 0, "top_p": 0.5, "stop_sequences": ["x"]}).sampling(7)
    assert (chosen.temperature, chosen.top_p, chosen.stop) == (0.0, 0.5, ("x",))


def test_messages_of_one_role_in_a_row_become_one():
    got = said(
        {"role": "user", "content": "a"}, user(text("b"), text("")), assistant(text("c")), assistant(text("d"))
    ).messages
    assert got == (Message(role=Role.USER, text="a\nb"), Message(role=Role.ASSISTANT, text="cd"))


def test_an_assistants_text_at_the_end_is_continued():
    assert said(user(text("hi")), assistant(text("The answer is"))).continued
    for empty in (assistant(), assistant(text("")), {"role": "assistant", "content": ""}):
        got = said(user(text("hi")), empty)
        assert (got.continued, len(got.messages)) == (False, 1)


@pytest.mark.parametrize(
    "block", [{"type": "tool_use", "id": "c", "name": "Read", "input": {}}, {"type": "thinking", "thinking": "Hm."}]
)
def test_only_text_is_continued(block):
    with pytest.raises(BadRequest, match="only text") as caught:
        said(user(text("hi")), assistant(block, text("so")))
    assert caught.value.field == "messages[1].content"


def test_a_conversation_of_nothing_is_refused():
    with pytest.raises(BadRequest, match="nothing to answer"):
        said({"role": "assistant", "content": ""}, system="Be brief.")


def test_thinking_that_only_anthropic_can_read_is_left_out():
    got = said(user(text("hi")), assistant({"type": "redacted_thinking", "data": "x"}, text("yo")), user(text("ok")))
    assert got.messages[1] == Message(role=Role.ASSISTANT, text="yo")


def test_results_may_be_empty_or_several_texts():
    got = said(
        user({"type": "tool_result", "tool_use_id": "a"}),
        user({"type": "tool_result", "tool_use_id": "b", "content": [text("x"), text("y")]}),
    )
    assert got.messages == (Message(role=Role.TOOL, answers="a"), Message(role=Role.TOOL, answers="b", text="x\ny"))


def test_tools_stay_in_the_prompt_if_none_may_be_called():
    forbidden = said(user(text("hi")), tools=[READ], tool_choice={"type": "none"})
    assert (len(forbidden.tools), forbidden.callable_tools) == (1, ())
    auto = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(said(user(text("hi")), tools=[READ], tool_choice=auto).tools) == 1


def test_harmless_and_inert_fields_are_taken():
    harmless = {"betas": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024}, **EPHEMERAL}
    inert = {"container": None, "mcp_servers": [], "top_k": None, "output_config": {"format": None}, "system": []}
    parse_messages(ASK | harmless | inert)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"metadata": {"user": "ann"}}, "metadata.user"),
        ({"top_k": 5}, "top_k"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_config": {"format": {"type": "json_object", "schema": {}}}}, "output_config.format.type"),
        ({"context_management": {"edits": [{"type": "forget_20990101"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [{"type": "compact_20260112", "x": 1}]}}, "context_management.edits[0].x"),
        ({"output_config": {"task_budget": {"total": 5}}}, "output_config.task_budget"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "Write"}, "tools": [READ]}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [READ]}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "name": "Read"}, "tools": [READ]}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools[0].type"),
        ({"tools": [READ, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"tools": [READ | {"parameters": {}}]}, "tools[0].parameters"),
        ({"tools": [{"name": "Read"}]}, "tools[0].input_schema"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "ann"}]}, "messages[0].name"),
        ({"messages": [user("x")]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "compaction"})]}, "messages"),
        ({"messages": [user({"type": "compaction", "content": ""})]}, "messages[0].content[0].content"),
        ({"system": [{"type": "compaction", "content": "x"}]}, "system[0]"),
        ({"compaction": {"type": "forget"}}, "compaction.type"),
        ({"compaction": {"type": "summarize"}, "stop_sequences": ["x"]}, "stop_sequences"),
        ({"compaction": {"type": "summarize"}, "context_management": {"edits": []}}, "context_management"),
        ({"compaction": {"type": "summarize"}, "tools": [READ], "tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"compaction": {"type": "summarize"}, "output_format": {"type": "json_schema", "schema": {}}},
            "output_config.format",
        ),
        ({"messages": [user({"type": "tool_use"})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user(text("x") | {"txt": 1})]}, "messages[0].content[0].txt"),
        (
            {"messages": [user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "smell"}]})]},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [assistant({"type": "tool_use", "id": "a", "name": "b", "input": "{}"})]},
            "messages[0].content[0].input",
        ),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_what_cannot_be_taken_is_named(extra, field):
    with pytest.raises(BadRequest) as caught:
        parse_messages(ASK | extra)
    assert caught.value.field == field
    assert field.rpartition(".")[2] in str(caught.value) or str(caught.value).startswith(field.rpartition(".")[0])


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(BadRequest, match="'temperature'"):
        parse_messages(ASK | {"temprature": 1})


# ---------------------------------------------------------------- out

CALL = ToolCall(id="call_3f_0_0", name="Read", arguments='{"path": "ä.py",\n "n": 1e999}')
CACHELESS = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
COUNTS, OURS = Counts(prompt=11, answer=5), {"turns": ["msg-3f:0"]}


def writer():
    return Messages(Heading(id="msg-3f", created=1.0, model="m", choices=1, prompt_tokens=11, count_usage=True))


def body(finish=Finish.STOP, **message):
    answer = Whole(message=Message(role=Role.ASSISTANT, **message), tokens=Tokens([1], [0.0]), finish=finish)
    return json.loads(writer().body([answer], COUNTS, OURS))


def events(*pieces, finish=Finish.STOP):
    out = writer()
    data = out.opening() + "".join(out.delta(0, [piece], Tokens([1], [0.0])) for piece in pieces)
    data += out.ending(0, finish, "", (COUNTS, OURS))
    blocks = [event.split("\n") for event in data.removesuffix("\n\n").split("\n\n")]
    values = [json.loads(line.removeprefix("data: ")) for _, line in blocks]
    assert [name for name, _ in blocks] == [f"event: {value['type']}" for value in values]
    return values


def test_a_whole_answer_has_its_thinking_first_and_its_calls_last():
    got = body(Finish.TOOL_CALLS, text="So.", reasoning="Hm.", calls=(CALL,))
    assert got == {
        "id": "msg-3f",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE},
            {"type": "text", "text": "So."},
            {"type": "tool_use", "id": CALL.id, "name": "Read", "input": {"path": "ä.py", "n": float("inf")}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": CACHELESS | {"input_tokens": 11, "output_tokens": 5},
        "ostinato": OURS,
    }


@pytest.mark.parametrize(
    ("finish", "reason"),
    [(Finish.STOP, "end_turn"), (Finish.LENGTH, "max_tokens"), (Finish.TOOL_CALLS, "tool_use")],
)
def test_the_reason_for_the_end_is_told_in_anthropics_words(finish, reason):
    assert body(finish)["stop_reason"] == reason
    assert events(finish=finish)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": None}


def test_an_empty_answer_has_one_empty_text():
    assert body()["content"] == [{"type": "text", "text": ""}]
    types = [event["type"] for event in events()]
    assert types[2:4] == ["content_block_start", "content_block_stop"]
    assert (types[:2], types[4:]) == (["message_start", "ping"], ["message_delta", "message_stop"])


def test_a_block_is_closed_before_the_next_begins():
    got = events(
        Piece(reasoning="H"), Piece(reasoning="m."), Piece(text="a"), Piece(), Piece(text="b"), Piece(call=CALL),
        Piece(call=CALL), Piece(text="c"), finish=Finish.TOOL_CALLS,
    )  # fmt: skip
    start, ping, *blocks, delta, stop = got
    assert start["message"]["usage"]["input_tokens"] == 11
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert (ping, stop) == ({"type": "ping"}, {"type": "message_stop"})
    assert (delta["usage"]["output_tokens"], delta["ostinato"]) == (5, OURS)
    told = [(block["index"], block.get("delta", block.get("content_block", {})).get("type", "")) for block in blocks]
    call = ["tool_use", "input_json_delta", ""]
    assert told == [
        *[(0, type) for type in ("thinking", "thinking_delta", "thinking_delta", "signature_delta", "")],
        *[(1, type) for type in ("text", "text_delta", "text_delta", "")],
        *[(2, type) for type in call],
        *[(3, type) for type in call],
        *[(4, type) for type in ("text", "text_delta", "")],
    ]
    assert blocks[9]["content_block"] == {"type": "tool_use", "id": "call_3f_0_0", "name": "Read", "input": {}}
    assert blocks[10]["delta"]["partial_json"] == CALL.arguments


@pytest.mark.parametrize("arguments", ["", "[1]", '{"a": NaN}', "{", "[" * 100_000])
def test_arguments_that_no_client_can_read_are_an_empty_object(arguments):
    call = ToolCall(id="c", name="Read\ud800", arguments=arguments)
    assert body(calls=(call,))["content"][0]["input"] == {}
    assert events(Piece(call=call))[3]["delta"]["partial_json"] == "{}"


def test_an_answer_that_comes_back_is_the_same_message():
    message = Message(role=Role.ASSISTANT, text="So.", reasoning="Hm.", calls=(CALL,))
    content = body(text=message.text, reasoning=message.reasoning, calls=message.calls)["content"]
    got = said(user(text("hi")), assistant(*content), user(text("ok"))).messages[1]
    assert (got.text, got.reasoning, got.calls[0].values()) == (message.text, message.reasoning, CALL.values())


class Busy(OstinatoError):
    status = 429


@pytest.mark.parametrize(
    ("error", "type"),
    [
        (BadRequest("x"), "invalid_request_error"),
        (Unauthorized("x"), "authentication_error"),
        (NotFound("x"), "not_found_error"),
        (TooLarge("x"), "request_too_large"),
        (Busy("x"), "rate_limit_error"),
        (Unavailable("x"), "overloaded_error"),
        (OstinatoError("x"), "api_error"),
    ],
)
def test_errors_have_anthropics_types(error, type):
    assert ERRORS.body(error) == {"type": "error", "error": {"type": type, "message": "x"}}
    heading = Heading(id="msg-1", created=0.0, model="m", choices=1, prompt_tokens=1, count_usage=True)
    ending = f"event: error\ndata: {json.dumps(ERRORS.body(error), separators=(',', ':'))}\n\n"
    assert Messages(heading).failure(error) == ending


def test_a_prompt_that_is_too_long_is_told_in_words_that_agents_know():
    error = ERRORS.body(ContextExceeded(prompt=9, answer=2, context=8, field="messages"))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: 9 tokens > 6 maximum")


def test_a_prompt_is_counted_whatever_fields_of_a_message_it_comes_with():
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    asked = {"logit_bias": {}, "logprobs": False, "n": 1, "presence_penalty": 0, "frequency_penalty": 0, "stream": True}
    assert parse_count(body | asked).conversation == parse_messages(body | asked).conversation
