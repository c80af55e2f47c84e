"""What clients send besides what the protocols demand, in every dialect: taken where it changes nothing, told where it is left out."""

import json

import pytest
from tests.unit.serve.gateway_world import world

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.anthropic import parse_count, parse_messages
from ostinato.serve.dialects.openai import parse_chat, parse_completion
from ostinato.serve.dialects.responses import parse_responses
from ostinato.testing.engine import decode

HI = [{"role": "user", "content": "hi"}]
CHAT = (parse_chat, {"model": "m", "messages": HI})
MESSAGES = (parse_messages, {"model": "m", "max_tokens": 9, "messages": HI})
RESPONSES = (parse_responses, {"model": "m", "input": "hi"})
DIALECTS = [CHAT, MESSAGES, RESPONSES]
IMAGE = "[image omitted: this model reads text only]"
DOCUMENT = "[document omitted: this model reads text only]"
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


def same(asked, plain):
    """Both requests get the same prompt, drawn from in the same way."""
    assert asked.conversation == plain.conversation
    assert asked.sampling(9) == plain.sampling(9)


# ---------------------------------------------------------------- fields of the request

NEUTRAL = [
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": None},
    {"min_p": 0},
    {"min_p": 0.0, "repetition_penalty": 1.0, "top_k": -1},
    {"repetition_penalty": 1},
    {"length_penalty": 1.0, "early_stopping": False, "use_beam_search": False},
    {"typical_p": 1.0, "tfs_z": 1, "top_a": 0.0, "mirostat": 0, "no_repeat_ngram_size": 0},
    {"ignore_eos": False, "min_tokens": 0, "stop_token_ids": [], "bad_words": []},
    {"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
    {"guided_json": None, "guided_regex": None, "structured_outputs": None, "logits_processors": None},
    {"chat_template": None, "chat_template_kwargs": {}, "documents": None, "echo": False, "best_of": 1},
    {"reasoning_effort": "high", "verbosity": "low"},
    {"request_id": "r-7", "priority": 0, "cache_prompt": True, "keep_alive": "5m"},
    {"service_tier": "auto", "some_option_of_tomorrow": None},
]  # fmt: skip


@pytest.mark.parametrize("more", NEUTRAL, ids=str)
@pytest.mark.parametrize("dialect", DIALECTS, ids=["chat", "messages", "responses"])
def test_a_field_that_changes_nothing_costs_nothing(dialect, more):
    parse, body = dialect
    same(parse(body | more), parse(body))


ACTIVE = [
    {"top_k": 5},
    {"top_k": True},
    {"min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"length_penalty": 2.0},
    {"min_tokens": 5},
    {"ignore_eos": True},
    {"best_of": 2},
    {"guided_regex": "a+"},
    {"guided_json": {"type": "object"}},
    {"structured_outputs": {"regex": "a"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"bad_words": ["no"]},
    {"stop_token_ids": [5]},
    {"skip_special_tokens": False},
    {"echo": True},
]


@pytest.mark.parametrize("more", ACTIVE, ids=str)
@pytest.mark.parametrize("dialect", DIALECTS, ids=["chat", "messages", "responses"])
def test_a_field_that_would_change_the_answer_is_refused_with_the_remedy(dialect, more):
    parse, body = dialect
    (name,) = more
    with pytest.raises(BadRequest, match=f"^{name} is not supported.*leave it out") as caught:
        parse(body | more)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("parse", "body", "nulls"),
    [
        (*CHAT, ["temperature", "n", "stop", "stream", "add_generation_prompt", "continue_final_message", "tools", "user"]),
        (*CHAT, ["stream_options", "logprobs", "logit_bias", "parallel_tool_calls", "reasoning", "functions", "modalities"]),
        (*MESSAGES, ["system", "tools", "tool_choice", "stop_sequences", "thinking", "metadata", "container", "top_p"]),
        (*RESPONSES, ["instructions", "tools", "tool_choice", "text", "include", "store", "prompt", "conversation"]),
        (parse_completion, {"model": "m", "prompt": "x"}, ["suffix", "logprobs", "echo", "best_of", "tools"]),
    ],
)  # fmt: skip
def test_a_null_is_no_field(parse, body, nulls):
    assert parse(body | dict.fromkeys(nulls)) == parse(body)


def test_a_null_within_an_object_is_no_field_either():
    plain = parse_chat(CHAT[1] | {"stream_options": {}})
    assert parse_chat(CHAT[1] | {"stream_options": {"include_usage": None, "x": None}}) == plain
    assert not plain.wants_usage
    tool = {"type": "function", "function": {"name": "a", "description": None, "parameters": None, "strict": None}}
    assert parse_chat(CHAT[1] | {"tools": [tool]}).conversation.tools[0].name == "a"


def test_a_null_type_is_the_one_that_goes_without_saying():
    tool = {"type": None, "function": {"name": "read"}}
    said = {"role": "assistant", "tool_calls": [CALL | {"type": None}]}
    _, called, _ = parse_chat(CHAT[1] | {"tools": [tool], "messages": [*HI, said, *HI]}).conversation.messages
    assert called.calls[0].name == "read"
    given = parse_responses({"model": "m", "input": [{"type": None, **HI[0]}]}).conversation
    assert given == parse_responses({"model": "m", "input": HI}).conversation


@pytest.mark.parametrize("dialect", DIALECTS, ids=["chat", "messages", "responses"])
def test_a_field_that_must_be_there_may_not_be_null(dialect):
    parse, body = dialect
    with pytest.raises(BadRequest) as caught:
        parse(body | {"model": None})
    assert caught.value.field == "model"


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg-3f"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_wants_the_server_to_hold_its_messages_is_told_so_that_it_goes_on_without(thread, stream):
    """Anthropic's `tool_runner` asks for it by default, and goes on with whole histories after this code alone."""
    asked = {"model": "m", "max_tokens": 9, "messages": HI, "thread": thread, "stream": stream}
    async with world("hello") as w:
        status, _, body = await w.post("/v1/messages", asked)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert body["error"]["details"]["error_code"] == "thread_unsupported_request"
        assert "send all messages with each request" in body["error"]["message"]


async def test_a_client_that_wants_usage_in_every_event_gets_it_in_the_last():
    async with world("hello") as w:
        options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
        status, _, raw = await w.chat(stream=True, stream_options=options)
        assert status == 200
        assert raw.count(b'"usage":{') == 1


# ---------------------------------------------------------------- notes on messages and tools

CHAT_NOTES = [
    *({name: "Hm."} for name in ("reasoning", "reasoning_text", "thinking", "thought", "encrypted_content")),
    {"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}], "reasoning": "Hm."},
    {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]},
    {"thought_signature": "abc", "extra_content": {"google": {"thought_signature": "abc"}}},
    {"annotations": [{"type": "url_citation"}], "refusal": None, "audio": None, "function_call": None},
    {"cache_control": {"type": "ephemeral"}},
    {"id": "msg_1", "model": "gpt-9", "usage": {"x": 1}, "finish_reason": "stop", "index": 0},
    {"provider_specific_fields": {"x": 1}, "parsed": None, "name": "bot", "metadata": {}},
    {"tool_calls": None, "tool_call_id": None, "reasoning_content": None},
    {"prefix": False, "partial": False},
]


@pytest.mark.parametrize("notes", CHAT_NOTES, ids=str)
def test_notes_on_an_answer_are_taken_and_kept_out_of_the_prompt(notes):
    said = {"role": "assistant", "content": "yo"}
    plain = parse_chat(CHAT[1] | {"messages": [*HI, said, *HI]})
    same(parse_chat(CHAT[1] | {"messages": [*HI, said | notes, *HI]}), plain)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "yo", "annotations": [], "cache_control": {"type": "ephemeral"}},
        {"type": "refusal", "refusal": "yo"},
    ],
)
def test_notes_on_parts_are_taken(part):
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    said = {"role": "assistant", "content": [thought, part]}
    assert parse_chat(CHAT[1] | {"messages": [*HI, said]}).conversation.messages[1].text == "yo"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"content": None}, Message(role=Role.ASSISTANT)),
        ({}, Message(role=Role.ASSISTANT)),
        ({"content": ""}, Message(role=Role.ASSISTANT)),
        ({"content": []}, Message(role=Role.ASSISTANT)),
        ({"content": None, "tool_calls": []}, Message(role=Role.ASSISTANT)),
        ({"content": None, "refusal": "I will not."}, Message(role=Role.ASSISTANT, text="I will not.")),
        (
            {"content": [], "tool_calls": [CALL]},
            Message(role=Role.ASSISTANT, calls=(ToolCall(id="c1", name="read", arguments="{}"),)),
        ),
    ],
)
def test_an_answer_that_was_stopped_before_its_first_word_stays_in_the_history(said, message):
    messages = [*HI, {"role": "assistant", **said}, *HI]
    assert parse_chat(CHAT[1] | {"messages": messages}).conversation.messages[1] == message


