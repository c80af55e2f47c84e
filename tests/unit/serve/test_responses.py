"""OpenAI's responses dialect: what it takes, what it refuses, and its events as the official client reads them."""

import asyncio
import json

import pytest
from gateway_world import world
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.errors import BadRequest
from ostinato.core.records import Finish
from ostinato.serve.dialects.responses import Responses, parse_responses
from ostinato.serve.dialects.responses_items import Offered
from ostinato.testing.engine import FakeEngine

EVENT = TypeAdapter(ResponseStreamEvent)
READ = {
    "type": "function",
    "name": "read",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
EXEC = {
    "type": "custom",
    "name": "exec",
    "description": "Run a script.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "calc.py"}}\n</tool_call>'
RUN = '<tool_call>\n{"name": "exec", "arguments": {"input": "text(1)\\n"}}\n</tool_call>'
CODEX = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Environment."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
    ],
    "tools": [READ | {"strict": False}, {"type": "namespace", "name": "x", "tools": []}, {"type": "web_search"}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"thread": "0199"},
    "text": {"verbosity": "low"},
}


async def ask(w, headers=None, **fields):
    return await w.post("/v1/responses", {"model": "m", "input": "fix it", **fields}, headers=headers)


def told(raw):
    """The events of a stream, each as the official client types it."""
    blocks = [block.split(b"\n") for block in raw.strip().split(b"\n\n")]
    events = [json.loads(data.removeprefix(b"data: ")) for _, data in blocks]
    assert [name.removeprefix(b"event: ").decode() for name, _ in blocks] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return [EVENT.validate_python(event) for event in events]


def test_what_codex_sends_is_taken():
    conversation = parse_responses(CODEX).conversation
    assert [(message.role, message.text) for message in conversation.messages] == [
        (Role.SYSTEM, "You are a coding agent.\nRules."),
        (Role.USER, "Environment.\nFix it."),
    ]
    assert [tool.name for tool in conversation.tools] == ["read"]


def test_tools_that_come_as_an_item_are_offered():
    item = {"type": "additional_tools", "tools": [EXEC, READ]}
    request = parse_responses({**CODEX, "tools": None, "input": [item, *CODEX["input"]]})
    assert [tool.name for tool in request.conversation.tools] == ["exec", "read"]
    assert request.offered == {"exec": Offered("exec", custom=True), "read": Offered("read")}
    assert "start: /.+/" in request.conversation.tools[0].description


def test_items_become_messages_that_take_turns():
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "phase": "final",
         "content": [{"type": "output_text", "text": "Look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "read", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "exec", "input": "text(1)"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]  # fmt: skip
    calls = (
        ToolCall(id="c1", name="read", arguments="{}"),
        ToolCall(id="c2", name="exec", arguments='{"input": "text(1)"}'),
    )
    assert parse_responses({"model": "m", "input": items}).conversation.messages == (
        Message(role=Role.USER, text="a"),
        Message(role=Role.ASSISTANT, text="Look.", reasoning="Hm.", calls=calls),
        Message(role=Role.TOOL, text="1", answers="c1"),
        Message(role=Role.TOOL, text="2", answers="c2"),
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction_trigger"}, {"role": "user", "content": "x"}]}, "input"),
        (
            {
                "input": [{"role": "user", "content": "x"}, {"type": "compaction_trigger"}],
                "tool_choice": "required",
                "tools": [READ],
            },
            "tool_choice",
        ),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "r"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"role": "assistant", "content": ""}]}, "input"),
        ({"input": [{"type": "additional_tools", "tools": 7}]}, "input[0].tools"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "read"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"background": True}, "background"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"context_management": [{"type": "forget"}]}, "context_management[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields, field):
    with pytest.raises(BadRequest) as caught:
        parse_responses({"model": "m", "input": "hi"} | fields)
    assert caught.value.field == field


@pytest.mark.parametrize("hints", ["auto", [], 7, {}, {"mode": "x", "foo": 1}, {"prewarm": False, "ttl": [1]}])
def test_hints_to_the_cache_are_ignored(hints):
    assert parse_responses({"model": "m", "input": "hi", "prompt_cache_options": hints}).conversation == (
        parse_responses({"model": "m", "input": "hi"}).conversation
    )


async def test_a_response_is_as_the_client_types_it():
    async with world("Let me look. " + CALL) as w:
        status, headers, body = await ask(w, tools=[READ])
        assert status == 200
        response = Response.model_validate(body, strict=False)
        assert [item.type for item in response.output] == ["message", "function_call"]
        assert response.output_text == "Let me look."
        assert json.loads(response.output[1].arguments) == {"path": "calc.py"}
        assert (response.status, response.id) == ("completed", headers["request-id"])
        (turn,) = w.log.turns()
        assert (turn.finish, response.usage.input_tokens) == (Finish.TOOL_CALLS, len(turn.prompt_ids))


