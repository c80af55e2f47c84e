"""No stream and no answer holds a character at which some client ends a line, in any dialect."""

import json

import pytest
from gateway_world import world

ENDS = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven\x1eeight"
CALLED = '<tool_call>\n{"name": "read\u2028", "arguments": {"path\u2029": "a\u0085b"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"path\u2029": {"type": "string"}}}
FUNCTION = {"name": "read\u2028", "description": "Reads.", "parameters": SCHEMA}
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 999},
    "/v1/completions": {"prompt": "x", "max_tokens": 999},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 999},
}
TOOLS = {
    "/v1/chat/completions": [{"type": "function", "function": FUNCTION}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
    "/v1/messages": [{"name": "read\u2028", "input_schema": SCHEMA}],
}


def texts(value):
    """All strings in a JSON value, its keys too, joined."""
    if isinstance(value, dict):
        return "".join(texts(key) + texts(item) for key, item in value.items())
    if isinstance(value, list):
        return "".join(map(texts, value))
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize("path", ASKED)
async def test_a_stream_survives_a_client_that_splits_lines_as_python_does(path):
    async with world(ENDS) as w:
        status, _, raw = await w.post(path, {"model": "m", "stream": True, **ASKED[path]})
        assert status == 200
        lines = raw.decode().splitlines()
        said = texts([json.loads(line[6:]) for line in lines if line.startswith("data: {")])
        assert all(line.partition(":")[0] in ("", "data", "event") for line in lines)
        for end in "\u2028\u2029\u0085\x0b\x0c\x1c\x1e":
            assert end in said


@pytest.mark.parametrize("path", ASKED)
async def test_a_whole_answer_is_one_line(path):
    async with world(ENDS) as w:
        status, _, body = await w.post(path, {"model": "m", **ASKED[path]})
        assert status == 200
        assert ENDS in texts(body)
        reply = await w.http.post(path, json={"model": "m", **ASKED[path]})
        assert len(reply.content.decode().splitlines()) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TOOLS)
async def test_calls_are_one_line(path, stream):
    async with world(CALLED) as w:
        body = {"model": "m", "stream": stream, "tools": TOOLS[path], **ASKED[path]}
        reply = await w.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert "read" in reply.text
        for end in "\u2028\u2029\u0085":
            assert end not in reply.text