@pytest.mark.parametrize("content", [None, "", []])
def test_a_tool_may_return_nothing(content):
    result = {"role": "tool", "tool_call_id": "c1", "content": content}
    messages = [*HI, {"role": "assistant", "tool_calls": [CALL]}, result]
    assert parse_chat(CHAT[1] | {"messages": messages}).conversation.messages[2].text == ""


@pytest.mark.parametrize("content", [None, "", []])
def test_a_system_prompt_may_be_empty_but_a_user_says_something(content):
    system = {"role": "system", "content": content}
    assert parse_chat(CHAT[1] | {"messages": [system, *HI]}).conversation.messages[0].text == ""
    if content != "":
        with pytest.raises(BadRequest) as caught:
            parse_chat(CHAT[1] | {"messages": [{"role": "user", "content": content}]})
        assert caught.value.field == "messages[0].content"


OTHERS = [{"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "n": 1, "logprobs": False, "seed": None}]


@pytest.mark.parametrize("more", OTHERS, ids=str)
@pytest.mark.parametrize("dialect", DIALECTS, ids=["chat", "messages", "responses"])
def test_fields_of_chat_completions_cost_nothing_elsewhere_if_they_change_nothing(dialect, more):
    parse, body = dialect
    same(parse(body | more), parse(body))


@pytest.mark.parametrize(
    "more", [{"presence_penalty": 1}, {"n": 2}, {"logprobs": True}, {"seed": 7}, {"logit_bias": {"5": 1}}]
)
@pytest.mark.parametrize("dialect", DIALECTS[1:], ids=["messages", "responses"])
def test_fields_of_chat_completions_are_refused_elsewhere_if_they_would_change_the_answer(dialect, more):
    parse, body = dialect
    with pytest.raises(BadRequest, match="chat completions have it; leave it out") as caught:
        parse(body | more)
    assert caught.value.field in more


@pytest.mark.parametrize("content", [None, "", []])
def test_an_empty_answer_is_taken_in_the_other_dialects_too(content):
    said = {"role": "assistant", "content": content}
    assert len(parse_messages(MESSAGES[1] | {"messages": [*HI, said, *HI]}).conversation.messages) == 1
    assert len(parse_responses({"model": "m", "input": [*HI, said, *HI]}).conversation.messages) == 1


def test_a_call_that_another_provider_made_is_taken():
    call = CALL | {"index": 0, "extra_content": {"google": {"thought_signature": "x"}}, "provider_specific_fields": {}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    assert parse_chat(CHAT[1] | {"messages": messages}).conversation.messages[1].calls[0].name == "read"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "", "signature": None},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "mcp_tool_use", "id": "s2", "name": "x", "server_name": "y", "input": {}},
        {"type": "fallback"},
    ],
)
def test_what_only_anthropics_servers_can_use_is_left_out(block):
    said = {"role": "assistant", "content": [block, {"type": "text", "text": "yo", "citations": None}]}
    request = parse_messages(MESSAGES[1] | {"messages": [*HI, said, *HI]})
    assert request.conversation.messages[1] == Message(role=Role.ASSISTANT, text="yo")
    hidden = "thinking" in block["type"]
    assert [*request.omitted] == ([] if hidden else ["hosted-tools"])


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "file_search_call", "id": "fs_1", "queries": ["x"], "results": None},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "x", "tools": []},
        {"type": "image_generation_call", "id": "ig_1", "result": "iVBORw0KGgo="},
    ],
)
def test_what_only_openais_servers_can_use_is_left_out(item):
    request = parse_responses({"model": "m", "input": [*HI, item]})
    assert [message.text for message in request.conversation.messages] == ["hi"]
    assert [*request.omitted] == ["hosted-tools"]