async def test_a_stream_has_every_event_and_each_item_is_done_before_the_next():
    async with world("Let me look. " + CALL + RUN) as w:
        _, _, raw = await ask(w, tools=[READ, EXEC], stream=True)
        stream = told(raw)
        assert [event.type.removeprefix("response.") for event in stream if not event.type.endswith(".delta")] == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
            "output_item.added", "function_call_arguments.done", "output_item.done",
            "output_item.added", "custom_tool_call_input.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        done = [event.item for event in stream if event.type == "response.output_item.done"]
        last = stream[-1].response
        assert [item.id for item in last.output] == [item.id for item in done]
        assert (done[2].name, done[2].input) == ("exec", "text(1)\n")
        assert last.output_text == "Let me look."
        assert json.loads(raw.split(b"data: ")[-1])["response"]["ostinato"]["turns"] == [w.log.turns()[0].id]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_is_incomplete(stream):
    async with world("hello") as w:
        _, _, body = await ask(w, max_output_tokens=3, stream=stream)
        response = told(body)[-1].response if stream else Response.model_validate(body)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output_text == "hel"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_text_is_an_empty_message(stream):
    async with world("") as w:
        _, _, body = await ask(w, stream=stream)
        response = told(body)[-1].response if stream else Response.model_validate(body)
        assert [item.type for item in response.output] == ["message"]


async def test_what_codex_sends_back_continues_the_sampled_ids():
    answers = iter(["Let me look. " + CALL + RUN, "Done."])
    async with world(engine=FakeEngine(lambda _: next(answers))) as w:
        session = {"session-id": "0199-7"}
        _, _, first = await ask(w, session, tools=[READ, EXEC])
        results = [
            {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "def add()"},
            {"type": "custom_tool_call_output", "call_id": first["output"][2]["call_id"], "output": "1"},
        ]
        asked = [{"role": "user", "content": "fix it"}]
        status, _, second = await ask(w, session, tools=[READ, EXEC], input=[*asked, *first["output"], *results])
        assert status == 200, second
        one, two = w.log.turns()
        known = one.prompt_ids + one.sampled_ids
        assert (two.parent, two.prompt_ids[: len(known)]) == (one.id, known)
        assert two.episode == "0199-7"


async def test_errors_have_the_dialects_shape():
    class Failing(FakeEngine):
        async def generate(self, request):
            async for chunk in super().generate(request):
                yield chunk
                raise RuntimeError

    async with world(engine=Failing(lambda _: "hello")) as w:
        status, _, body = await ask(w, input="x" * 5000)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        _, headers, raw = await ask(w, stream=True)
        created, *_, failed = told(raw)
        assert failed.type == "response.failed"
        assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
        assert failed.response.id == created.response.id == headers["x-request-id"]
        assert failed.response.model == "m"


@pytest.mark.parametrize("after", [0, 1], ids=["before the first token", "in the middle"])
async def test_the_official_client_reads_why_a_stream_ended(after, monkeypatch):
    """Its helper takes no event before `response.created`, and none of another response."""
    beats = []
    monkeypatch.setattr(Responses, "heartbeat", lambda self: beats.append(1) or ": waiting\n\n")

    class Failing(FakeEngine):
        async def generate(self, request):
            sent = 0
            async for chunk in super().generate(request):
                if sent == after:
                    while not beats:  # one sends the head
                        await asyncio.sleep(0.005)
                    raise RuntimeError
                yield chunk
                sent += 1

    async with world(engine=Failing(lambda _: "hello"), heartbeat_s=0.01) as w:
        _, _, raw = await ask(w, stream=True)
        events = told(raw[raw.index(b"event: ") :].replace(b": waiting\n\n", b""))
        state = ResponseStreamState(input_tools=omit, text_format=omit)
        passed = [each for event in events for each in state.handle_event(event)]
        assert [event.type for event in passed[:2]] == ["response.created", "response.in_progress"]
        assert passed[-1].type == "response.failed"
        assert "RuntimeError" in passed[-1].response.error.message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_repeats_what_was_asked(stream):
    asked = {
        "instructions": "Be short.",
        "max_output_tokens": 50,
        "metadata": {"run": "7"},
        "parallel_tool_calls": False,
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "none",
        "tools": [READ | {"strict": False}],
        "top_p": 1.0,
        "user": "ann",
    }
    async with world("hello") as w:
        _, _, body = await ask(w, stream=stream, **asked)
        for response in (
            [body] if not stream else [event.response.model_dump() for event in (told(body)[0], told(body)[-1])]
        ):
            Response.model_validate(response, strict=False)
            assert {name: response[name] for name in asked if name != "text"} == {
                n: v for n, v in asked.items() if n != "text"
            } | ({"tools": response["tools"]})
            assert response["text"]["verbosity"] == "low"
            assert response["tools"][0]["name"] == "read"
            assert response["previous_response_id"] is None
