"""Anthropic's dialect through the gateway."""

import json

import pytest
from gateway_world import world

from ostinato.core.records import Finish
from ostinato.testing.engine import FakeEngine

ASK = {"model": "m", "max_tokens": 128_000, "messages": [{"role": "user", "content": "fix it"}]}
TOOLS = [{"name": "Read", "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}}}]
CALL = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "calc.py"}}\n</tool_call>'
CLAUDE = {"x-claude-code-session-id": "7b0c"}


async def ask(w, headers=CLAUDE, path="/v1/messages?beta=true", **fields):
    return await w.post(path, {**ASK, **fields}, headers={"anthropic-version": "2023-06-01", **headers})


def told(raw):
    """The events of a stream, each with the name that its `event:` line says."""
    lines = [block.split(b"\n") for block in raw.strip().split(b"\n\n")]
    return [(name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))) for name, data in lines]


async def test_a_message_is_answered_and_captured():
    async with world("Let me look. " + CALL) as w:
        status, headers, body = await ask(w, tools=TOOLS)
        (turn,) = w.log.turns()
        assert status == 200
        assert headers["request-id"] == body["id"] == turn.id.removesuffix(":0")
        assert [block["type"] for block in body["content"]] == ["text", "tool_use"]
        assert (body["stop_reason"], body["content"][1]["input"]) == ("tool_use", {"file_path": "calc.py"})
        assert (turn.finish, turn.episode) == (Finish.TOOL_CALLS, "7b0c")
        assert body["usage"]["input_tokens"] == len(turn.prompt_ids)


async def test_a_stream_has_every_event_that_clients_wait_for():
    async with world("Let me look. " + CALL) as w:
        _, _, raw = await ask(w, tools=TOOLS, stream=True)
        stream = told(raw)
        assert all(name == data["type"] for name, data in stream)
        names = [name for name, data in stream if data["type"] != "content_block_delta"]
        assert names == [
            "message_start", "ping", "content_block_start", "content_block_stop", "content_block_start",
            "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        assert stream[-2][1]["delta"]["stop_reason"] == "tool_use"
        assert stream[-2][1]["ostinato"]["turns"] == [w.log.turns()[0].id]


async def test_what_claude_code_sends_back_continues_the_sampled_ids():
    answers = iter(["Let me look. " + CALL, "Done."])
    async with world(engine=FakeEngine(lambda _: next(answers))) as w:
        _, _, first = await ask(w, tools=TOOLS)
        text, use = first["content"]
        use["input"] = {**use["input"], "replace_all": False}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "def add()"}]}
        history = [
            *ASK["messages"],
            {"role": "assistant", "content": [text, {**use, "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": [result]},
        ]
        await ask(w, tools=TOOLS, messages=history)
        one, two = w.log.turns()
        known = one.prompt_ids + one.sampled_ids
        assert (two.parent, two.prompt_ids[: len(known)]) == (one.id, known)


async def test_one_conversation_may_go_on_in_another_dialect():
    async with world("yellow") as w:
        await ask(w)
        more = [*ASK["messages"], {"role": "assistant", "content": "yellow"}, {"role": "user", "content": "and?"}]
        await w.chat({"x-ostinato-episode": "7b0c"}, messages=more)
        one, two = w.log.turns()
        assert two.parent == one.id


async def test_tokens_are_counted_as_the_prompt_has_them():
    async with world() as w:
        fields = {name: ASK[name] for name in ("model", "messages")}
        status, _, body = await w.post("/v1/messages/count_tokens", {**fields, "tools": TOOLS, "system": "Be brief."})
        await ask(w, tools=TOOLS, system="Be brief.")
        assert (status, body) == (200, {"input_tokens": len(w.log.turns()[0].prompt_ids)})
        assert len(w.log.turns()) == 1


@pytest.mark.parametrize(
    ("path", "fields", "status", "kind"),
    [
        ("/v1/messages", {"max_tokens": 0}, 400, "invalid_request_error"),
        ("/v1/messages", {"model": "gpt-4"}, 404, "not_found_error"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "invalid_request_error"),
        ("/v1/messages/count_tokens", {"messages": []}, 400, "invalid_request_error"),
    ],
)
async def test_errors_have_the_dialects_shape(path, fields, status, kind):
    async with world() as w:
        got, _, body = await ask(w, path=path, **fields)
        assert (got, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert w.log.turns() == []


async def test_a_prompt_that_is_too_long_says_so_in_the_words_that_agents_look_for():
    async with world() as w:
        _, _, body = await ask(w, messages=[{"role": "user", "content": "x" * 5000}])
        assert body["error"]["message"].startswith("prompt is too long")


async def test_an_engine_that_fails_in_mid_stream_ends_it_with_an_error_event():
    class Failing(FakeEngine):
        async def generate(self, request):
            async for chunk in super().generate(request):
                yield chunk
                raise RuntimeError

    async with world(engine=Failing(lambda _: "hello")) as w:
        _, _, raw = await ask(w, stream=True)
        assert told(raw)[-1][0] == "error"
        assert b"[DONE]" not in raw
