"""An answer that a stop string ended says so in the dialects that have words for it, and says which."""

import json

import pytest
from tests.unit.serve.gateway_world import ASK, events, world

from ostinato.serve.calls.capture import stop_string

MESSAGES = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"name": "read", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "more", "told"),
    [
        ("one END two", {"stop_sequences": ["END"]}, ("stop_sequence", "END")),
        ("one END two", {"stop_sequences": ["two", "END", "ND"]}, ("stop_sequence", "END")),
        ("one END two", {"stop_sequences": ["END two", "END"]}, ("stop_sequence", "END")),
        ("one", {"stop_sequences": ["one"]}, ("stop_sequence", "one")),
        ("zwölf \u2028x", {"stop_sequences": ["\u2028"]}, ("stop_sequence", "\u2028")),
        ("one", {"stop_sequences": ["END"]}, ("end_turn", None)),
        ("one EN", {"stop_sequences": ["END"]}, ("end_turn", None)),
        ("one END", {"stop_sequences": ["END"], "max_tokens": 2}, ("max_tokens", None)),
        ("one", {}, ("end_turn", None)),
        (CALL + " END", {"stop_sequences": ["END"], "tools": TOOLS}, ("tool_use", None)),
    ],
)
async def test_anthropics_dialect_names_the_stop_sequence(answer, more, told, stream):
    async with world(answer) as w:
        _, _, body = await w.post("/v1/messages", MESSAGES | more | {"stream": stream})
        if stream:
            last = [json.loads(block.partition(b"data: ")[2]) for block in body.strip().split(b"\n\n")][-2]
            body = last["delta"]
        assert (body["stop_reason"], body["stop_sequence"]) == told


async def test_a_repeat_names_it_too():
    async with world("one END two") as w:
        for _ in range(2):
            asked = MESSAGES | {"stop_sequences": ["END"]}
            _, _, body = await w.post("/v1/messages", asked, headers={"idempotency-key": "k"})
            assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
        assert len(w.log.turns()) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_openais_dialects_say_stop_and_show_nothing_of_the_stop_string(path, stream):
    body = ASK if path.startswith("/v1/chat") else {"model": "m", "prompt": "x"}
    async with world("one END two") as w:
        _, _, reply = await w.post(path, body | {"stop": "END", "stream": stream, "max_tokens": 99})
        choices = [c for e in events(reply)[:-1] for c in e["choices"]] if stream else reply["choices"]
        text = "".join(
            c.get("text") or (c.get("delta") or c.get("message") or {}).get("content") or "" for c in choices
        )
        assert (text, choices[-1]["finish_reason"]) == ("one ", "stop")


@pytest.mark.parametrize(
    ("sampled", "shown", "stops", "found"),
    [
        ("ab", "a", ("b",), "b"),
        ("abc", "a", ("bc", "b"), "b"),
        ("abc", "a", ("c",), ""),
        ("abc", "x", ("c",), ""),
        ("abc", "abc", ("c",), ""),
        ("", "", ("c",), ""),
        ("c", "", ("c",), "c"),
    ],
)
def test_the_stop_string_is_the_one_that_was_complete_first(sampled, shown, stops, found):
    assert stop_string(sampled, shown, stops) == found
