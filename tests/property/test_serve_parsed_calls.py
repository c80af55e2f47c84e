"""The calls that a turn stores are those that its client was sent, in every dialect, whatever was sampled and however it ended."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.family_answers import ANSWERS, TEMPLATES
from tests.unit.serve.gateway_world import events, eventually, world

from ostinato.core.records import Finish
from ostinato.model.answer_reader import Reader, format_for
from ostinato.release.monitors.turn_text import take_apart
from ostinato.testing.engine import FakeEngine
from ostinato.testing.renderer import ByteRenderer

ASKED = [{"role": "user", "content": "Read both."}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "count": {"type": "integer"}}}
NAMES = ("edit", "read")
CHAT = {
    "model": "m",
    "messages": ASKED,
    "tools": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES],
    "max_tokens": 3_000,
}
MESSAGES = {
    "model": "m",
    "messages": ASKED,
    "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
    "max_tokens": 3_000,
}
RESPONSES = {
    "model": "m",
    "input": ASKED,
    "tools": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES],
    "max_output_tokens": 3_000,
}
ONE_CALL = {"disable_parallel_tool_use": True}
BODIES = {
    "/v1/chat/completions": (CHAT, {"parallel_tool_calls": False}),
    "/v1/messages": (MESSAGES, {"tool_choice": {"type": "auto", **ONE_CALL}}),
    "/v1/responses": (RESPONSES, {"parallel_tool_calls": False}),
}
FAMILIES = sorted({family for family, *_ in ANSWERS})


class OfFamily(ByteRenderer):
    """Reads answers as those of a family of models are read."""

    def __init__(self, family):
        super().__init__(context=8_192)
        self._format = format_for(TEMPLATES[family], ())

    def reader(self, conversation, turn):
        return Reader(self._format, tools=conversation.tools, turn=turn)


def sent(path, stream, body):
    """(name, arguments) of the calls that a client of this dialect got, and the text, of each choice."""
    if path == "/v1/messages":
        blocks = _streamed_blocks(body) if stream else body["content"]
        calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        return [(calls, "".join(block["text"] for block in blocks if block["type"] == "text"))]
    if path == "/v1/responses":
        output = (json.loads(body.strip().split(b"data: ")[-1])["response"] if stream else body)["output"]
        calls = [(item["name"], json.loads(item["arguments"])) for item in output if item["type"] == "function_call"]
        said = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
        return [(calls, "".join(said))]
    choices = [each for event in events(body)[:-1] for each in event["choices"]] if stream else body["choices"]
    found = {}
    for choice in choices:
        message = choice["delta" if stream else "message"]
        calls, text = found.setdefault(choice["index"], ([], []))
        calls += [
            (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or ()
        ]
        text.append(message.get("content") or "")
    return [(calls, "".join(text)) for _, (calls, text) in sorted(found.items())]


def _streamed_blocks(body):
    told = [json.loads(block.partition(b"data: ")[2]) for block in body.strip().split(b"\n\n")]
    blocks = {}
    for event in told:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            block["json"] += delta.get("partial_json", "")
            block["text"] = block.get("text", "") + delta.get("text", "")
    return [block | ({"input": json.loads(block["json"])} if block["json"] else {}) for block in blocks.values()]


def check(turn, calls, text):
    """The turn against what its client got: each call, its arguments where the turn says that they stand, and malformed ones as text."""
    assert [call.name for call in turn.calls if call.name] == [name for name, _ in calls]
    assert all(0 <= call.start < call.end <= len(turn.text) for call in turn.calls)
    seen = take_apart(turn)
    for call, (name, arguments) in zip(seen.calls, calls, strict=True):
        assert call.name == name
        assert {key: str(value) for key, value in call.arguments.items()} == {
            key: str(value) for key, value in arguments.items()
        }
    malformed = [turn.text[call.start : call.end].strip() for call in turn.calls if not call.name]
    assert seen.broken_calls == len(malformed)
    assert all(each in text for each in malformed), "text is what the client got of it"
    assert (turn.finish is Finish.TOOL_CALLS) == bool(calls)


@st.composite
def answers(draw):
    """A family, and its answers, whole and cut, in any order."""
    family = draw(st.sampled_from(FAMILIES))
    whole = [sampled for name, sampled, *_ in ANSWERS if name == family and "analysis" not in sampled]
    parts = [*whole, *(sampled[: len(sampled) * 2 // 3] for sampled in whole), "Look.\n", " ", "{", "<tool_call>", "é"]
    return family, "".join(draw(st.lists(st.sampled_from(parts), max_size=4))) or "Yes."


@settings(deadline=None, max_examples=120)
@given(answers(), st.sampled_from([*BODIES]), st.booleans(), st.booleans())
async def test_what_a_turn_stores_of_its_calls_is_what_the_client_got(answer, path, stream, one_call):
    family, text = answer
    body, one = BODIES[path]
    async with world(text, renderer=OfFamily(family)) as w:
        status, _, reply = await w.post(path, body | {"stream": stream} | (one if one_call else {}))
        assert status == 200, reply
        ((calls, said),) = sent(path, stream, reply)
        (turn,) = w.log.turns()
        check(turn, calls, said)


HERMES = '<tool_call>{"name": "read", "arguments": {"path": "a.py"}}</tool_call>'
BROKEN = '<tool_call>{"name": "read"}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_has_its_own_calls(stream):
    async with world("Look. " + HERMES + BROKEN) as w:
        _, _, reply = await w.post("/v1/chat/completions", CHAT | {"n": 3, "stream": stream})
        told, turns = sent("/v1/chat/completions", stream, reply), w.log.turns()
        assert (len(told), len(turns)) == (3, 3)
        for (calls, text), turn in zip(told, turns, strict=True):
            check(turn, calls, text)
            assert [call.name for call in turn.calls] == ["read", ""]


@pytest.mark.parametrize("choice", ["required", "auto", "none"])
async def test_whatever_choice_of_tools_was_asked_for(choice):
    async with world(HERMES) as w:
        _, _, reply = await w.post("/v1/chat/completions", CHAT | {"tool_choice": choice})
        ((calls, text),) = sent("/v1/chat/completions", False, reply)
        check(w.log.turns()[0], calls, text)
        assert (len(calls), HERMES in text) == ((0, True) if choice == "none" else (1, False))


async def test_without_tools_and_without_a_conversation_there_are_no_calls():
    async with world(HERMES) as w:
        await w.chat()
        await w.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 200})
        assert [turn.calls for turn in w.log.turns()] == [(), ()]


async def test_a_repeat_stores_nothing_more():
    async with world(HERMES) as w:
        for _ in range(2):
            await w.post("/v1/chat/completions", CHAT, headers={"idempotency-key": "k"})
        (turn,) = w.log.turns()
        assert [call.name for call in turn.calls] == ["read"]


async def test_an_answer_that_the_engine_broke_off_has_the_calls_that_were_sent():
    text = HERMES + HERMES
    async with world(engine=FakeEngine(lambda _: text, fail_after=len(HERMES) + 20)) as w:
        await w.post("/v1/chat/completions", CHAT | {"stream": True})
        (turn,) = w.log.turns()
        assert turn.finish is Finish.ERROR
        assert [(call.name, call.start) for call in turn.calls] == [("read", 0), ("", len(HERMES))]


async def test_an_answer_whose_client_left_has_the_calls_that_were_sent():
    engine = FakeEngine(lambda _: HERMES + "x" * 2_000, delay_s=0.001)
    async with world(engine=engine, real=True) as w:
        _, writer = await w.connect(CHAT | {"stream": True})
        await eventually(lambda: engine.stats()["tokens"] > len(HERMES) + 3)
        writer.close()
        await eventually(lambda: w.log.turns())
        (turn,) = w.log.turns()
        assert (turn.finish, [call.name for call in turn.calls]) == (Finish.LEFT, ["read"])