@pytest.mark.parametrize(
    "reasoning",
    [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA", "content": None},
    ],
)
def test_another_providers_reasoning_is_kept_out_of_the_prompt(reasoning):
    items = [*HI, reasoning, {"role": "assistant", "content": "yo"}]
    assert parse_responses({"model": "m", "input": items}).conversation.messages[1] == Message(
        role=Role.ASSISTANT, text="yo"
    )


@pytest.mark.parametrize(
    ("call", "result", "name", "arguments", "text"),
    [
        (
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "output": "a.py"},
            *("local_shell", {"type": "exec", "command": ["ls"]}, "a.py"),
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.py"}},
            {"type": "apply_patch_call_output", "status": "completed", "output": None},
            *("apply_patch", {"type": "delete_file", "path": "a.py"}, ""),
        ),
        (
            {"type": "shell_call", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "output": [{"stdout": "a.py"}]},
            *("shell", {"commands": ["ls"]}, '[{"stdout": "a.py"}]'),
        ),
    ],
)
def test_calls_of_tools_that_clients_run_themselves_are_calls(call, result, name, arguments, text):
    items = [*HI, call | {"call_id": "c1"}, result | {"call_id": "c1"}]
    _, said, told = parse_responses({"model": "m", "input": items}).conversation.messages
    assert (said.calls[0].name, said.calls[0].values(), told.text, told.answers) == (name, arguments, text, "c1")


# ---------------------------------------------------------------- what a text-only model cannot see

PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


@pytest.mark.parametrize(
    ("part", "text", "word"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}, IMAGE, "image"),
        ({"type": "image_url", "image_url": "https://x/y.png"}, IMAGE, "image"),
        ({"type": "file", "file": {"file_id": "f1"}}, DOCUMENT, "document"),
        ({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
         "[audio omitted: this model reads text only]", "audio"),
        ({"type": "video_url", "video_url": {"url": "https://x"}}, "[video omitted: this model reads text only]", "video"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["user", "tool"])
def test_media_in_a_chat_is_replaced_by_words(role, part, text, word):
    told = {"role": role, "content": [{"type": "text", "text": "See: "}, part]}
    told |= {"tool_call_id": "c1"} if role == "tool" else {}
    request = parse_chat(CHAT[1] | {"messages": [told]})
    assert request.conversation.messages[0].text == "See: " + text
    assert [*request.omitted] == [word]


@pytest.mark.parametrize(
    ("block", "text", "words"),
    [
        ({"type": "image", "source": PNG}, IMAGE, ["image"]),
        ({"type": "image", "source": {"type": "url", "url": "https://x"}, "cache_control": None}, IMAGE, ["image"]),
        ({"type": "document", "source": {**PNG, "media_type": "application/pdf"}, "title": "A"}, "A\n" + DOCUMENT, ["document"]),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "abc"}}, "abc", []),
        ({"type": "document", "title": "T", "context": "C",
          "source": {"type": "content", "content": [{"type": "text", "text": "abc"}]}}, "T\nC\nabc", []),
        ({"type": "search_result", "title": "T", "source": "https://x", "content": [{"type": "text", "text": "abc"}]},
         "T\nhttps://x\nabc", []),
        ({"type": "container_upload", "file_id": "f"}, DOCUMENT, ["document"]),
    ],
)  # fmt: skip
def test_media_in_anthropics_dialect_is_replaced_by_words_and_texts_are_read(block, text, words):
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    request = parse_messages(MESSAGES[1] | {"messages": [{"role": "user", "content": [result, block]}]})
    assert [message.text for message in request.conversation.messages] == [text, text]
    assert [*request.omitted] == words
    assert (
        parse_count({"model": "m", "messages": [{"role": "user", "content": [block]}]}).conversation.messages[0].text
        == text
    )


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "input_image", "image_url": "data:image/png;base64,x", "detail": "auto"}, IMAGE),
        ({"type": "input_file", "file_id": "f1"}, DOCUMENT),
    ],
)
def test_media_in_a_response_is_replaced_by_words(part, text):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "See: "}, part]},
        {"type": "function_call", "call_id": "c1", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [part]},
    ]
    request = parse_responses({"model": "m", "input": items})
    assert [message.text for message in request.conversation.messages] == ["See: " + text, "", text]
    assert len(request.omitted) == 1


async def test_the_caller_is_told_what_was_left_out_and_no_byte_of_it_is_kept():
    image = {"type": "image", "source": {**PNG, "data": "QUJD" * 100}}
    async with world("hello") as w:
        for stream in (False, True):
            body = MESSAGES[1] | {"messages": [{"role": "user", "content": [image, image]}], "stream": stream}
            status, headers, _ = await w.post("/v1/messages", body)
            assert (status, headers["x-ostinato-omitted"]) == (200, "image")
        assert IMAGE in decode(w.log.turns()[0].prompt_ids)
        assert "QUJD" not in decode(w.log.turns()[0].prompt_ids)
        assert "x-ostinato-omitted" not in (await w.chat())[1]


@pytest.mark.parametrize("block", [{"type": "document", "source": 5}, {"type": "search_result", "title": "x"}])
def test_a_block_without_what_it_needs_is_refused_by_name(block):
    with pytest.raises(BadRequest) as caught:
        parse_messages(MESSAGES[1] | {"messages": [{"role": "user", "content": [block]}]})
    assert caught.value.field.startswith("messages[0].content[0].")


# ---------------------------------------------------------------- tools

STRICT_TOOLS = [
    (*CHAT, {"type": "function", "function": {"name": "read", "parameters": SCHEMA, "strict": True}}),
    (*MESSAGES, {"name": "read", "input_schema": SCHEMA, "strict": True}),
    (*RESPONSES, {"type": "function", "name": "read", "parameters": SCHEMA, "strict": True}),
]


@pytest.mark.parametrize(("parse", "body", "tool"), STRICT_TOOLS)
def test_strict_tools_are_offered_where_the_model_may_also_answer_in_text_and_it_is_told(parse, body, tool):
    request = parse(body | {"tools": [tool]})
    assert [offered.strict for offered in request.conversation.tools] == [True]
    assert (request.conversation.demand, [*request.omitted]) == (None, ["strict-tools"])
    none = parse(body | {"tools": [tool], "tool_choice": {"type": "none"} if parse is parse_messages else "none"})
    assert [*none.omitted] == []


@pytest.mark.parametrize(
    ("parse", "body", "tool", "choice"),
    [
        (*STRICT_TOOLS[0], "required"),
        (*STRICT_TOOLS[1], {"type": "any"}),
        (*STRICT_TOOLS[2], "required"),
    ],
)
def test_nothing_is_left_out_of_strict_tools_where_a_call_is_demanded(parse, body, tool, choice):
    assert [*parse(body | {"tools": [tool], "tool_choice": choice}).omitted] == []


def test_examples_of_a_tools_input_are_put_into_its_description():
    tool = {"name": "read", "description": "Read.", "input_schema": SCHEMA, "input_examples": [{"path": "ä.py"}, {}]}
    (offered,) = parse_messages(MESSAGES[1] | {"tools": [tool]}).conversation.tools
    assert offered.description == 'Read.\n\nExamples of its input:\n{"path": "ä.py"}\n{}'
    (bare,) = parse_messages(MESSAGES[1] | {"tools": [tool | {"input_examples": []}]}).conversation.tools
    assert bare.description == "Read."


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "local_shell", "image_generation", "tool_search"])
def test_a_tool_that_is_not_there_is_not_offered_and_that_is_told(kind):
    request = parse_responses({"model": "m", "input": "hi", "tools": [{"type": kind}]})
    assert (request.conversation.tools, [*request.omitted]) == ((), [f"tool-{kind.replace('_', '-')}"])


def space(name, *tools, **more):
    return {"type": "namespace", "name": name, "description": "The web.", "tools": [*tools], **more}


def function(name, **more):
    return {"type": "function", "name": name, "description": "Searches.", "parameters": SCHEMA, "strict": False, **more}


@pytest.mark.parametrize(("name", "known"), [("mcp__web", "mcp__web__find"), ("mcp__web__", "mcp__web__find")])
def test_the_functions_in_a_namespace_are_offered(name, known):
    request = parse_responses({"model": "m", "input": "hi", "tools": [space(name, function("find"), function("get"))]})
    find, get = request.conversation.tools
    assert (find.name, find.description) == (known, f"Searches.\n\nAll tools of {name}: The web.")
    assert (get.description, get.parameters, [*request.omitted]) == ("Searches.", SCHEMA, [])


def test_the_same_name_in_two_namespaces_is_two_tools():
    tools = [space("a", function("find")), space("b", function("find")), function("find")]
    offered = parse_responses({"model": "m", "input": "hi", "tools": tools}).conversation.tools
    assert [tool.name for tool in offered] == ["a__find", "b__find", "find"]


def test_a_namespace_may_come_twice_but_two_tools_may_not_share_a_name():
    again = {"type": "tool_search_output", "call_id": "c", "tools": [space("a", function("find"))]}
    request = parse_responses({"model": "m", "input": [*HI, again], "tools": [space("a", function("find"))]})
    assert [tool.name for tool in request.conversation.tools] == ["a__find"]
    with pytest.raises(BadRequest, match="'a__find' already") as caught:
        parse_responses({"model": "m", "input": "hi", "tools": [function("a__find"), space("a", function("find"))]})
    assert caught.value.field == "tools[1].tools[0].name"


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        (space("a", {"type": "web_search"}), "tools[0].tools[0].type"),
        (space("a", function("")), "tools[0].tools[0].name"),
        (space("", function("x")), "tools[0].name"),
        (space("a", *(function(f"f{i}") for i in range(1025))), "tools[0].tools[1024]"),
        ({"type": "namespace", "name": "a"}, "tools[0].tools"),
        (space("a", function("x", **{"async": True})), "tools[0].tools[0].async"),
    ],
)
def test_a_namespace_that_cannot_be_offered_is_refused_by_name(tool, field):
    with pytest.raises(BadRequest) as caught:
        parse_responses({"model": "m", "input": "hi", "tools": [tool]})
    assert caught.value.field == field


async def test_a_call_in_a_namespace_is_told_with_both_names_and_continues_when_it_comes_back():
    call = '<tool_call>\n{"name": "mcp__web__find", "arguments": {"path": "x"}}\n</tool_call>'
    body = {"model": "m", "tools": [space("mcp__web", function("find"))], "user": "ann"}
    async with world(call) as w:
        _, _, first = await w.post("/v1/responses", body | {"input": HI})
        (item,) = first["output"]
        assert (item["type"], item["name"], item["namespace"]) == ("function_call", "find", "mcp__web")
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "found"}
        _, _, raw = await w.post("/v1/responses", body | {"input": [*HI, item, result], "stream": True})
        one, two = w.log.turns()
        assert two.parent == one.id
        told = [json.loads(block.partition(b"data: ")[2]) for block in raw.strip().split(b"\n\n")]
        (done,) = [event for event in told if event["type"] == "response.function_call_arguments.done"]
        assert done["name"] == "find"


def test_a_tool_of_a_namespace_can_be_demanded_by_the_clients_name():
    body = {"model": "m", "input": "hi", "tools": [space("a", function("find"))]}
    demand = parse_responses(body | {"tool_choice": {"type": "function", "name": "find"}}).conversation.demand
    assert demand.calls == ("a__find",)
